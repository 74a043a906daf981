"""The verbs by posts on weft's own wire.

Ranks that are threads have no process group; and a sum by a function is on the wire, too, what it
is on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.memory import bytes_of, fresh
from ..group.channels import VERBS
from ..group.group import Group
from .group import read


class PostedVerbs:
    """Verbs made of posts; a `Verbs`.

    Attributes:
        rank, size, name: as of `Verbs`.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.rank = group.rank
        self.size = group.size
        self.name = name
        self._group = group

    def all_gather(self, mine: Tensor) -> Tensor:
        found = fresh((self.size * mine.numel(),), mine.dtype, mine.device)
        own = bytes_of(mine)
        self._post([own] * self.size, torch.split(bytes_of(found), [own.numel()] * self.size))
        return found

    def exchange(self, mine: Tensor, goes: Sequence[int], comes: Sequence[int]) -> Tensor:
        found = fresh((sum(comes),), mine.dtype, mine.device)
        outgoing, incoming = ([count * mine.itemsize for count in each] for each in (goes, comes))
        self._post(torch.split(bytes_of(mine), outgoing), torch.split(bytes_of(found), incoming))
        return found

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        return False  # what needs a reduction has it by `all_gather`, in the order of ranks

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, root: int) -> None:
        flat = bytes_of(tensor)
        nothing = flat[:0]
        is_root = self.rank == root
        comes = [flat if peer == root and not is_root else nothing for peer in range(self.size)]
        self._post([flat if is_root else nothing] * self.size, comes)

    def read(self, numbers: Tensor) -> list[int]:
        return read(self._group, numbers, self.name)

    def _post(self, goes: Sequence[Tensor], comes: Sequence[Tensor]) -> None:
        """Send bytes to each rank, and fill some from each; a rank's own are copied."""
        if comes[self.rank].numel():
            comes[self.rank].copy_(goes[self.rank])
        sends = [(peer, goes[peer]) for peer in self._group.peers if goes[peer].numel()]
        recvs = [(peer, comes[peer]) for peer in self._group.peers if comes[peer].numel()]
        self._group.post(sends, recvs, VERBS).wait()
