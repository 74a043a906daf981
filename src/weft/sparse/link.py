"""The figures of a group's network: said by the environment, stated by the wire, or measured.

The first call of a group that needs the figures finds them, on all ranks together. They are those
of what carries the group's tensors: a device has a wire of its own. They are what
`WEFT_LINK=latency_us,gbit` says, the same on every rank, else what the wire states as constants of
its kind (`Features.between`), or else a measurement: bytes go round the ring of ranks for a few
tens of milliseconds, or for 20 latencies where that is longer. They go host by host, so that one
stream enters each host and one leaves it. Where some ranks, but not all, share a host, bytes go
round the ranks of each host, too. The next call that needs the figures measures again, and weft
keeps the better ones: else a machine that was busy at start-up would seem slow as long as the group
lives.

Where openings are not direct, above 16 ranks, a rank exchanges small messages with log2 P others on
each side only: else the first call would connect every two ranks, and a latency would be the time
of P messages.

All ranks take the slowest rank's figures, rounded to coarse steps, so that they compute the same
costs and small noise does not change a choice.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..agree import is_direct
from ..errors import WeftError
from ..group.group import Group
from ..group.pending import Pending
from ..group.session import Session
from ..schedules.hosts import hosts_of
from ..wire.link import MERGE, Link
from .record import unrecorded

T = TypeVar("T")

_WORK = 50e-6  # seconds of a core that a message costs, if WEFT_LINK says the other figures
_FASTEST = 1_000_000  # Gbit/s: of what is much quicker, a byte takes less than can be stated
_ENOUGH = 0.012  # seconds of streaming after which the rate is believed
_LATENCIES = 20  # and latencies: a connection between distant hosts takes some to come to its speed
_LARGEST = 1 << 23  # bytes
_MEASURED = 2  # calls that measure: other work on a machine only ever slows a link down
_EXCHANGES = 12  # of latency: the quickest two in a row count
_PASSES = 2  # of rate: the quickest counts
_FIGURES = struct.Struct("<6q64s")  # steps of alpha, beta, work, carry, within; cores, machine
_UNKNOWN = -200  # steps: quarters of a power of two; of a figure that was not measured
_SMALL = 256  # bytes of a small message
_CHANNEL = 7  # that no other room uses
_NANOSECONDS = struct.Struct("<q")

_FIGURES_KEPT = "figures of the link"
"""Of a group's state: the figures, and how many calls are still to measure them."""

_set: WeakKeyDictionary[Session, Link] = WeakKeyDictionary()
"""The figures that a program has set."""


def link_of(group: Group) -> Link:
    """The figures of what carries a group's tensors; found the first time, by all ranks together.

    Raises:
        WeftError: WEFT_LINK does not say them; on every rank.
    """
    if group.session in _set:
        return _set[group.session]
    known: Link | None
    known, more = group.state.get(_FIGURES_KEPT, (None, _MEASURED))
    if known is None or more:
        with unrecorded(group):
            figures: Link | None = None
            if known is None:
                figures = _of_environment(group) or _stated(group)
            if figures is not None:
                more = 0
            else:
                figures = measure(group)
                more -= 1
            if known is not None:
                figures = Link(*map(min, astuple(known), astuple(figures)))
        known = figures
        group.state[_FIGURES_KEPT] = figures, more
        group.memory.drain()  # the measurement's blocks may be larger than any call's
    return known


def set_link(group: Group, link: Link) -> None:
    """Set the figures of a group, whatever carries its tensors; every rank must set the same.

    They are those of its subsets, too.
    """
    _set[group.session] = link


def _of_environment(group: Group) -> Link | None:
    """The figures that the environment gives; None without."""
    text = os.environ.get("WEFT_LINK")
    return None if text is None else _agreed(group, *parse(text), _WORK)


def _stated(group: Group) -> Link | None:
    """The figures that the wire states as constants of its kind; None if it does not."""
    between = group.features.between
    within = group.features.within
    if between is None:
        return None
    hosts = hosts_of(group).ranks
    inside = 0.0
    if len(hosts) == 1:
        between = within or between
    elif within is not None and len(hosts) < group.size:
        inside = within.seconds_a_byte
    return _agreed(group, between.latency, between.seconds_a_byte, between.work, within=inside)


