"""mask: agree on the union of all index sets, then reduce just those rows as a dense tensor.

Every rank puts its rows where they belong in a table of the union's rows, with the neutral element
where it has none, and the table is reduced. No index travels with a value and no rank merges
anything. The union comes either from a bitmap of all places, which is reduced too, or from the
index sets themselves, whichever the sizes say is less. Every row of the table is some rank's, so a
sum of zero is a row, and min, max and prod combine at least one value.

Best where all ranks have nearly the same rows (then it moves the bound's bytes); where they have
not, most of what it sends is neutral elements.

oneCCL's "mask" algorithm of its sparse all-reduce has the idea; Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms" (JPDC 2009), for the reduction.
"""

from __future__ import annotations

from torch import Tensor

from ... import kernels
from ...base.memory import typed
from ...schedules import dense_all_reduce
from ...schedules.dense import messages, received_bytes
from ..call import Call
from ..local_rows import LocalRows
from ..registry import algorithm
from ..rows import Rows
from ..sizes import Sizes
from ..stream import all_gather_lists, united
from ..traffic import Sent, Traffic, of_list, together


def traffic(sizes: Sizes, union: int) -> Traffic:
    def reduced(nbytes: int) -> Sent:
        return Sent(messages(sizes.ranks, nbytes), received_bytes(sizes.ranks, nbytes))

    if _by_bitmap(sizes):
        places = reduced(8 * -(-sizes.places // 64))
    else:
        places = of_list(sizes, sizes.mean).to(sizes.ranks - 1)
    count, nbytes = together(places, reduced(union * sizes.partial))
    return Traffic(4, int(count), nbytes)


def workspace(sizes: Sizes) -> int:
    # of the table, of what the reduction receives, and of all indices or the bitmap
    return 3 * sizes.union[1] * sizes.partial + sizes.total * 3 * sizes.index


def applies(sizes: Sizes) -> str | None:
    if sizes.in_order:
        return "op is a function, which has no neutral element"
    return None if sizes.has_neutral else "op has no neutral element"


@algorithm(traffic=traffic, workspace=workspace, applies=applies, lockstep=True)
def mask(rows: LocalRows, call: Call) -> Rows:
    group = call.group
    direct = call.partial == call.dtype
    indices = rows.indices.to(call.wire_index)
    union, slots = _union(indices, call)
    result = call.result_at(union)
    with group.lease(0 if direct else union.numel() * call.sizes.partial) as memory:
        table = result.values
        if not direct:
            table = typed(memory, tuple(table.shape), call.partial)
        table.fill_(call.op.neutral(call.partial))
        table[slots ^ (slots >> 31)] = rows.values.to(call.partial)
        if table.numel():
            op = "sum" if call.op.mean else call.op.name
            dense_all_reduce(group, table, op, flat=True).wait()
        call.finish(table, result.values)
    return result


def _by_bitmap(sizes: Sizes) -> bool:
    """Whether a bitmap of all places is less than the index sets of all ranks.

    On an accelerator the host would have to wait for its size, and not learn where tables begin.
    """
    return not sizes.staying and 2 * sizes.places < sizes.total * 8 * sizes.index


def _union(indices: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The indices that some rank has, and this rank's slots."""
    if _by_bitmap(call.sizes):
        bits = kernels.bitmap(indices, call.sizes.places)
        dense_all_reduce(call.group, bits, "bor", flat=True).wait()
        if spare := -call.sizes.places % 64:
            bits[-1] &= (1 << (64 - spare)) - 1  # a peer may have set bits where no place is
        union = kernels.unite_bitmap(bits, indices)
        return union.indices, union.slots[0]
    runs, lists = all_gather_lists(call, indices)
    union = united(call, dict(enumerate(runs)))
    lists.release()
    return union.indices, union.slots[call.group.rank]
