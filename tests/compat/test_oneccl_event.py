"""The third generation: every parameter of its document, both callbacks, every algorithm."""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch

import weft
from weft.compat.oneccl import event
from weft.kernels.ops import DTYPES
from weft.sparse import ALGORITHMS, last_call
from weft.testing import expected, run, spmd

WIDTH = 2
UNUSED = [None] * 4
CHOICES = ["auto", *ALGORITHMS]


def part(rank, dtype=torch.float32):
    """Unequal counts, none from rank 4 on, repeated indices, no order."""
    draw = torch.Generator().manual_seed(rank)
    count = max(0, 8 - 2 * rank)
    indices = torch.randint(9, (count,), generator=draw)
    return weft.Rows(indices, torch.randint(-4, 5, (count, WIDTH), generator=draw).to(dtype))


def parts(size, dtype=torch.float32):
    return [part(rank, dtype) for rank in range(size)]


class Kept:
    """A callback of either kind, and what it was called with."""

    def __init__(self):
        self.calls, self.buffers = [], None

    def complete(self, *arguments):
        self.calls.append(arguments)

    def allocate(self, *arguments):
        self.calls.append(arguments)
        idx_count, idx_dtype, val_count, val_dtype, _ = arguments
        self.buffers = (
            torch.zeros(idx_count, dtype=idx_dtype),
            torch.zeros(val_count, dtype=val_dtype),
        )
        return self.buffers

    def attr(self, how="complete", ctx=None, mode="regular"):
        name = {"complete": "completion_fn", "allocate": "alloc_fn"}[how]
        return event.create_sparse_allreduce_attr(
            fn_ctx=ctx, coalesce_mode=mode, **{name: getattr(self, how)}
        )

    def result(self):
        (call,) = self.calls
        idx, val = (call[0], call[3]) if self.buffers is None else self.buffers
        return idx.tolist(), val.tolist()


def flat(rows):
    return rows.indices.tolist(), rows.values.view(-1).tolist()


def sent(rows):
    return [rows.indices, rows.indices.numel(), rows.values, rows.values.numel(), *UNUSED]


def test_parameters_are_those_of_the_document():
    names = "send_ind_buf send_ind_count send_val_buf send_val_count recv_ind_buf recv_ind_count"
    names += " recv_val_buf recv_val_count ind_dtype val_dtype rtype comm stream attr deps"
    assert list(inspect.signature(event.sparse_allreduce).parameters) == names.split()


@spmd(1, 2, 3, 4, 7, 8)
def test_either_callback_with_every_parameter(group):
    comm, rows = event.create_communicator(), part(group.rank)
    assert (comm.rank(), comm.size()) == (group.rank, group.size)
    want = expected(parts(group.size))
    for how in ("complete", "allocate"):
        kept = Kept()
        attr = kept.attr(how, ctx="mine")
        made = event.sparse_allreduce(
            *sent(rows), torch.int64, torch.float32, "sum", comm, None, attr, []
        )
        made.wait()
        assert made.test()
        assert kept.result() == flat(want)
        sizes = (len(want), torch.int64), (len(want) * WIDTH, torch.float32)
        if how == "complete":
            (call,) = kept.calls
            assert (call[1:3], call[4:6]) == sizes
        else:
            assert kept.calls == [(*sizes[0], *sizes[1], "mine")]
        assert kept.calls[0][-1] == "mine"


@spmd(1, 2, on=("threads",))
def test_overloads(group):
    """Without dtypes, without a stream, by name: all are the same call."""
    rows, comm = part(group.rank), event.create_communicator()
    dtypes = [torch.int64, "float"]
    before = event.Event()
    for make in (
        lambda attr: event.sparse_allreduce(*sent(rows), "sum", comm, None, attr, [before]),
        lambda attr: event.sparse_allreduce(*sent(rows), "sum", comm, attr, [before]),
        lambda attr: event.sparse_allreduce(*sent(rows), "sum", comm, attr),
        lambda attr: event.sparse_allreduce(*sent(rows), "sum", comm, attr=attr),
        lambda attr: event.sparse_allreduce(*sent(rows), "sum", None, attr=attr),
        lambda attr: event.sparse_allreduce(*sent(rows), *dtypes, "sum", comm, attr, [before]),
        lambda attr: event.sparse_allreduce(*sent(rows), *dtypes, "sum", comm, attr=attr),
        lambda attr: event.sparse_allreduce(*sent(rows), None, None, "sum", comm, attr=attr),
        lambda attr: event.sparse_allreduce(*sent(rows), rtype="sum", comm=group, attr=attr),
        lambda attr: event.sparse_allreduce(
            *sent(rows), ind_dtype="int64", val_dtype="float", rtype="sum", comm=comm, attr=attr
        ),
    ):
        kept = Kept()
        make(kept.attr()).wait()
        assert kept.result() == flat(expected(parts(group.size)))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.int64, 1), (torch.int64, 3), (torch.int8, 2), (torch.uint64, 1), (torch.uint64, 4)],
)
@pytest.mark.parametrize("algorithm", [*CHOICES, "disable"])
def test_the_result_is_where_alloc_fn_wants_it(monkeypatch, algorithm, size, dtype):
    def program(group):
        kept, rows = Kept(), part(group.rank)
        rows = weft.Rows(rows.indices.to(dtype), rows.values)
        attr = kept.attr("allocate", mode=mode)
        event.sparse_allreduce(*sent(rows), "sum", group, attr=attr).wait()
        if mode == "regular":
            assert kept.result() == flat(expected(parts(group.size)))
            assert group.size == 1 or algorithm in ("auto", last_call().algorithm)

    mode = "disable" if algorithm == "disable" else "regular"
    if algorithm in ALGORITHMS:
        monkeypatch.setenv("CCL_SPARSE_ALLREDUCE", algorithm)
    run(size, program)