def parse(text: str) -> tuple[float, float]:
    """Latency in seconds and seconds a byte, from what WEFT_LINK says. Raises WeftError."""
    try:
        latency, rate = (_positive(float(part)) for part in text.split(","))
        if rate > _FASTEST:
            raise ValueError("no link is as fast")
    except ValueError:
        raise WeftError(
            f"WEFT_LINK={text!r} is not 'latency in µs,rate in Gbit/s': e.g. 50,10 (at most "
            f"{_FASTEST} Gbit/s)"
        ) from None
    return latency * 1e-6, 8e-9 / rate


def _positive(figure: Any) -> float:
    """The figure as a float. Raises ValueError if it is no finite number above 0."""
    if isinstance(figure, bool) or not 0 < float(figure) < math.inf:
        raise ValueError(f"{figure!r}, which is no time in seconds")
    return float(figure)


# measuring


def measure(group: Group) -> Link:
    """Measure what carries a group's tensors; collective, every rank gets the same figures."""
    hosts = hosts_of(group).ranks
    alpha, work = measure_latency(group)
    host_by_host = [*itertools.chain(*hosts)]
    beta, carry = measure_rate(group, host_by_host, _slowest(group, alpha))
    within = 0.0
    if 1 < len(hosts) < group.size:
        neighbours = next(ranks for ranks in hosts if group.rank in ranks)
        within, _ = measure_rate(group, neighbours, 0.0)  # a host has next to no latency
    return _agreed(group, alpha, beta, work, carry, within)


def _agreed(
    group: Group, alpha: float, beta: float, work: float, carry: float = 0.0, within: float = 0.0
) -> Link:
    """Exchange figures and take the slowest rank's; collective.

    The arguments are those of one rank that has a core for itself; in the result the ranks of a
    host share its cores.

    Args:
        group: the ranks that take part.
        alpha, beta, work: seconds, see `Link`.
        carry: seconds of a core for each byte that this rank receives; 0: not measured.
        within: see `Link`; 0: not measured.
    """
    steps = [_steps(each) for each in (alpha, beta, work, carry, within)]
    message = _FIGURES.pack(*steps, os.cpu_count() or 1, group.machine.encode())
    heard = _all_gathered(group, message, _figures)
    *steps_of, cores, hosts = zip(*heard, strict=True)
    # ranks for each core, on the most crowded host
    crowd = max(hosts.count(host) / n for host, n in zip(hosts, cores, strict=True))
    alpha, beta, work, carry, within = (_seconds(max(steps)) for steps in steps_of)
    share = max(1.0, crowd)
    return Link(alpha, beta, MERGE * share, work * share, share, carry * crowd, within)


def _steps(seconds: float) -> int:
    """A figure in quarters of a power of two, so that small noise does not change a choice."""
    if seconds <= 0:
        return _UNKNOWN
    return max(_UNKNOWN, round(4 * math.log2(seconds)))


def _seconds(steps: int) -> float:
    """The figure that so many quarters of a power of two stand for."""
    if steps == _UNKNOWN:
        return 0.0
    return math.exp2(steps / 4)


def _figures(raw: bytes) -> tuple[Any, ...]:
    """Steps, cores and host of a rank. Raises ValueError where these are none."""
    *steps, cores, _ = figures = _FIGURES.unpack(raw)
    if max(map(abs, steps)) > 400 or cores < 1:
        raise ValueError(f"it says {figures}")
    return figures


class _Clock:
    """How long something takes, and how long it keeps threads of this process busy.

    It runs from when it is made.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy_before = time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds so far, and seconds of a core."""
        seconds = time.perf_counter() - self._start
        return seconds, time.process_time() - self._busy_before


