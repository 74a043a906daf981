"""mask: agree on the union of all index sets, then reduce just those rows as a dense tensor.

Every rank puts its rows where they belong in a table of the union's rows, with the neutral element
where it has none, and the table is reduced. No index travels with a value and no rank merges
anything. Where the headers' digests say that all ranks have the same rows, the union is known.
Else it comes either from a bitmap of all places, which is reduced too, or from the index sets
themselves, whichever the sizes in the combined header say is less. Every row of the
table is some rank's, so a sum of zero is a row, and min, max and prod combine at least one value.

Best where all ranks have nearly the same rows (then it moves the bound's bytes); where they have
not, most of what it sends is neutral elements.

oneCCL's "mask" algorithm of its sparse all-reduce has the idea; Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms" (JPDC 2009), for the reduction.
"""

from __future__ import annotations

import math

from torch import Tensor

from ... import kernels
from ...kernels import meter
from ...kernels.meter import PLACE
from ...rows import Rows
from ...schedules import dense_all_reduce
from ...schedules.dense import messages, received_bytes, reduced_bytes, scratch_bytes
from ...wire.memory import typed
from ..call import Call
from ..cost import Cost, Load
from ..local_rows import LocalRows
from ..registry import algorithm
from ..stream import all_gather_lists, list_messages, united

_LONG = 1 << 17  # bytes of a rank's part of the tensor: longer streams share links unevenly


def cost(load: Load) -> Cost:
    others = load.ranks - 1
    list_of_rows = load.list_of(load.mean)
    values = load.union * load.partial
    table = 0.0 if load.partial == load.row else values
    sums = Cost(rounds=2, messages=0, bytes=0.0, merged=2 * values, memory=table)
    sums += reduction(load, values)
    if load.identical:
        return sums
    if _by_bitmap(load):
        bits = reduction(load, 8 * math.ceil(load.places / 64))
        bits += Cost(
            rounds=2,
            messages=0,
            bytes=0.0,
            merged=load.uniting_by_bitmap(load.places),
            memory=load.places * 3 / 16,
        )
    else:
        received = others * list_of_rows
        bits = Cost(
            rounds=1,
            messages=others * list_messages(list_of_rows),
            bytes=received,
            merged=load.total * float(PLACE),
            delayed=load.queue * received,
        )
    placing = Cost(rounds=0, messages=0, bytes=0.0, merged=load.merging(load.mean))
    return bits + sums + placing


def applies(load: Load) -> str | None:
    if load.in_order:
        return "op is a function, which has no neutral element"
    return None if load.has_neutral else "op has no neutral element"


@algorithm(cost=cost, applies=applies, lockstep=True)
def mask(rows: LocalRows, call: Call) -> Rows:
    group = call.group
    direct = call.partial == call.dtype
    indices = rows.indices.to(call.wire_index)
    union, slots = _union(indices, call)
    result = call.result_at(union)
    with group.lease(0 if direct else union.numel() * call.load.partial) as memory:
        table = result.values
        if not direct:
            table = typed(memory, tuple(table.shape), call.partial)
        if slots is None:
            table.copy_(rows.values)
            meter.spend(table.nbytes)
        else:
            table.fill_(call.op.neutral(call.partial))
            table[slots ^ (slots >> 31)] = rows.values.to(call.partial)
            meter.spend(table.nbytes + call.load.merging(len(rows)))
        if table.numel():
            meter.spend(reduced_bytes(group.size, table.nbytes))
            dense_all_reduce(group, table, "sum" if call.op.mean else call.op.name).wait()
        call.finish(table, result.values)
    return result


def _by_bitmap(load: Load) -> bool:
    """Whether a bitmap of all places is less than the index sets of all ranks; in integers. On an
    accelerator the host would have to wait for its size, and not learn where tables begin."""
    return not load.staying and 2 * load.places < load.total * round(8 * load.index_of(load.mean))


def _union(indices: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """The indices that some rank has, and this rank's slots; None where all have all of them."""
    if call.load.identical:
        return indices, None
    if _by_bitmap(call.load):
        bits = kernels.bitmap(indices, call.load.places)
        meter.spend(reduced_bytes(call.group.size, bits.nbytes))
        dense_all_reduce(call.group, bits, "bor").wait()
        if spare := -call.load.places % 64:
            bits[-1] &= (1 << (64 - spare)) - 1  # a peer may have set bits where no place is
        union = kernels.unite_bitmap(bits, indices)
        return union.indices, union.slots[0]
    runs, lists = all_gather_lists(call, indices)
    union = united(call, dict(enumerate(runs)))
    lists.release()
    return union.indices, union.slots[call.group.rank]


def reduction(load: Load, nbytes: float) -> Cost:
    """What the group's dense all-reduce of so many bytes costs."""
    received = received_bytes(load.ranks, nbytes)
    crowds = nbytes / load.ranks >= _LONG
    return Cost(
        rounds=0,
        messages=messages(load.ranks, nbytes),
        bytes=received,
        delayed=load.queue * received + (load.unevenly(received) if crowds else 0.0),
        memory=scratch_bytes(load.ranks, nbytes),
    )
