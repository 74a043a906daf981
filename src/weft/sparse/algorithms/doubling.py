"""doubling: in round i, ranks 2^i apart swap all they have and merge it.

Fewest messages, log2 P, so best where latency rules: many ranks with tiny payloads. Each round
carries the union of the rows seen so far, in the type of partial sums. Blocks of neighbouring
ranks meet, the lower block always on the left, so every rank computes the same bits and an
operation needs only be associative. Where P is no power of two, pairs of the first ranks act as
one: the odd rank of a pair sends its rows before the rounds, and gets the result after them.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(IJHPCA 2005), section 4; "SSAR_Recursive_double" of Renggli et al., "SparCML" (SC'19).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import kernels
from ...base.memory import typed
from ...call.bundle import swaps
from ..call import Call
from ..canonical import CanonicalRows
from ..registry import algorithm
from ..rows import Rows


@algorithm
def doubling(rows: CanonicalRows, call: Call) -> Rows:
    group = call.group
    rank = group.rank
    core = 1 << (group.size.bit_length() - 1)
    paired = 2 * (group.size - core)  # the first ranks, two by two, act as one
    peers = [peer for peer, _ in swaps(rank, group.size)]
    mine = _made(call, rows.indices)
    mine.values.copy_(rows.values)

    # the odd rank of a pair sends its rows, and waits for the result
    if rank < paired and rank % 2:
        _exchange(call, rank - 1, [mine], 0)
        mine.release()
        (of_all,) = _exchange(call, rank - 1, [], 1)
        return _result(call, of_all)
    if rank < paired:
        (of_partner,) = _exchange(call, rank + 1, [], 1)
        mine = _merged(call, mine, of_partner)
        peers = peers[1:-1]  # the first and the last swap is that with the odd rank

    # in each round two ranks swap all that they have
    for peer in peers:
        (theirs,) = _exchange(call, peer, [mine], 1)
        lower, upper = (mine, theirs) if rank < peer else (theirs, mine)
        mine = _merged(call, lower, upper)

    # the even rank of a pair sends the result
    if rank < paired:
        _exchange(call, rank + 1, [mine], 0)
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
        self.values = typed(memory, (count, *call.row_shape), call.partial_dtype, head)


def _extent(call: Call, count: int) -> tuple[int, int]:
    """Where in a message the values begin, at a multiple of 8 bytes, and where they end."""
    head = 8 + -(-count * call.sizes.index // 8) * 8
    return head, head + count * call.sizes.partial_row


def _made(call: Call, indices: Tensor) -> _Message:
    """A message of rows with these indices, whose values are to be filled in."""
    lease = call.group.lease(_extent(call, indices.numel())[1])
    typed(lease.tensor, (1,), torch.int64)[0] = indices.numel()
    made = _Message(call, lease.tensor, lease.release)
    made.indices.copy_(indices)
    return made


def _exchange(call: Call, peer: int, sent: Sequence[_Message], count: int) -> list[_Message]:
    """Send some messages to a peer, and receive so many from it: none or one each.

    The peer does the reverse at the same time.
    """
    group = call.group
    most = call.sizes.union[1]
    sends = [(peer, message.bytes) for message in sent]
    pending = group.post(sends, [(peer, _extent(call, most)[1])] * count)

    def read(memory: Tensor) -> _Message:
        message = _Message(call, memory, pending.release)
        if not kernels.ascends(message.indices, call.sizes.end - 1):
            raise ValueError(f"its indices do not ascend from 0 to {call.sizes.end - 1}")
        return message

    return [group.decode(peer, "rows", read, memory) for memory in pending.wait()]


def _merged(call: Call, lower: _Message, upper: _Message) -> _Message:
    """The sum of two messages, which are released."""
    union = kernels.union([lower.indices, upper.indices])
    both = _made(call, union.indices)
    for slots, message in zip(union.slots, (lower, upper), strict=True):
        kernels.combine(both.values, slots, message.values, call.op)
        message.release()
    return both


def _result(call: Call, total: _Message) -> Rows:
    """A message as the result of the call; the memory goes back."""
    result = call.result_at(total.indices)
    kernels.finish(total.values, result.values, call.divisor)
    total.release()
    return result
