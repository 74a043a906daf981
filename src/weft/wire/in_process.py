"""What wires have in common whose ranks are threads of one process: what breaks them, and parts.

The ranks of a group share a lock and what is written under it. So the first failure is known to all
at once, and a part of a wire is made by whichever of its ranks comes first.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence
from typing import Self

from ..errors import WeftError, WireError
from .base import Wire, chosen
from .failure.verdict import Verdict


class Shared(abc.ABC):
    """What the ranks of a group share. Everything is read and written with the lock held.

    Attributes:
        lock: of the group.
        wake: for each rank, what wakes it.
        wires: for each rank, its own.
        parts: the groups made by `sub`, each with its ranks, in the order they were made.
        left: the ranks that closed their wires.
        verdict: what broke the group, or None.
    """

    wires: Sequence[InProcessWire]

    def __init__(self, lock: threading.RLock, wake: list[threading.Condition]) -> None:
        self.lock, self.wake = lock, wake
        self.parts: list[tuple[tuple[int, ...], Self]] = []
        self.left: set[int] = set()
        self.verdict: Verdict | None = None

    @abc.abstractmethod
    def part(self, ranks: tuple[int, ...]) -> Self:
        """A group of some of the ranks."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop what was posted: nobody will wait for it any more."""

    def break_for_all(self, culprit: int | None, text: str) -> Verdict:
        """Set the verdict, unless there is one, and wake everyone, in wires made by `sub` too."""
        if self.verdict is None:
            self.verdict = Verdict(culprit, text)
            self.forget()
            for condition in self.wake:
                condition.notify_all()
            for ranks, part in self.parts:
                inside = ranks.index(culprit) if culprit in ranks else None
                with part.lock:
                    part.break_for_all(inside, f"the wire that it is a part of broke: {text}")
        return self.verdict


class InProcessWire(Wire):
    """One rank's end of a group of threads."""

    _group: Shared

    def __init__(self, rank: int, size: int, timeout: float, host: str) -> None:
        super().__init__(rank, size, timeout, host)
        self._splits = 0
        self._closed = False

    def sub(self, ranks: Sequence[int]) -> InProcessWire | None:
        shared, distinct = self._group, chosen(self, ranks)
        with shared.lock:
            self._check_usable()
            if self._splits == len(shared.parts):
                shared.parts.append((distinct, shared.part(distinct)))
            others, part = shared.parts[self._splits]
            self._splits += 1
            if others != distinct:
                raise self._fail(
                    self.rank,
                    f"rank {self.rank} makes a part of ranks {list(distinct)} where others "
                    f"make one of {list(others)}",
                )
        return part.wires[distinct.index(self.rank)] if self.rank in distinct else None

    def abort(self, reason: str) -> None:
        with self._group.lock:
            self._group.break_for_all(self.rank, f"rank {self.rank} gave up: {reason}")

    def close(self) -> None:
        shared = self._group
        with shared.lock:
            if self._closed:
                return
            self._closed = True
            shared.left.add(self.rank)
            self._leave()
        if self._worker is not None:
            self._worker.stop()
        self.memory.drain()

    @abc.abstractmethod
    def _leave(self) -> None:
        """Let the others go on without this rank; with the lock held."""

    def _check_peer(self, peer: int, verb: str) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise WeftError(f"rank {self.rank}: cannot {verb} rank {peer} in {self.size} ranks")

    def _check_usable(self) -> None:
        """Raise what broke the wire, if anything did; with the lock held."""
        if self._closed:
            raise WireError(f"rank {self.rank}: this wire is closed", rank=self.rank)
        if self._group.verdict is not None:
            raise self._error(self._group.verdict)

    def _fail(self, culprit: int | None, text: str) -> WireError:
        """Break the wire for all ranks; the error to raise on this one. With the lock held."""
        return self._error(self._group.break_for_all(culprit, text))

    def _error(self, verdict: Verdict) -> WireError:
        text = f"rank {self.rank}: {verdict.text}; start the group again"
        return WireError(text, rank=self.rank, culprit=verdict.culprit)
