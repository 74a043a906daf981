"""`split` among ranks that read each other's memory: the same bits, and who cannot, sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from weft.errors import WireError
from weft.sparse import near
from weft.testing import processes
from weft.wire import blocks, common, lent, process_group

RANKS = 3
WIDE, HEIGHT = 24, 5000

needs_reading = pytest.mark.skipif(
    lent._read() is None or ((lent.yama() or 0) > 0 and not lent.may_trace()),
    reason="this machine does not let processes read each other's memory",
)


def rows_of(rank: int, count: int, dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(HEIGHT, (count,), generator=generator)
    return indices, torch.randn(count, *shape, generator=generator).mul(100).to(dtype)


def reduced(wire, calls):
    """Every call's result."""
    made = []
    for count, dtype, shape, options in calls:
        rows = rows_of(wire.rank, count if wire.rank else count // 7, dtype, *shape)
        out = weft.sparse_all_reduce(rows, group=wire, algorithm="split", **options)
        made.append([part.clone() for part in out])
    return made


def keep_left(left, right):
    return left - right


CALLS = [
    (3000, torch.float32, (WIDE,), {}),
    (3000, torch.float32, (WIDE,), {}),
    (4000, torch.bfloat16, (5,), {"op": "avg"}),
    (9000, torch.float32, (WIDE, 3), {"op": keep_left}),
    (3000, torch.int64, (), {"op": "max"}),
    (7, torch.float64, (2,), {}),
    (0, torch.float64, (2,), {}),
    (5000, torch.float32, (WIDE,), {"wire_dtype": torch.bfloat16}),
    (60_000, torch.float32, (64,), {}),  # several blocks
]


def both_ways(calls, least):
    """What reading gives, what sending gives, and how often it was read; made in common or not."""
    common.LEAST = least
    dist.init_process_group("gloo")
    wire = process_group.of_group(None)
    reads, real = [], type(wire).read_all

    def read_all(self, wanted):
        reads.extend(wanted)
        real(self, wanted)

    type(wire).read_all = read_all
    read_ones = reduced(wire, calls)
    count, asks = len(reads), wire.near
    wire.near = False
    sent = reduced(wire, calls)
    dist.destroy_process_group()
    return read_ones, sent, count, len(reads) - count, asks


@needs_reading
@pytest.mark.parametrize(("least", "each"), [(0, 2), (1 << 60, 4)])
def test_what_is_read_has_the_bits_of_what_is_sent(least, each):
    for read, sent, reads, more, asks in processes(RANKS, both_ways, CALLS, least, timeout=120.0):
        assert asks and reads >= each * (len(CALLS) - 2) * (RANKS - 1) and more == 0
        for ours, theirs in zip(read, sent, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.dtype == other.dtype and torch.equal(mine, other)


def one_cannot():
    """Nobody can read rank 1: what is given, what is read, and how often it is asked."""
    dist.init_process_group("gloo")
    wire = process_group.of_group(None)
    if wire.rank == 1:
        wire.lends = lambda peer: False
    asked, real = [], near.told

    def told(*args):
        asked.append(args)
        return real(*args)

    near.told = told
    made = reduced(wire, CALLS[:1] * 6)
    dist.destroy_process_group()
    return made, len(asked), wire.near


def test_where_one_rank_cannot_be_read_all_send_and_do_not_ask_again():
    results = processes(RANKS, one_cannot, timeout=120.0)
    for made, asked, left in results:
        assert asked == 1 and not left
        for ours, theirs in zip(made, results[0][0], strict=True):
            assert all(map(torch.equal, ours, theirs))


def gives_up(how):
    """Rank 0 lends nothing any more when the others are about to read: what they raise."""
    dist.init_process_group("gloo")
    wire = process_group.of_group(None)
    reduced(wire, CALLS[:4])
    assert wire.near
    real = near.told

    def told(told_wire, said):
        if wire.rank == 0 and how == "wipes":
            wire._connections.mover._guard.wipe()
        heard = real(told_wire, said)
        if wire.rank == 0 and how == "raises":
            raise RuntimeError("enough")
        return heard

    near.told = told
    culprit = None
    try:
        reduced(wire, CALLS[:1])
    except WireError as error:
        culprit = error.culprit
    except RuntimeError:
        culprit = "own"
    dist.destroy_process_group()
    return culprit


@needs_reading
@pytest.mark.parametrize(("how", "culprits"), [("raises", ["own", 0, 0]), ("wipes", [0, 0, 0])])
def test_a_rank_that_lends_nothing_any_more_is_named_by_all(how, culprits):
    assert processes(RANKS, gives_up, how, timeout=120.0) == culprits


def kept_and_changed():
    """Results in common that are kept, or written to on rank 0; one caller wants them elsewhere."""
    common.LEAST = 0
    dist.init_process_group("gloo")
    wire = process_group.of_group(None)
    rows = [rows_of(10 * number + wire.rank, 3000, torch.float32, WIDE) for number in range(4)]
    wire.near, asks = False, wire.near
    wanted = [weft.sparse_all_reduce(each, group=wire, algorithm="split") for each in rows]
    wire.near = asks
    kept, fine = [], []
    for number, each in enumerate(rows * 3):
        out = None
        if wire.rank == 1 and number % 2:
            room = sum(map(len, (each[0] for each in rows))) * RANKS
            out = torch.empty(room, dtype=torch.int64), torch.empty(room, WIDE)
        if number % 3:
            made = weft.sparse_all_reduce(each, group=wire, algorithm="split", out=out)
        else:
            (made,) = weft.sparse_all_reduce([each], group=wire)
        fine.append(all(map(torch.equal, made, wanted[number % 4])))
        if wire.rank == 0:
            made[1].mul_(-1)
        elif number % 4 < 2:
            kept.append((made, number % 4))
    fine += [all(map(torch.equal, made, wanted[number])) for made, number in kept]
    begun = wire.kept[common._KEPT] is not None
    dist.destroy_process_group()
    return fine, begun


@needs_reading
@pytest.mark.skipif(not blocks.works(), reason="this kernel has no blocks (before 5.14?)")
def test_a_result_in_common_is_each_rank_s_own():
    for fine, begun in processes(RANKS, kept_and_changed, timeout=120.0):
        assert all(fine) and begun
