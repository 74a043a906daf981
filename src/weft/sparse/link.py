"""The figures of a group's network: read from a link profile, or measured.

The first call of a group that needs the figures finds them, on all ranks together. They come from
the first of these that exists:

* `WEFT_LINK=latency_us,gbit` in the environment, the same on every rank;
* the link profile that `WEFT_PROFILE` names;
* the profile that `weft tune` wrote for these hosts to the user's cache directory, or to
  `WEFT_CACHE_DIR`;
* a measurement: bytes go round the ring of ranks for a few tens of milliseconds. The next call that
  needs the figures measures again, and weft keeps the better ones: else a machine that was busy at
  start-up would seem slow as long as the group lives.

All ranks take the slowest rank's figures, rounded to coarse steps, so that they compute the same
costs and small noise does not change a choice.

Figures decide what is communicated, so all ranks must use the same profile or none: they compare
what they read. If a profile that `WEFT_PROFILE` names cannot be used, every rank raises the same
error. If one in the cache cannot be used, the log says so, and the link is measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import kernels
from ..agree import agree
from ..errors import WeftError
from ..kernels.jit import user_cache
from ..kernels.ops import OPS
from ..wire import base
from ..wire.base import MERGE, Link, Wire, all_gather_bytes
from .record import apart

_log = logging.getLogger("weft")

_WORK = 50e-6  # seconds of a core that a message costs, if WEFT_LINK says the other figures
_ENOUGH = 0.012  # seconds of streaming after which the rate is believed
_LARGEST = 1 << 23  # bytes
_MEASURED = 2  # calls that measure: other work on a machine only ever slows a link down
_EXCHANGES, _PASSES = 12, 2  # of latency, and of rate: the quickest counts
_FIGURES = struct.Struct("<5q64s")  # steps of alpha, beta, work, carry; cores, whose
_NAME = struct.Struct("<?255s")  # whether a profile was named; the host's name

_FORMAT, _VERSION = "weft link profile", 1
_RUNS, _ROWS, _WIDTH = 4, 20_000, 64  # sizes of what is merged to measure a core

_links: WeakKeyDictionary[Wire, tuple[Link, int]] = WeakKeyDictionary()
"""The figures of each wire, and how many calls are still to measure them."""


def link_of(wire: Wire) -> Link:
    """The figures of a group's network; read or measured the first time, by all ranks together.

    Raises:
        WeftError: WEFT_LINK, or the file that WEFT_PROFILE names, does not say them; on every
            rank.
    """
    known, more = _links.get(wire, (None, _MEASURED))
    if known is None or more:
        with apart(wire):  # the record of the call that needs the figures leaves this out
            found = _said(wire) if known is None else None
            if found is not None:
                more = 0
            else:
                found, more = measure(wire), more - 1
            if known is not None:
                found = Link(*map(min, astuple(known), astuple(found)))
        known = found
        _links[wire] = found, more
        wire.memory.drain()  # the measurement's blocks may be larger than any call's
    return known


def set_link(wire: Wire, link: Link) -> None:
    """Set the figures of a group; every rank must set the same."""
    _links[wire] = link, 0


def _said(wire: Wire) -> Link | None:
    """The figures that the environment or a profile gives; None without either."""
    said = os.environ.get("WEFT_LINK")
    if said is not None:
        return _agreed(wire, *parse(said), _WORK)
    hosts, named = _hosts(wire, "WEFT_PROFILE" in os.environ)
    try:
        profile = _profile(wire, hosts, named)
    except WeftError as error:
        if named:
            raise
        _log.warning("%s: the link is measured instead", error)
        return None
    figures = None if profile is None else profile.of(len(hosts))
    if profile is None or figures is None:
        return None
    return _agreed(wire, figures.alpha, figures.beta, figures.work, profile.merge)


def parse(text: str) -> tuple[float, float]:
    """Latency in seconds and seconds a byte, from what WEFT_LINK says. Raises WeftError."""
    try:
        latency, rate = (_positive(float(part)) for part in text.split(","))
    except ValueError:
        raise WeftError(
            f"WEFT_LINK={text!r} is not 'latency in µs,rate in Gbit/s': e.g. 50,10"
        ) from None
    return latency * 1e-6, 8e-9 / rate


def _positive(figure: Any) -> float:
    """The figure as a float. Raises ValueError if it is no finite number above 0."""
    if isinstance(figure, bool) or not 0 < float(figure) < math.inf:
        raise ValueError(f"{figure!r}, which is no time in seconds")
    return float(figure)


# measuring


def measure(wire: Wire) -> Link:
    """Measure the link of a wire; collective, every rank gets the same figures."""
    alpha, work = _latency(wire)
    beta, carry = _rate(wire)
    return _agreed(wire, alpha, beta, work, carry=carry)


def _agreed(
    wire: Wire, alpha: float, beta: float, work: float, merge: float = MERGE, carry: float = 0.0
) -> Link:
    """Exchange figures and take the slowest rank's; collective.

    The arguments are those of one rank that has a core for itself; in the result the ranks of a
    host share its cores.

    Args:
        wire: the ranks that take part.
        alpha, beta, work: seconds, see `Link`.
        merge: seconds in which a core merges a byte; the same on every rank.
        carry: seconds of a core for each byte that this rank receives.
    """
    steps = [round(4 * math.log2(max(each, 1e-15))) for each in (alpha, beta, work, carry)]
    message = _FIGURES.pack(*steps, os.cpu_count() or 1, wire.host.encode())
    heard = all_gather_bytes(wire, message, _figures)
    *steps_of, cores, hosts = zip(*heard, strict=True)
    # ranks for each core, on the most crowded host
    crowd = max(hosts.count(host) / n for host, n in zip(hosts, cores, strict=True))
    alpha, beta, work, carry = (2.0 ** (max(steps) / 4) for steps in steps_of)
    share = max(1.0, crowd)
    return Link(alpha, beta, merge * share, work * share, share, carry * crowd)


def _figures(raw: bytes) -> tuple[Any, ...]:
    """Steps, cores and host of a rank. Raises ValueError where these are none."""
    *steps, cores, _ = figures = _FIGURES.unpack(raw)
    if max(map(abs, steps)) > 400 or cores < 1:  # quarters of a power of two
        raise ValueError(f"it says {figures}")
    return figures


def _latency(wire: Wire) -> tuple[float, float]:
    """Seconds of a small exchange with all ranks, and CPU seconds of one of its messages."""
    message, best, busy = bytes(256), math.inf, []
    for _ in range(_EXCHANGES):
        start, before = time.perf_counter(), time.process_time()
        all_gather_bytes(wire, message, len)
        best = min(best, time.perf_counter() - start)
        busy.append(time.process_time() - before)
    return best, statistics.median(busy) / max(1, wire.size - 1)


def _rate(wire: Wire) -> tuple[float, float]:
    """Seconds that a byte takes when every rank sends to the next one, and this rank's CPU seconds.

    The size grows until the slowest rank is busy for long enough. Traffic shapers let a first burst
    pass. So the result is the time of each additional byte, if that is more than the average.
    """
    if wire.size == 1:
        return 1e-10, 0.0
    nbytes, before = 1 << 19, (0, 0.0)
    while True:
        quickest, carry = min(_round(wire, nbytes) for _ in range(_PASSES))
        if quickest >= _ENOUGH or nbytes >= _LARGEST:
            more = (quickest - before[1]) / (nbytes - before[0])
            return max(quickest / nbytes, more), carry / nbytes
        nbytes, before = 4 * nbytes, (nbytes, quickest)


def _round(wire: Wire, nbytes: int) -> tuple[float, float]:
    """Seconds of the slowest rank to send `nbytes` to the next one, and this rank's CPU seconds."""
    after, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    with wire.lease(nbytes) as outgoing, wire.lease(nbytes) as incoming:
        start, spent = time.perf_counter(), time.process_time()
        wire.post([(after, outgoing)], [(before, incoming)]).wait()
        slowest = torch.tensor([int((time.perf_counter() - start) * 1e9)])
        spent = time.process_time() - spent
    wire.dense_all_reduce(slowest, "max").wait()
    return int(slowest) * 1e-9, spent


