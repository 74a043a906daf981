"""Some of a group's ranks, as a group: nothing is set up, and nothing fails alone.

`Group.split` makes new connections, which takes time, and they must be closed. A schedule that runs
another schedule among some ranks does not need them: a `Part` renumbers the ranks, and sends over
the group itself. So the group counts the messages, a failure of the part is a failure of the group,
and a call can make a new part each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from ..errors import WeftError, WireError
from ..wire.interface import Lease
from .group import Group, Pending, Recv, Send, chosen
from .worker import Worker


class Part(Group):
    """Ranks `ranks` of `group`, this one among them, numbered in the order given.

    Posts between two ranks match in the order in which they were made, whether by a part or by the
    group. Errors name ranks by their numbers in the group.

    Raises:
        WeftError: the ranks are not distinct ranks of the group, or this rank is not among them.

    Example:
        >>> from weft.testing import threads
        >>> groups = threads.group(3)
        >>> upper = [groups[rank].subset([1, 2]) for rank in (1, 2)]
        >>> upper[0].rank, upper[0].size, upper[1].peers
        (0, 2, [0])
    """

    def __init__(self, group: Group, ranks: Sequence[int], *, keeps: bool = True) -> None:
        """`keeps`: whether it keeps the group alive; one that the group holds itself does not."""
        mine = list(chosen(group, ranks))
        if group.rank not in mine:
            raise WeftError(f"rank {group.rank} is none of the ranks {mine}: it has no part")
        super().__init__(mine.index(group.rank), len(mine), group.timeout, group.host)
        self._beside: Callable[[], Group | None] = (lambda: group) if keeps else weakref.ref(group)
        self._ranks = mine
        self.memory, self.traffic = group.memory, group.traffic
        self.features, self.streams = group.features, group.streams
        self.global_ranks = tuple(group.global_ranks[rank] for rank in mine)

    @property
    def beside(self) -> Group:
        """The group that this is a part of."""
        group = self._beside()
        assert group is not None  # a caller that uses this part holds the group
        return group

    def make_for_device(self, device: torch.device) -> Group:
        whole = self.beside.for_device(device)
        return Part(whole.among(self._ranks), self._ranks)

    def lease(self, nbytes: int) -> Lease:
        return self.beside.lease(nbytes)

    @property
    def worker(self) -> Worker:
        """The group's worker: a call on a part takes its turn among the calls of the group."""
        return self.beside.worker

    def rank_in_errors(self, rank: int) -> int:
        return self.beside.rank_in_errors(self._ranks[rank])

    def fail(self, peer: int, text: str) -> WireError:
        return self.beside.fail(self._ranks[peer], text)

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> Pending:
        return self.beside.post(  # which counts
            [(self._ranks[peer], tensor) for peer, tensor in sends],
            [(self._ranks[peer], into) for peer, into in recvs],
            channel,
        )

    def split(self, ranks: Sequence[int]) -> Part | None:
        distinct = [self._ranks[rank] for rank in ranks]
        return Part(self.beside, distinct) if self.beside.rank in distinct else None

    def abort(self, reason: str) -> None:
        self.beside.abort(reason)

    def close(self) -> None:
        """Do nothing: the group stays open."""
