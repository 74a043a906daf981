"""What fails on one rank is told to all, in `attempt` and in what the others call meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.base.errors import conclusion
from weft.call.attempt import preparing
from weft.call.opening import opened
from weft.testing import spmd


@spmd(1, 3)
def test_a_function_is_called_on_every_rank(group):
    assert weft.attempt(lambda: group.rank) == group.rank
    assert weft.attempt(lambda: None, group, name="nothing") is None


def failing(error):
    def function():
        raise error

    return function


@spmd(1, 3, 18, on=("threads",))  # above 16 ranks statements are passed on
def test_what_one_rank_raises_all_raise(group):
    last = group.size - 1
    for error, text in (
        (KeyError("lost"), f"rank {last}: KeyError: 'lost'"),
        (weft.WeftError("x is 3: pass 4"), f"rank {last}: x is 3: pass 4"),
        (weft.WeftError(f"rank {last}: x is 3"), f"rank {last}: x is 3"),
    ):
        with pytest.raises(weft.WeftError) as caught:
            weft.attempt(failing(error) if group.rank == last else lambda: 0)
        assert str(caught.value) == text
        assert caught.value.__cause__ is (error if group.rank == last else None)
        assert weft.attempt(lambda: 1) == 1


CALLS = {
    "sparse_all_reduce": lambda group: weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1))),
    "a list": lambda group: weft.sparse_all_reduce([(torch.tensor([1]), torch.ones(1))]),
    "sparse_all_gather": lambda group: weft.sparse_all_gather((torch.tensor([1]), torch.ones(1))),
    "all_to_all": lambda group: weft.all_to_all([torch.ones(2)] * group.size),
    "exchange": lambda group: weft.exchange(torch.ones(2), [torch.tensor([1])] * group.size),
    "all_reduce": lambda group: weft.all_reduce(torch.ones(2)),
    "a large all_reduce": lambda group: weft.all_reduce(torch.ones(50_000)),
}


@pytest.mark.parametrize("name", CALLS)
@spmd(3, 18, on=("threads",))
def test_a_rank_that_cannot_join_a_call_tells_those_that_are_in_it(group, name):
    with pytest.raises(weft.WeftError, match=r"^rank 1: OSError: no such file$"):
        if group.rank == 1:
            weft.attempt(failing(OSError("no such file")))
        else:
            CALLS[name](group)
    assert CALLS[name](group) is not None


@spmd(2, on=("threads",))
def test_names_are_compared_and_may_be_long(group):
    with pytest.raises(weft.WeftError, match=r"different calls: rank 0 has load 0 .* rank 1 has"):
        weft.attempt(lambda: None, name=f"load {group.rank}")
    assert weft.attempt(lambda: 5, name="ö" * 900) == 5


@spmd(2, on=("threads",))
def test_the_function_must_not_call_the_group(group):
    with pytest.raises(weft.WeftError, match=r"rank 0: all_reduce was called from inside attempt"):
        weft.attempt(lambda: weft.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("error", [weft.WeftError("only here"), MemoryError("only here")])
@spmd(3, limit=30.0)  # far below the deadline of the group
def test_what_one_rank_raises_behind_the_opening_ends_the_group_at_once(group, error):
    def job():
        opened(group, "test", {})
        if group.rank == 1:
            raise error
        group.all_gather_bytes(b"on", bytes)

    if group.rank == 1:
        with pytest.raises(type(error), match="only here"):
            group.worker.call("test", job)
    else:
        with pytest.raises(weft.WireError, match=r"rank 1 gave up: \w+: only here"):
            group.worker.call("test", job)
    with pytest.raises(weft.WireError):
        weft.barrier()


@spmd(3)
def test_what_all_conclude_behind_the_opening_leaves_the_group(group):
    def job():
        opened(group, "test", {})
        raise conclusion("the ranks are three")

    with pytest.raises(weft.WeftError, match="the ranks are three"):
        group.worker.call("test", job)
    assert weft.all_reduce(torch.ones(1)).item() == 3


@spmd(3, 18, on=("threads",))
def test_what_one_rank_raises_between_two_openings_all_raise(group):
    def job():
        opened(group, "first", {})
        with preparing(group, "test"):
            if group.rank == 1:
                raise MemoryError("no room")
        opened(group, "second", {})

    with pytest.raises(weft.WeftError, match=r"^rank 1: MemoryError: no room$"):
        group.worker.call("test", job)
    assert weft.all_reduce(torch.ones(1)).item() == group.size


ASYNC = {
    "sparse_all_reduce": lambda right, group: weft.sparse_all_reduce(
        (torch.tensor([1]), torch.ones(1 if right else 2)), "sum", group, True
    ),
    "sparse_all_gather": lambda right, group: weft.sparse_all_gather(
        (torch.tensor([1]), torch.ones(1 if right else 2)), group, True
    ),
    "exchange": lambda right, group: weft.exchange(
        torch.ones(2), [None] * 2 if right else Unmeasured(), group, True
    ),
}


class Unmeasured(list):
    def __len__(self):
        raise RuntimeError("no length")


@pytest.mark.parametrize("name", ASYNC)
@spmd(2, timeout=20.0)
def test_an_asynchronous_call_that_is_wrong_does_not_wait_for_the_others(group, name):
    """So two groups may be used in opposite order; else both would be lost."""
    other = group.split([0, 1])
    if group.rank == 0:
        assert weft.all_reduce(torch.ones(1), group=other).item() == 2
    work = ASYNC[name](group.rank == 0, group)
    if group.rank == 1:
        assert weft.all_reduce(torch.ones(1), group=other).item() == 2
    with pytest.raises(weft.WeftError, match=r"^rank 1: "):
        work.wait()
    assert weft.all_reduce(torch.ones(1)).item() == 2
    other.close()


class Slow:
    """A value that is looked at for longer than the others wait."""

    def __init__(self, lost):
        self.lost = lost

    def __bool__(self):
        return self.lost.wait(60.0)


@spmd(2, on=("threads",), timeout=1.0)
def test_who_looks_at_arguments_for_long_is_not_called_outside_weft(group):
    if group.rank == 0:
        with pytest.raises(weft.WireError, match=r"prepares the arguments of exchange"):
            weft.exchange(torch.ones(2), [None] * 2)
    else:
        lost = threading.Event()
        watcher = threading.Thread(target=until_lost, args=(group, lost))
        watcher.start()
        with pytest.raises(weft.WireError):
            weft.exchange(torch.ones(2), [None] * 2, async_op=Slow(lost)).wait()
        watcher.join()


def until_lost(group, lost):
    while not lost.wait(0.05):
        try:
            group.check()
        except weft.WireError:
            lost.set()


@spmd(1, on=("threads",))  # make_fx is not for several threads at once
def test_a_call_that_is_traced_leaves_no_trace_of_itself(group):
    with pytest.raises(weft.WeftError, match="is traced by"):
        make_fx(lambda x: weft.all_reduce(x))(torch.ones(2))
    assert group.worker.prepares == ""
