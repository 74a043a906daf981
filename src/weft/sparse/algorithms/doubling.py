"""doubling: in round i, ranks 2^i apart swap all they have and merge it.

Fewest messages, log2 P, so best where latency rules: many ranks with tiny payloads. Each round
carries the union of the rows seen so far, in the type of partial sums. Blocks of neighbouring
ranks meet, the lower block always on the left, so every rank computes the same bits and an
operation needs only be associative. Where P is no power of two, pairs of the first ranks act as
one: the odd rank of a pair sends its rows before the rounds, and gets the result after them.

The last merge writes to the result, unless that has another dtype than partial sums.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(IJHPCA 2005), section 4; "SSAR_Recursive_double" of Renggli et al., "SparCML" (SC'19).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ... import kernels
from ...base.memory import typed
from ..call import Call
from ..local_rows import LocalRows
from ..registry import algorithm
from ..rows import Rows
from ..sizes import Sizes
from ..traffic import Traffic


def traffic(sizes: Sizes, union: int) -> Traffic:
    core = 1 << (sizes.ranks.bit_length() - 1)
    rounds = core.bit_length() - 1
    paired = (sizes.ranks - core) / sizes.ranks  # ranks that send all they have, and get the result
    # at most: ranks may have the same rows
    swapped = sum(min(2**i * sizes.mean * sizes.ranks / core, union) for i in range(rounds))
    rows = core / sizes.ranks * swapped + paired * (sizes.mean + union)
    messages = core / sizes.ranks * rounds + 2 * paired
    waiting = rounds + (2 if paired else 0)
    return Traffic(waiting, round(messages), rows * (sizes.partial + sizes.index))


def workspace(sizes: Sizes) -> int:
    return 4 * sizes.union[1] * (sizes.partial + sizes.index)


@algorithm(traffic=traffic, workspace=workspace)
def doubling(rows: LocalRows, call: Call) -> Rows:
    group = call.group
    rank = group.rank
    core = 1 << (group.size.bit_length() - 1)
    paired = 2 * (group.size - core)  # the first ranks, two by two, act as one
    make = partial(_made, call)
    mine = make(rows.indices)
    mine.values.copy_(rows.values)

    # the odd rank of a pair sends its rows, and waits for the result
    if rank < paired and rank % 2:
        group.post([(rank - 1, mine.bytes)]).wait()
        mine.release()
        result = _receive(call, rank - 1, group.size)
        return _result(call, result())
    if rank < paired:
        of_partner = _receive(call, rank + 1, 1)
        mine = _merged(call, mine, of_partner(), make)

    # in each round two ranks swap all that they have
    block = rank // 2 if rank < paired else rank - paired // 2
    distance = 1
    while distance < core:
        other = block ^ distance
        peer = 2 * other if other < paired // 2 else other + paired // 2
        first = other // distance * distance  # of the blocks whose sum the peer has
        ranks = distance + min(distance, max(0, paired // 2 - first))  # of which the peer has rows
        of_peer = _receive(call, peer, ranks)
        group.post([(peer, mine.bytes)]).wait()
        theirs = of_peer()
        lower, upper = (mine, theirs) if block < other else (theirs, mine)
        distance *= 2
        if distance == core and rank >= paired and call.partial == call.dtype:
            total = _merged(call, lower, upper, call.result_at)
            call.finish(total.values, total.values)
            return total
        mine = _merged(call, lower, upper, make)

    # the even rank of a pair sends the result
    if rank < paired:
        group.post([(rank + 1, mine.bytes)]).wait()
    return _result(call, mine)


class _Message:
    """Rows as they travel: how many, the indices, then the values; and what gives back the memory.

    Attributes:
        bytes: the message; `indices` and `values` are views of it.
    """

    def __init__(self, call: Call, memory: Tensor, release: Callable[[], None]) -> None:
        """Read what is in memory, which may be longer. Raises ValueError if there is not enough."""
        count = int(typed(memory, (1,), torch.int64)[0])
        head, end = _extent(call, count)
        if count < 0 or end > len(memory):
            raise ValueError(f"{count} rows in {len(memory)} bytes")
        self.bytes = memory[:end]
        self.release = release
        self.indices = typed(memory, (count,), call.wire_index, 8)
        self.values = typed(memory, (count, *call.row_shape), call.partial, head)


_Place = TypeVar("_Place", _Message, Rows)


def _extent(call: Call, count: int) -> tuple[int, int]:
    """Where in a message the values begin, at a multiple of 8 bytes, and where they end."""
    head = 8 + -(-count * call.sizes.index // 8) * 8
    return head, head + count * call.sizes.partial


def _made(call: Call, indices: Tensor) -> _Message:
    """A message of rows with these indices, whose values are to be filled in."""
    lease = call.group.lease(_extent(call, indices.numel())[1])
    typed(lease.tensor, (1,), torch.int64)[0] = indices.numel()
    made = _Message(call, lease.tensor, lease.release)
    made.indices.copy_(indices)
    return made


def _receive(call: Call, peer: int, ranks: int) -> Callable[[], _Message]:
    """Post the receive of the rows of so many ranks from a peer; the function waits for them."""
    sizes = call.sizes
    most = min(ranks * sizes.most, sizes.total if sizes.height is None else sizes.height)
    pending = call.group.post((), [(peer, _extent(call, most)[1])])

    def read(memory: Tensor) -> _Message:
        message = _Message(call, memory, pending.release)
        if not kernels.lie_within(message.indices, 0, sizes.places - 1):
            raise ValueError(f"its indices do not ascend from 0 to {sizes.places - 1}")
        return message

    return lambda: call.group.decode(peer, "rows", read, pending.wait()[0])


def _merged(
    call: Call, lower: _Message, upper: _Message, place: Callable[[Tensor], _Place]
) -> _Place:
    """The sum of two messages, in memory that `place` makes; releases the messages."""
    union = kernels.union([lower.indices, upper.indices])
    both = place(union.indices)
    for slots, part in zip(union.slots, (lower, upper), strict=True):
        kernels.combine(both.values, slots, part.values, call.op)
        part.release()
    return both


def _result(call: Call, total: _Message) -> Rows:
    """A message as the result of the call; the memory goes back."""
    result = call.result_at(total.indices)
    kernels.finish(total.values, result.values, call.divisor)
    total.release()
    return result
