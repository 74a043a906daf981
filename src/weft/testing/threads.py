"""Ranks that are threads of this process: groups of them, and one program run on each."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any

from ..base import watch
from ..base.arguments import wrong_timeout
from ..base.errors import WeftError, WireError
from ..base.latch import deadline_of, join
from ..bootstrap.outcome import Outcome, place
from ..failure.detector import Detector
from ..failure.links import QueueLinks, links_of_threads
from ..group import default
from ..group.group import Group
from ..group.session import Session
from ..wire.threads import ThreadWire, thread_wires


def group(
    size: int,
    timeout: float = 5.0,
    *,
    hosts: Sequence[str] | None = None,
    wire: str = "tcp",
) -> list[Group]:
    """The group of each of `size` ranks, to be used by one thread each.

    Args:
        size: how many ranks.
        timeout: seconds that any one wait may last. Where all ranks wait for each other, they are
            told at once.
        hosts: the name of each rank's machine, for code that treats those of one host alike.
        wire: "group" has all tensors go by verbs, as those of an accelerator do (`weft.init`).

    Raises:
        WeftError: there are no ranks, not one host for each, or `timeout` is no number of seconds.

    Example:
        >>> import torch
        >>> first, second = group(2)
        >>> sent = first.post([(1, torch.tensor([1.0, 2.0]))])
        >>> second.post((), [(0, torch.empty(2))]).wait()
        [tensor([1., 2.])]
        >>> sent.wait()
        []
    """
    if error := wrong_timeout(timeout):
        raise WeftError(error)
    if size < 1:
        raise WeftError(f"a group has at least one rank, not {size}")
    names = hosts or ["threads"] * size
    if len(names) != size:
        raise WeftError(f"{len(names)} hosts for {size} ranks: give one for each")
    crew = Crew(thread_wires(size), names, timeout, lambda ranks: thread_wires(len(ranks)))
    sessions = crew.sessions()
    for each in sessions:
        each.is_by_group = wire == "group"
    return [Group(each) for each in sessions]


class Crew:
    """What the sessions of ranks have in common that are threads of this process."""

    def __init__(
        self,
        wires: Sequence[ThreadWire],
        hosts: Sequence[str],
        timeout: float,
        more_wires: Callable[[Sequence[int]], Sequence[ThreadWire]],
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            wires: of the ranks, in rank order.
            hosts: the name of each rank's machine.
            timeout: seconds that any one wait may last.
            more_wires: makes wires among some of these ranks.
            global_ranks: the ranks, by their numbers in the job; None: these are the same.
        """
        self._wires = wires
        self._hosts = tuple(hosts)
        self._timeout = timeout
        self._more_wires = more_wires
        self._global_ranks = range(len(wires)) if global_ranks is None else global_ranks
        self._lock = threading.Lock()
        # by name: the ranks of a part, and those of its sessions that no rank has come for
        self._parts: dict[str, tuple[tuple[int, ...], dict[int, Session]]] = {}

    def sessions(self) -> list[Session]:
        """The session of each rank, in rank order; for one call."""
        links = links_of_threads(len(self._wires))
        slow = watch.chosen()
        return [
            Session(
                wire,
                self._timeout,
                self._hosts,
                detector=self._detector(wire, links[rank], slow) if len(links) > 1 else None,
                join=functools.partial(self._join, rank),
                global_ranks=self._global_ranks,
            )
            for rank, wire in enumerate(self._wires)
        ]

    def _detector(self, wire: ThreadWire, links: QueueLinks, slow: float) -> Detector:
        thread = functools.partial(getattr, wire, "thread")
        detector = Detector(wire.rank, self._timeout, links, slow, thread, self._global_ranks)
        detector.start()
        return detector

    def _join(self, rank: int, ranks: tuple[int, ...], name: str, parent: Session) -> Session:
        """A rank's session among some ranks; the first of them that comes makes it for all.

        Raises:
            WireError: other ranks make another one.
        """
        number, _, _ = name.partition(":")
        with self._lock:
            if number not in self._parts:
                self._parts[number] = ranks, self._make_part(ranks)
            others, sessions = self._parts[number]
        if others != ranks:
            raise WireError(
                f"rank {rank}: rank {rank} makes a part of ranks {list(ranks)} where others make "
                f"one of {list(others)}",
                rank=rank,
                culprit=rank,
            )
        session = sessions.pop(ranks.index(rank))
        session.set_timeout(parent.timeout)
        return session

    def _make_part(self, ranks: tuple[int, ...]) -> dict[int, Session]:
        wires = self._more_wires(ranks)
        for rank, wire in zip(ranks, wires, strict=True):
            self._wires[rank].add_part(wire, ranks)
        crew = Crew(
            wires,
            [self._hosts[rank] for rank in ranks],
            self._timeout,
            lambda inner: self._more_wires([ranks[rank] for rank in inner]),
            [self._global_ranks[rank] for rank in ranks],
        )
        return dict(enumerate(crew.sessions()))


def outcome_on(group: Group, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Run a body with its group, which is also the default one; abort the group if it raises."""
    default.set(group)
    outcome = Outcome.of(group.rank, body, group, *args, **kwargs)
    default.clear("the body has ended")
    if outcome.error is not None:
        group.abort(f"{type(outcome.error).__name__}: {outcome.error}")
    return outcome


def on_groups(
    groups: Sequence[Group],
    body: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit: float | None = 180.0,
) -> list[Outcome]:
    """Run `body(group, *args, **kwargs)` with each of the groups, on a thread for each.

    If a body raises, its group is aborted, so that the other ranks end, too. For `limit` see
    `on_threads`.
    """

    def program(rank: int) -> Outcome:
        outcome = outcome_on(groups[rank], body, *args, **kwargs or {})
        groups[rank].close()
        return outcome

    def give_up() -> None:
        groups[0].abort(f"the ranks had {limit} s")

    return on_threads(len(groups), program, limit, give_up)


def on_threads(
    size: int,
    program: Callable[[int], Outcome],
    limit: float | None,
    give_up: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Run a program on a thread for each rank; in rank order.

    Args:
        size: how many ranks.
        program: of one rank, which it is told.
        limit: seconds after which a rank that has not ended is left running on its daemon thread,
            and reported as hanging; None: no limit.
        give_up: called before that, to end what can be ended.
    """
    outcomes: dict[int, Outcome] = {}

    def run(rank: int) -> None:
        outcomes[rank] = program(rank)

    threads = [
        threading.Thread(
            target=copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    deadline = deadline_of(limit)
    for thread in threads:
        join(thread, deadline - time.monotonic())
    late = {rank: place(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    if late:
        give_up()
    for rank in late:
        threads[rank].join(0.2)
    return [
        Outcome(rank, hangs=late[rank]) if rank in late else outcomes[rank] for rank in range(size)
    ]
