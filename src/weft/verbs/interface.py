"""The verbs: what moves tensors of any device, whoever carries them.

All ranks of a group call the same verbs in the same order, behind the opening of a call. So what
each verb moves follows from what all ranks have told there. A verb of a device is queued in the
stream that is current, as torch's synchronous collectives are, and the host goes on; that of the
CPU is through when it returns. The host waits for a device in `read` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Verbs(Protocol):
    """What carries tensors of one device between the ranks of a group; these call it in one order.

    Attributes:
        rank, size: of the group.
        name: of the device and of who carries its tensors, such as "cuda (nccl)": in every opening,
            since ranks have to go the same way.
    """

    rank: int
    size: int
    name: str

    def all_gather(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks, one behind the other in rank order, 1-D.

        Args:
            mine: 1-D, contiguous; as long on every rank, and of the same dtype.

        Raises:
            WireError: a peer or a link failed, as each verb raises it.
        """

    def exchange(self, mine: Tensor, goes: Sequence[int], comes: Sequence[int]) -> Tensor:
        """What the ranks send to this one, one behind the other in rank order, 1-D.

        Args:
            mine: 1-D, contiguous: what this rank sends, to rank 0 first.
            goes, comes: how many elements go to each rank, and come from it.
        """

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Combine contiguous tensors, in place: the same bits on every rank, in whatever order.

        Args:
            tensor: of the same shape and dtype on every rank.
            op: as `reduces` has it.
        """

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` takes this; the same on every rank."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Write the root's tensor (contiguous) to those of the others."""

    def read(self, numbers: Tensor) -> list[int]:
        """Integers on the host, for which it waits.

        Raises:
            WireError: the group is broken; then what the stream computed may be garbage.
        """
