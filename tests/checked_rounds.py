"""For tests: rounds over a wire that has none, which all ranks check before a byte travels.

A schedule for a wire in rounds is right if every rank of it posts both ends of the same messages
before it waits. Where one does not, a device hangs, or reads one message as another. Here the ranks
first tell each other how many bytes they send and expect; where these differ, all of them fail.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from weft.base.devices import as_device
from weft.bootstrap.outcome import Outcome
from weft.testing import threads
from weft.wire.interface import Failure, Features, Pending, Recv, Send, Wire, WireFailed

_TOTALS = (1 << 30) + 1  # a channel that other messages on the wire below do not use
_MESSAGES = (1 << 30) + 2  # another one


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
        begun = _Round(self, posts)
        begun.start()
        for post in posts:
            post.round = begun


class CheckedPending:
    """The messages of one post; a `weft.wire.interface.Pending`.

    Attributes:
        sends, recvs, channel: of the post; tensors as aliases, which hold their storages.
        round: what carries them; None: no round yet.
        carried: the same messages on the wire below, once all ranks have checked them.
    """

    def __init__(
        self, wire: CheckedRounds, sends: Sequence[Send], recvs: Sequence[Recv], channel: int
    ) -> None:
        self.sends = [(peer, tensor.detach()) for peer, tensor in sends]
        self.recvs = [
            (peer, into if isinstance(into, int) else into.detach()) for peer, into in recvs
        ]
        self.channel = channel
        self.round: _Round | None = None
        self.carried: Pending | None = None
        self._wire = wire
        self._intos = [into for _, into in recvs]

    def wait(self, timeout: float | None = None) -> list[Tensor]:
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.round is None:
            self._wire.check()
            self._wire.begin_round()
        assert self.round is not None
        self.round.carry(timeout)
        assert self.carried is not None
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        came = zip(self._intos, self.carried.wait(left), strict=True)
        return [into if isinstance(into, Tensor) else part for into, part in came]

    def wait_stream(self) -> list[Tensor]:
        return self.wait()

    def done(self) -> bool:
        is_through = self.carried is not None and self.carried.done()
        return is_through or self._wire.failure() is not None

    def waiting_for(self) -> list[int]:
        if self.carried is None:
            return sorted({peer for peer, _ in (*self.sends, *self.recvs)})
        return [self._wire.ranks.index(rank) for rank in self.carried.waiting_for()]

    def release(self) -> None:
        if self.carried is not None:
            self.carried.release()


class _Round:
    """A round under way: first the totals of all ranks, and then the messages."""

    def __init__(self, wire: CheckedRounds, posts: Sequence[CheckedPending]) -> None:
        self._wire = wire
        self._posts = posts
        self._is_carried = False
        size = wire.size
        self._format = struct.Struct(f"<{2 * size}q")
        self._sent = [0] * size
        self._awaited = [0] * size
        for post in posts:
            for peer, tensor in post.sends:
                self._sent[peer] += tensor.nbytes
            for peer, into in post.recvs:
                self._awaited[peer] += into if isinstance(into, int) else into.nbytes
        self._others = [peer for peer in range(size) if peer != wire.rank]
        self._totals: Pending | None = None  # under way, once the round has started

    def start(self) -> None:
        """Send this rank's totals to all others."""
        mine = bytearray(self._format.pack(*self._sent, *self._awaited))
        message = torch.frombuffer(mine, dtype=torch.uint8)
        ranks = [self._wire.ranks[peer] for peer in self._others]
        self._totals = self._wire.below.post(
            [(rank, message) for rank in ranks],
            [(rank, len(mine)) for rank in ranks],
            _TOTALS,
        )

    def carry(self, timeout: float | None) -> None:
        """Check the totals, and post the messages; nothing if that was done.

        Raises:
            TimeoutError: the totals have not come; it can be called again.
            WireFailed: ranks send other bytes than are awaited.
        """
        if self._is_carried:
            return
        assert self._totals is not None
        totals = dict(zip(self._others, self._totals.wait(timeout), strict=True))
        numbers = {
            peer: self._format.unpack(each.numpy().tobytes()) for peer, each in totals.items()
        }
        numbers[self._wire.rank] = (*self._sent, *self._awaited)
        self._totals.release()
        self._check(numbers)  # where one message is too short, another is too long
        self._is_carried = True
        ranks = self._wire.ranks
        for post in self._posts:
            post.carried = self._wire.below.post(
                [(ranks[peer], tensor) for peer, tensor in post.sends],
                [(ranks[peer], into) for peer, into in post.recvs],
                _MESSAGES,
            )

    def _check(self, numbers: dict[int, tuple[int, ...]]) -> None:
        size = self._wire.size
        for source, target in permutations(range(size), 2):
            sent = numbers[source][target]
            awaited = numbers[target][size + source]
            if sent != awaited:
                text = (
                    f"in a round rank {source} sends rank {target} {sent} bytes, which awaits "
                    f"{awaited}"
                )
                self._wire.abort(Failure("garbled", source, text))
                self._wire.check()
