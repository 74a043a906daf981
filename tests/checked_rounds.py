"""For tests: rounds over a wire that has none; what is no round of all ranks does not come through.

A schedule for a wire in rounds is right if every rank of it posts both ends of the same messages
before it waits. Where one does not, a device hangs, or reads one message as another. Here a round
has a channel of its own on the wire below, which all ranks come to: so what lies in another round
is not received, and a length that differs fails that wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.base.devices import as_device
from weft.bootstrap.outcome import Outcome
from weft.testing import threads
from weft.wire.interface import Failure, Features, Pending, Recv, Send, Wire, WireFailed

_FIRST = 1 << 30  # the channel of the first round; other messages on the wire below use none there
_NOTHING = torch.empty(0)


def on_device(
    world: tuple[int, float], body: Callable[..., Any], args: Any, kwargs: Any, limit: float
) -> list[Outcome]:
    """Ranks that are threads, where CPU tensors go the way of those on an accelerator."""
    with as_device():
        groups = threads.group(*world)
        for each in groups:
            each.session.carry_device(CheckedRounds(each.session.cpu.wire), "checked")
        return threads.on_groups(groups, body, args, kwargs, limit=limit)


class CheckedRounds:
    """One rank's end; a `weft.wire.interface.Wire` that is a `Rounds`.

    Attributes:
        queued: what was posted since the last round.
    """

    def __init__(self, below: Wire, ranks: Sequence[int] | None = None) -> None:
        """
        Args:
            below: carries the messages. It fails with this wire, but is not closed with it.
            ranks: of that wire, which take part, as this wire numbers them; None: all.
        """
        self.below = below
        self.ranks = list(range(below.size)) if ranks is None else list(ranks)
        self.rank = self.ranks.index(below.rank)
        self.size = len(self.ranks)
        self.device = below.device
        self.features = Features(lockstep=True)
        self.queued: list[CheckedPending] = []
        self._next = _FIRST
        self._closed: Failure | None = None

    def post(
        self, sends: Sequence[Send] = (), recvs: Sequence[Recv] = (), channel: int = 0
    ) -> CheckedPending:
        self.check()
        pending = CheckedPending(self, sends, recvs, channel)
        self.queued.append(pending)
        return pending

    def lease(self, nbytes: int) -> None:
        """Any memory is as good: None."""
        return None

    def among(self, ranks: Sequence[int]) -> CheckedRounds:
        return CheckedRounds(self.below, [self.ranks[rank] for rank in ranks])

    def abort(self, failure: Failure) -> None:
        self.below.abort(failure)

    def failure(self) -> Failure | None:
        return self.below.failure() or self._closed

    def close(self) -> None:
        self._closed = Failure("aborted", None, f"rank {self.rank} has closed its wire")

    def drop(self) -> None:
        """As `Rounds` has it."""
        self.close()

    def check(self) -> None:
        """Raise WireFailed if the wire has failed."""
        failure = self.failure()
        if failure is not None:
            raise WireFailed(failure)

    def begin_round(self) -> None:
        """Begin to carry all that was posted since the last round."""
        posts = sorted(self.queued, key=lambda post: post.channel)
        self.queued = []
        channel = self._next
        self._next += 1
        others = [rank for rank in self.ranks if rank != self.below.rank]
        here = self.below.post(
            [(rank, _NOTHING) for rank in others], [(r, 0) for r in others], channel
        )
        for post in posts:
            post.all_are_here = here
            post.carried = self.below.post(
                [(self.ranks[peer], tensor) for peer, tensor in post.sends],
                [(self.ranks[peer], into) for peer, into in post.recvs],
                channel,
            )


class CheckedPending:
    """The messages of one post; a `weft.wire.interface.Pending`.

    Attributes:
        sends, recvs, channel: of the post; tensors as aliases, which hold their storages.
        all_are_here: what tells that all ranks have begun its round; None: it is in no round yet.
        carried: the same messages on the wire below; None: it is in no round yet.
    """

    def __init__(
        self, wire: CheckedRounds, sends: Sequence[Send], recvs: Sequence[Recv], channel: int
    ) -> None:
        self.sends = [(peer, tensor.detach()) for peer, tensor in sends]
        self.recvs = [
            (peer, into if isinstance(into, int) else into.detach()) for peer, into in recvs
        ]
        self.channel = channel
        self.all_are_here: Pending | None = None
        self.carried: Pending | None = None
        self._wire = wire
        self._intos = [into for _, into in recvs]

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.carried is None:
            self._wire.check()
            self._wire.begin_round()
        assert self.all_are_here is not None and self.carried is not None
        self.all_are_here.wait(timeout)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        found = []
        for (peer, _), into, part in zip(
            self.recvs, self._intos, self.carried.wait(left), strict=True
        ):
            if isinstance(into, int) and part.nbytes != into:
                text = f"rank {peer} sent {part.nbytes} bytes in a round for a receive of {into}"
                self._wire.abort(Failure("garbled", peer, text))
                self._wire.check()
            found.append(into if isinstance(into, Tensor) else part)
        return found

    def waiting_for(self) -> list[int]:
        if self.carried is None:
            return sorted({peer for peer, _ in (*self.sends, *self.recvs)})
        return [self._wire.ranks.index(rank) for rank in self.carried.waiting_for()]

    def release(self) -> None:
        if self.carried is not None:
            self.carried.release()
