"""The route of tensors: what carries those of one device between the ranks of a session.

A session has a route for tensors of the CPU, and for whatever else ranks tell each other: openings,
lengths. Tensors of a device have one of their own (`weft.wire.of_devices`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from ..base.memory import Pool
from ..wire.interface import Features, Lease, Rounds, Wire
from .watcher import Watcher

T = TypeVar("T")


class Route:
    """A wire, with what a session has beside it; `among` narrows it to some of its ranks.

    Attributes:
        wire: what carries the tensors.
        carrier: the name of the wire, for people: "nccl"; "" is that of the CPU.
        memory: where workspaces are leased from, if not from the wire.
        watcher: of what streams wait for; None: the host waits.
        ranks: the ranks on it, by their numbers in the session, in the order of the wire's numbers.
        name: of the device and the wire, for fingerprints: "cpu", "cuda (nccl)".
        refusal: why nobody carries these tensors; None: the wire does.
    """

    def __init__(
        self,
        wire: Wire,
        carrier: str,
        memory: Pool,
        watcher: Watcher | None = None,
        ranks: Sequence[int] | None = None,
        refusal: str | None = None,
    ) -> None:
        """`ranks`: None: all of the session."""
        self.wire = wire
        self.carrier = carrier
        self.refusal = refusal
        self.memory = memory
        self.watcher = watcher
        self.ranks = range(wire.size) if ranks is None else ranks
        self.name = f"{wire.device.type} ({carrier})" if carrier else wire.device.type
        # for a narrow route (weakly) the one of all ranks; None: this is the one of all ranks
        self._whole: Callable[[], Route | None] | None = None
        # the narrow ones of this route of all ranks, by their ranks, ascending
        self._narrow: dict[tuple[int, ...], Route] = {}

    def among(self, ranks: Collection[int]) -> Route:
        """The route for calls in which these ranks of the session alone take part, in any order.

        A wire in rounds has rounds for them, the same ones each time it is asked: what a call posts
        has to lie in one round, whichever view it is posted on. Any other wire serves some of its
        ranks as it is.
        """
        whole = self if self._whole is None else self._whole()
        assert whole is not None  # the session keeps it, and who asks has the session
        if not whole.wire.features.lockstep or len(ranks) == whole.wire.size:
            return whole
        ascending = tuple(sorted(ranks))
        if ascending not in whole._narrow:
            assert isinstance(whole.wire, Rounds)
            wire = whole.wire.among(ascending)
            narrow = Route(wire, whole.carrier, whole.memory, whole.watcher, ascending)
            narrow._whole = weakref.ref(whole)  # strongly, the two would keep each other
            whole._narrow.setdefault(ascending, narrow)
        return whole._narrow[ascending]

    def features_for(self, ranks: Sequence[int]) -> Features:
        """What the wire has for these ranks of the session: it reduces over all of its own."""
        features = self.wire.features
        if not features.reduces or set(ranks) == set(self.ranks):
            return features
        return replace(features, reduces=frozenset())

    def numbered(self, messages: Sequence[tuple[int, T]]) -> Sequence[tuple[int, T]]:
        """Messages to ranks of the session, with these as the wire numbers them."""
        if self._whole is None:
            return messages
        return [(self.ranks.index(peer), message) for peer, message in messages]

    def lease(self, nbytes: int) -> Lease:
        """Memory that is best to send from."""
        lease = self.wire.lease(nbytes)
        return self.memory.lease(nbytes) if lease is None else lease

    def end_watch(self) -> None:
        """End the watch of what streams wait for, if there is one."""
        if self.watcher is not None:
            self.watcher.end()