# the profile


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds on a link: `alpha` for a round, `beta` for a byte, `work` of a core for a message."""

    alpha: float
    beta: float
    work: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The figures that `weft tune` measured.

    Attributes:
        hosts: the names of the hosts that it is for; empty: any hosts.
        ranks: how many ranks measured.
        between: the link between hosts; None if there was one host.
        within: the link between ranks of one host; None if no host had two.
        merge: seconds in which one core merges a byte.
    """

    hosts: tuple[str, ...]
    ranks: int
    between: Figures | None
    within: Figures | None
    merge: float

    def serves(self, hosts: Sequence[str]) -> str | None:
        """Why the profile cannot be used for a group on these hosts, or None if it can."""
        strange = sorted(set(hosts) - set(self.hosts))
        if self.hosts and strange:
            return f"was made for {', '.join(self.hosts)}, not for {', '.join(strange)}"
        if self.of(len(hosts)) is None:
            return (
                f"says nothing of ranks {'on several hosts' if len(hosts) > 1 else 'of one host'}"
            )
        return None

    def of(self, hosts: int) -> Figures | None:
        """The figures for a group on this number of hosts."""
        return self.between if hosts > 1 else self.within


def read(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        WeftError: there is none, it is broken, or it is another version's.
    """
    try:
        found = json.loads(path.read_text(errors="replace"))
    except OSError as error:
        raise WeftError(f"link profile {path} cannot be read: {error.strerror}") from None
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise WeftError(f"{path} is no link profile: write one with weft tune")
    if found.get("version") != _VERSION:
        raise WeftError(
            f"link profile {path} has version {found.get('version')!r}, this weft reads "
            f"{_VERSION}: run weft tune again"
        )
    try:
        between, within = (
            None if found[part] is None else Figures(*(_positive(found[part][f]) for f in _PARTS))
            for part in ("between", "within")
        )
        hosts = found["hosts"]
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError("hosts")
        merge = _positive(found["merge"])
        return Profile(tuple(hosts), int(found["ranks"]), between, within, merge)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise WeftError(f"link profile {path} is broken at {error}: run weft tune again") from None


_PARTS = ("alpha", "beta", "work")


def write(path: Path, profile: Profile) -> None:
    """Write a profile; after an error the file is as before."""
    about = {"format": _FORMAT, "version": _VERSION, "made": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    text = json.dumps(about | asdict(profile), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def default_path(hosts: Sequence[str]) -> Path | None:
    """The file of the profile for these hosts; None without a home directory."""
    key = hashlib.sha256("\n".join(sorted(hosts)).encode()).hexdigest()[:16]
    given = os.environ.get("WEFT_CACHE_DIR")
    try:
        return (Path(given) if given else user_cache()) / "links" / f"{key}.json"
    except RuntimeError:  # no home directory
        return None


def tune(wire: Wire) -> Profile:
    """Measure the hosts of a group, between and within; collective, the same on every rank.

    Takes some tenths of a second. WEFT_LINK and WEFT_PROFILE change nothing here.
    """
    members = base.hosts_of(wire).ranks
    found = torch.zeros(7, dtype=torch.float64)
    parts = [(0, ranks) for ranks in members if len(ranks) > 1]
    if len(members) > 1:
        parts.append((3, tuple(ranks[0] for ranks in members)))
    for at, ranks in parts:
        part = wire.sub(ranks)
        if part is not None:
            seen = measure(part)
            alone = seen.work * MERGE / seen.gamma  # as if the rank had a core for itself
            found[at : at + 3] = torch.tensor([seen.alpha, seen.beta, alone])
            part.close()
    if wire.rank in [ranks[0] for ranks in members]:
        found[6] = _merging()
    wire.dense_all_reduce(found, "max").wait()
    within, between = (Figures(*found[at : at + 3].tolist()) for at in (0, 3))
    return Profile(
        tuple(sorted(set(hosts_of(wire)[0]))),
        wire.size,
        between if between.beta else None,
        within if within.beta else None,
        float(found[6]),
    )


def hosts_of(wire: Wire) -> tuple[list[str], bool]:
    """The names of a group's hosts, and whether this rank is the first of its own; collective."""
    return _hosts(wire, False)[0], wire.rank in [ranks[0] for ranks in base.hosts_of(wire).ranks]


def _hosts(wire: Wire, named: bool) -> tuple[list[str], bool]:
    """The name of each host, sorted, and whether any rank is `named`; collective.

    Virtual hosts of one machine (WEFT_HOST) have the same name.
    """
    message = _NAME.pack(named, socket.gethostname().encode())
    said = all_gather_bytes(wire, message, _named)
    names = [said[ranks[0]][1] for ranks in base.hosts_of(wire).ranks]
    return sorted(names), any(one[0] for one in said)


def _named(raw: bytes) -> tuple[bool, str]:
    """Whether a rank's environment names a profile, and its host. Raises ValueError."""
    named, host = _NAME.unpack(raw)
    return named, host.rstrip(b"\0").decode()


def _merging() -> float:
    """Seconds in which one core merges a byte, as costs count bytes.

    The sums go to memory that was used before, as the memory of results usually is.
    """
    runs = [torch.arange(_ROWS) * 3 + shift for shift in range(_RUNS)]
    values = [torch.full((_ROWS, _WIDTH), float(run)) for run in range(_RUNS)]
    sums = torch.empty(len(kernels.union(runs).indices), _WIDTH)
    seen: list[float] = []
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            seen.clear()
            start = time.perf_counter()
            with kernels.meter.metered(seen.append):
                for slots, rows in zip(kernels.union(runs).slots, values, strict=True):
                    kernels.combine(sums, slots, rows, OPS["sum"])
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times) / sum(seen)


def _profile(wire: Wire, hosts: list[str], named: bool) -> Profile | None:
    """The profile that all ranks have, or None if no rank has one; collective.

    Args:
        wire: the ranks that take part.
        hosts: names of the group's hosts.
        named: whether WEFT_PROFILE is set on some rank: then the cache directory is not read.

    Raises:
        WeftError: a rank could not read its profile, ranks have different ones, or it is for other
            hosts.
    """
    given = os.environ.get("WEFT_PROFILE")
    path = default_path(hosts) if not named else None if given is None else Path(given)
    profile, digest, error = None, "none", None
    try:
        if path is not None and (named or path.exists()):
            profile = read(path)
            digest = hashlib.sha256(repr(profile).encode()).hexdigest()[:12]
            if why := profile.serves(hosts):
                error = f"link profile {digest} {why}: run weft tune on this group"
    except WeftError as wrong:
        error = str(wrong)
    nothing = torch.empty(0, dtype=torch.uint8)
    agree(wire, "link", {"link profile": digest}, error, nothing, lambda a, b: a).release()
    return profile