def measure_latency(group: Group) -> tuple[float, float]:
    """Seconds of a small exchange, and CPU seconds of one of its messages.

    It is one with all ranks, or of many with log2 P on each side.

    If one of two hosts begins late, their exchanges are too short and too long in turn, for good:
    what the other one sent is under way already, or has still to be sent. Two of them, one after
    the other, always take two latencies.
    """
    message = torch.zeros(_SMALL, dtype=torch.uint8, device=group.device)
    peers = group.peers
    if not is_direct(group):
        before, behind = group.peers_by_doubling
        peers = [*dict.fromkeys([*before, *behind])]
    sends = [(peer, message) for peer in peers]
    recvs = [(peer, _SMALL) for peer in peers]
    times = []
    busy_times = []
    for _ in range(_EXCHANGES):
        clock = _Clock()
        wait_on_host(group, group.post(sends, recvs, _CHANNEL))
        seconds, busy = clock.read()
        times.append(seconds)
        busy_times.append(busy)
    best = min(map(statistics.fmean, itertools.pairwise(times)))
    return best, statistics.median(busy_times) / max(1, len(sends))


def wait_on_host(group: Group, pending: Pending) -> None:
    """Wait for messages on the host, also where a stream waits for them."""
    pending.wait()
    if group.features.streams:
        event = torch.Event(group.device)
        event.record(torch.accelerator.current_stream(group.device))
        event.synchronize()
    pending.release()


def measure_rate(group: Group, ring: Sequence[int], latency: float) -> tuple[float, float]:
    """Seconds that a byte takes when every rank sends to the next one, and this rank's CPU seconds.

    The size grows until the slowest rank is busy for long enough. Traffic shapers let a first burst
    pass. So the result is the time of each additional byte, if that is more than the average.

    Args:
        group: all its ranks measure at once, each in a ring.
        ring: the ranks of this rank's ring; itself alone: it sends nothing.
        latency: seconds of a small exchange, the same on every rank.
    """
    if group.size == 1:
        return 1e-10, 0.0
    enough = max(_ENOUGH, _LATENCIES * latency)
    nbytes = 1 << 19
    nbytes_before = 0
    quickest_before = latency
    while True:
        quickest, carry = min(time_round(group, ring, nbytes) for _ in range(_PASSES))
        if quickest >= enough or nbytes >= _LARGEST:
            average = max(quickest - latency, quickest / 2) / nbytes
            more = (quickest - quickest_before) / (nbytes - nbytes_before)
            return max(average, more), carry / nbytes
        nbytes_before = nbytes
        quickest_before = quickest
        nbytes *= 4


def time_round(group: Group, ring: Sequence[int], nbytes: int) -> tuple[float, float]:
    """Seconds of the slowest rank to get `nbytes` from the one before, and this rank's CPU seconds.

    The clock of a rank stops once it has received. Its own message also has to wait for the next
    rank, which may begin some latencies later: so long as many ranks need to tell each other that
    the round before is over (`_slowest`).
    """
    place = ring.index(group.rank)
    after = ring[(place + 1) % len(ring)]
    before = ring[place - 1]
    if len(ring) == 1:
        wait_on_host(group, group.post())  # in the others' round, if there are rounds
        return _slowest(group, 0.0), 0.0
    with group.lease(nbytes) as outgoing, group.lease(nbytes) as incoming:
        clock = _Clock()
        sending = group.post([(after, outgoing)], (), _CHANNEL)
        wait_on_host(group, group.post((), [(before, incoming)], _CHANNEL))
        seconds, _ = clock.read()
        wait_on_host(group, sending)
        _, busy = clock.read()
    return _slowest(group, seconds), busy


def _slowest(group: Group, seconds: float) -> float:
    """The most seconds of any rank; collective."""
    own = _NANOSECONDS.pack(int(seconds * 1e9))
    return max(_all_gathered(group, own, _nanoseconds_in)) * 1e-9


def _all_gathered(group: Group, message: bytes, decode: Callable[[bytes], T]) -> list[T]:
    """What every rank says, decoded, in rank order; collective. All say equally much."""
    if is_direct(group):
        return group.all_gather_bytes(message, decode)
    return group.all_gather_by_doubling(message, decode)


def _nanoseconds_in(raw: bytes) -> int:
    """Nanoseconds that a rank says. Raises struct.error if they are none."""
    nanoseconds: int = _NANOSECONDS.unpack(raw)[0]
    return nanoseconds
