"""Results in common: every rank has all parts, keeps them, and knows when there is nothing."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

from weft.errors import WireError
from weft.testing import processes
from weft.wire import blocks, common, lent, process_group

RANKS = 3


needs_blocks = pytest.mark.skipif(
    not blocks.works() or ((lent.yama() or 0) > 0 and not lent.may_trace()),
    reason="this machine does not let processes share memory",
)


def started():
    common.LEAST = 0
    dist.init_process_group("gloo")
    return process_group.of_group(None)


def made(wire, rows, number, most=None):
    """A result of parts of `rows[rank]` bytes and twice that; None where there is none."""
    mine = (8 * rows[wire.rank], 16 * rows[wire.rank])
    begun = common.begun(wire, 24 * sum(rows) if most is None else most, mine)
    if begun is None:
        return None
    with begun:
        for area, part in enumerate(begun.mine):
            assert part.numel() == mine[area]
            part.view(torch.int64).fill_(100 * number + 10 * area + wire.rank)
        begun.finish()
        return begun.whole(0).view(torch.int64).clone(), begun.own(1).view(torch.int64)


def wanted(rows, number):
    def area(which):
        parts = [
            torch.full((count * (1 + which),), 100 * number + 10 * which + rank)
            for rank, count in enumerate(rows)
        ]
        return torch.cat(parts)

    return area(0), area(1)


def right(found, rows, number):
    return all(map(torch.equal, found, wanted(rows, number)))


SIZES = [[1000, 2000, 3000], [0, 7, 0], [0, 0, 0], [5, 0, 90_000], [1, 1, 1]]


def many():
    """Some results that are all held, then some that are not."""
    wire = started()
    held = [made(wire, rows, number) for number, rows in enumerate(SIZES)]
    fine = [right(found, rows, n) for n, (found, rows) in enumerate(zip(held, SIZES, strict=True))]
    held[0][1].zero_()
    for number in range(20):
        rows = SIZES[number % len(SIZES)]
        fine.append(right(made(wire, rows, number), rows, number))
    fine += [
        right(found, rows, n)
        for n, (found, rows) in list(enumerate(zip(held, SIZES, strict=True)))[1:]
    ]
    blocks_ = wire.kept[common._KEPT][0]
    wire.close()
    dist.destroy_process_group()
    del wire
    gc.collect()
    fine.append(right(held[3], SIZES[3], 3))
    return all(fine), int(blocks_._marks.max(0)[:RANKS].min())


@needs_blocks
def test_all_have_all_parts_and_keep_them():
    assert processes(RANKS, many, timeout=120.0) == [(True, 1)] * RANKS


def one_cannot(why):
    wire = started()
    asked, real = [], common._opened

    def opened(wire):
        asked.append(1)
        return real(wire)

    common._opened = opened
    if wire.rank == 2 and why == "kernel":
        blocks._written = lambda address, size: False
    elif wire.rank == 2:
        os.environ["WEFT_KEEP"] = "0"
    found = [made(wire, [10, 10, 10], 1) for _ in range(3)]
    dist.destroy_process_group()
    return found, len(asked)


@needs_blocks
@pytest.mark.parametrize("why", ["kernel", "wish"])
def test_where_one_rank_cannot_nobody_does_and_nobody_asks_again(why):
    assert processes(RANKS, one_cannot, why, timeout=120.0) == [([None] * 3, 1)] * RANKS


def none_left():
    wire = started()
    rows = [10, 10, 10]
    held = [made(wire, rows, number) for number in range(blocks._BLOCKS)]
    over = made(wire, rows, 99)
    fine = all(right(found, rows, number) for number, found in enumerate(held))
    if wire.rank:  # one that holds on is enough
        held.clear()
    still = made(wire, rows, 99)
    held.clear()
    made(wire, rows, 99)  # in which ranks give back what rank 0 may give in the next
    again = made(wire, rows, 5)
    large = made(wire, rows, 5, most=blocks.MOST)
    dist.destroy_process_group()
    return fine, over, still, right(again, rows, 5), large


@needs_blocks
def test_where_all_blocks_are_held_or_too_small_everybody_knows():
    for found in processes(RANKS, none_left, timeout=120.0):
        assert found == (True, None, None, True, None)


def gives_up():
    """Rank 1 ends before its part is written: whom the others name, and whether they wait long."""
    wire = started()
    made(wire, [10, 10, 10], 1)
    culprit, start = -1, time.monotonic()
    try:  # all of it: who still hears another rank in the first exchange may hear of it there
        with common.begun(wire, 10_000, (80, 160)) as begun:
            if wire.rank == 1:
                wire.abort("enough")
            begun.finish()
    except WireError as error:
        culprit = error.culprit
    dist.destroy_process_group()
    return culprit, time.monotonic() - start < wire.timeout / 2


@needs_blocks
def test_who_ends_before_its_part_is_written_is_named():
    assert processes(RANKS, gives_up, timeout=120.0) == [(1, True)] * RANKS


def on_offer():
    """Results in blocks that rank 0 offered: what came of each, and who marks them in the end."""
    wire = started()
    rows, found, held = [10, 20, 30], [], []
    room = 60_000
    for call, offers in enumerate([room, room // 2, room, 10 * room, 0], 1):
        if wire.rank == 0 and offers:
            common.offer(wire, 24 * offers)
        wire.sequence += 1
        wire.all_gather_bytes(b"-")
        if call == 1:  # before anything was made in common nothing is offered
            found.append(common.offered(wire, [[8 * room] * 3, [16 * room] * 3]))
            held.append(made(wire, rows, call))
            continue
        own = common.offered(wire, [[8 * room // 3] * 3, [16 * room // 3] * 3])
        if own is None:
            found.append(None)
            continue
        with own:
            for area, part in enumerate(own.mine):
                assert part.numel() == 8 * (1 + area) * room // 3
                part.view(torch.int64).fill_(100 * call + wire.rank)
            found.append(own.finish(rows[wire.rank]))
            held.append((call, own.own(1).view(torch.int64)))
    wanted = [torch.tensor([100 * call + rank for rank in range(3)]) for call, _ in held[1:]]
    kept = [
        torch.equal(value, want.repeat_interleave(2 * room // 3))
        for (_, value), want in zip(held[1:], wanted, strict=True)
    ]
    blocks_, giver = wire.kept[common._KEPT]
    if giver is not None:
        giver._withdraw()
    held.clear()
    blocks_.settle()
    marks = int(blocks_._marks[:, wire.rank].sum())
    dist.destroy_process_group()
    return found, kept, marks


@needs_blocks
def test_what_was_offered_is_taken_by_all_or_by_nobody():
    each = [None, None, [10, 20, 30], [10, 20, 30], None]
    assert processes(RANKS, on_offer, timeout=120.0) == [(each, [True, True], 0)] * RANKS