ROOMY = np.zeros(100, np.int64), np.zeros(200, np.float32)
GIVEN = {
    "numpy": lambda n, m: (np.zeros(n, np.int64), np.zeros(m, np.float32)),
    "more than enough": lambda n, m: (np.zeros(n + 3, np.int64), torch.zeros(m + 5)),
    "of other shapes": lambda n, m: [torch.zeros(n, 1).long(), torch.zeros(n, m // n)],
    "bytes": lambda n, m: (bytearray(n * 8), bytearray(m * 4)),
    "addresses": lambda n, m: tuple(each.ctypes.data for each in ROOMY),
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_alloc_fn_may_give(what):
    def program(group):
        made = []

        def allocate(n, _, m, *rest):
            made.extend(GIVEN[what if group.rank else "numpy"](n, m))
            return made

        attr = event.create_sparse_allreduce_attr(alloc_fn=allocate)
        event.sparse_allreduce(*sent(part(group.rank)), "sum", group, attr=attr).wait()
        want = flat(expected(parts(group.size)))
        where = ROOMY if group.rank and what == "addresses" else made
        for buffer, dtype, numbers in zip(where, (np.int64, np.float32), want, strict=True):
            held = np.frombuffer(np.asarray(buffer), dtype)
            assert held[: len(numbers)].tolist() == numbers
            assert not held[len(numbers) :].any()  # nothing is written beyond the counts

    for room in ROOMY:
        room.fill(0)
    run(2, program)


@pytest.mark.parametrize("how", ["complete", "allocate"])
@spmd(2, 3, on=("threads",))
def test_indices_of_which_all_are_above_the_half(group, how):
    """Then nobody has rows of the lower half; and the last rank has none at all."""
    kept = Kept()
    count = 0 if group.rank == group.size - 1 else 3
    indices = (torch.arange(count) + torch.iinfo(torch.int64).min).view(torch.uint64)
    rows = weft.Rows(indices, torch.ones(count, WIDTH))
    event.sparse_allreduce(*sent(rows), "sum", group, attr=kept.attr(how)).wait()
    numbers, sums = kept.result()
    assert numbers == [2**63 + number for number in range(3)]
    assert sums == [group.size - 1.0] * 3 * WIDTH


INDICES = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
TYPES = [*zip([*DTYPES, torch.uint64], INDICES * 2, strict=False)]


@pytest.mark.parametrize("dtype, index", TYPES, ids=str)
@pytest.mark.parametrize("how", ["complete", "allocate"])
@spmd(1, 3, on=("threads",))
def test_disable_gives_all_rows_in_rank_order(group, how, dtype, index):
    """Whatever the reduction: nothing is reduced, not even a rank's own repeated indices."""
    kept, rows = Kept(), part(group.rank, dtype)
    attr = kept.attr(how, mode="disable")
    rows = weft.Rows(rows.indices.to(index), rows.values)
    event.sparse_allreduce(*sent(rows), "max", group, attr=attr).wait()
    everyone = parts(group.size, dtype)
    assert kept.result() == (
        torch.cat([each.indices for each in everyone]).tolist(),
        torch.cat([each.values for each in everyone]).view(-1).tolist(),
    )


@spmd(2, on=("threads",))
def test_disable_has_the_same_checks(group):
    odd = group.rank == 1
    one, ones = torch.tensor([-4 if odd else 4]), torch.ones(1)
    for arguments, mode, text in (
        ([one, 1, ones, 1], "disable", "rank 1: index -4 is negative"),
        (
            [one.abs().to(torch.int8 if odd else torch.int64), 1, ones, 1],
            "disable",
            "rank 1 has sparse_allreduce of torch.int8 indices",
        ),
        (
            [one.abs(), 1, ones, 1],
            "regular" if odd else "disable",
            "different calls: rank 0 has sparse_all_gather .* rank 1 has sparse_all_reduce",
        ),
    ):
        with pytest.raises(weft.WeftError, match=text):
            event.sparse_allreduce(
                *arguments, *UNUSED, "sum", group, attr=Kept().attr(mode=mode)
            ).wait()


@spmd(2, on=("threads",))
def test_repeats_keep_their_precision(group):
    """256 + 1 on rank 0, and 1 on rank 1; 257 is a tie that bfloat16 rounds to 256."""
    values = torch.tensor([1.0] if group.rank else [256.0, 1.0]).bfloat16()
    rows = weft.Rows(torch.zeros(len(values), dtype=torch.int64), values)
    for mode, total in (("keep_precision", 258.0), ("regular", 256.0)):
        kept = Kept()
        event.sparse_allreduce(*sent(rows), "sum", group, attr=kept.attr(mode=mode)).wait()
        assert kept.result() == ([0], [total])


@pytest.mark.parametrize("mode", ["keep_precision", "regular"])
@spmd(4, on=("threads",))
def test_half_precision_adds_in_float32(group, mode):
    """256 + 1 + 1 + 1 is 259, a tie that bfloat16 rounds to 260; added one by one in bfloat16, 256
    would stay 256."""
    kept, values = Kept(), torch.tensor([1.0 if group.rank else 256.0], dtype=torch.bfloat16)
    rows, attr = weft.Rows(torch.tensor([3]), values), kept.attr(mode=mode)
    event.sparse_allreduce(*sent(rows), "sum", group, attr=attr).wait()
    assert kept.result() == ([3], [260.0])


@spmd(2, on=("threads",))
def test_deps_are_waited_for(group):
    """Buffers are read when what they depend on is done, not before."""
    rows, kept = part(group.rank), Kept()
    values, written = torch.full_like(rows.values, float("nan")), Future()
    work = weft.sparse_all_reduce((rows.indices, rows.values), async_op=True)
    made = event.sparse_allreduce(
        rows.indices, len(rows), values, values.numel(), *UNUSED, "sum", group,
        attr=kept.attr(), deps=[work, work.get_future(), event.Event(), written],
    )  # fmt: skip
    time.sleep(0.05)  # for whoever does not wait
    assert not made.test()
    values.copy_(rows.values)
    written.set_result(None)
    made.wait()
    assert kept.result() == flat(expected(parts(group.size)))


@spmd(2, on=("threads",))
def test_events_are_composed(group):
    kept, gate = [Kept(), Kept()], Future()
    rows = part(group.rank)
    first = event.sparse_allreduce(*sent(rows), "sum", group, attr=kept[0].attr())
    second = event.sparse_allreduce(
        *sent(rows), "max", group, attr=kept[1].attr(), deps=[first, gate]
    )
    both = event.compose(first, second)
    assert not both.test()
    with pytest.raises(weft.StillRunning):
        both.wait(timeout=0.01)
    gate.set_result(None)
    both.wait()
    assert both.test() and both and not both.cancel()
    assert kept[1].result() == flat(expected(parts(group.size), "max"))
    assert event.compose().test()

    bad, attr, gate = torch.tensor([-1 if group.rank else 1]), Kept().attr(), Future()
    failing = event.sparse_allreduce(bad, 1, bad, 1, *UNUSED, "sum", group, attr=attr)
    worse = event.sparse_allreduce(*sent(rows), "sum", group, attr=attr, deps=[gate])
    threading.Timer(0.05, gate.set_exception, [KeyError("lost")]).start()
    for _ in range(2):
        with pytest.raises(weft.WeftError, match="rank 1: index -1 is negative"):  # the first
            event.compose(failing, worse, first).wait()
        assert worse.test()  # waiting is for all of them


@spmd(2, on=("threads",))
def test_a_stream_is_brought_to_its_end(group):
    """Before the buffers are read, which its work writes."""

    class Stream:
        def synchronize(self):
            values.copy_(rows.values)

    kept, rows = Kept(), part(group.rank)
    values = torch.full_like(rows.values, float("nan"))
    given = sent(weft.Rows(rows.indices, values))
    event.sparse_allreduce(*given, "sum", group, Stream(), kept.attr()).wait()
    assert kept.result() == flat(expected(parts(group.size)))


def test_what_a_rank_can_see_for_itself_is_raised_by_the_call():
    def program(group):
        attr = event.SparseAllreduceAttr() if group.rank else Kept().attr()
        if group.rank:
            with pytest.raises(weft.WeftError, match="rank 1: attr has neither"):
                event.sparse_allreduce(*sent(part(1)), "sum", group, attr=attr)
        else:
            made = event.sparse_allreduce(*sent(part(0)), "sum", group, attr=attr)
            with pytest.raises(weft.WeftError, match="rank 1: attr has neither"):
                made.wait()

    run(2, program)
