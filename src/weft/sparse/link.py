"""The figures of a group's network: read from a link profile, or measured once.

The first call of a group that needs them finds them, all ranks together. The first of these holds:

* `WEFT_LINK=latency_us,gbit` in the environment, the same on every rank, says them;
* `WEFT_PROFILE` names a link profile;
* the user's cache directory has the profile that `weft tune` left for these hosts;
* moving bytes round the ring of ranks, for a few tens of milliseconds, measures them.

All ranks take the slowest rank's figures, rounded to coarse steps, so that they compute the same
costs and small noise does not change a choice.

Figures decide what is communicated, so all ranks use the same profile or none: they compare what
they read. A file that was named and does not serve is an error, the same on every rank; one
that was only found is passed over, which the log says, and the link is measured.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import kernels
from ..errors import WeftError
from ..kernels.jit import user_cache
from ..kernels.ops import OPS
from ..wire.base import MERGE, Link, Wire, all_gather_bytes
from .record import apart

_log = logging.getLogger("weft")

_WORK = 50e-6  # seconds of a core that a message costs, where nothing is to be measured
_ENOUGH = 0.012  # seconds of streaming after which the rate is believed
_LARGEST = 1 << 23  # bytes
_PASSES = 3  # the quickest pass counts: other work on a machine only ever slows one down
_FIGURES = struct.Struct("<5q")  # steps of alpha, beta, work, carry; cores
_HOST = 64  # bytes of a host's name that are compared

_FORMAT, _VERSION = "weft link profile", 1
_CAP = 16 << 10  # bytes of what a rank says of its profile
_TEXT = 400  # characters of a name or a sentence in it
_LENGTH = struct.Struct("<q")
_RUNS, _ROWS, _WIDTH = 4, 20_000, 64  # of what is merged to measure a core

_links: WeakKeyDictionary[Wire, Link] = WeakKeyDictionary()


def link_of(wire: Wire) -> Link:
    """The figures of a group's network; read or measured the first time, by all ranks together.

    Raises:
        WeftError: WEFT_LINK, or the file that WEFT_PROFILE names, does not say them; on every
            rank.
    """
    if wire not in _links:
        with apart(wire):  # which is no part of the call that wants to know
            _links[wire] = _found(wire)
        wire.memory.drain()  # of the blocks it measured with, which may be larger than any call's
    return _links[wire]


def set_link(wire: Wire, link: Link) -> None:
    """Have a group go by these figures; every rank gives the same."""
    _links[wire] = link


def _found(wire: Wire) -> Link:
    said = os.environ.get("WEFT_LINK")
    if said is not None:
        return _agreed(wire, *parse(said), _WORK)
    profile = _profile(wire)
    if profile is None:
        return measure(wire)
    figures, merge = profile
    return _agreed(wire, figures.alpha, figures.beta, figures.work, merge)


def parse(text: str) -> tuple[float, float]:
    """Latency in seconds and seconds a byte, from what WEFT_LINK says."""
    try:
        latency, rate = (float(part) for part in text.split(","))
        if not (0 < latency < math.inf and 0 < rate < math.inf):
            raise ValueError
    except ValueError:
        raise WeftError(
            f"WEFT_LINK={text!r} is not 'latency in µs,rate in Gbit/s': e.g. 50,10"
        ) from None
    return latency * 1e-6, 8e-9 / rate


# measuring


def measure(wire: Wire) -> Link:
    """Measure the link of a wire; collective, every rank gets the same figures."""
    alpha, work = _latency(wire)
    beta, carry = _rate(wire)
    return _agreed(wire, alpha, beta, work, carry=carry)


def _agreed(
    wire: Wire, alpha: float, beta: float, work: float, merge: float = MERGE, carry: float = 0.0
) -> Link:
    """The slowest rank's figures, for ranks that share the cores of their hosts; collective.

    Args:
        wire: among whom.
        alpha, beta, work: seconds, see `Link`; `work` that of a core alone.
        merge: seconds in which a core alone merges a byte; the same on every rank.
        carry: seconds of a core for each byte that this rank receives.
    """
    host = wire.host.encode()[:_HOST].ljust(_HOST, b"\0")
    steps = [round(4 * math.log2(max(each, 1e-15))) for each in (alpha, beta, work, carry)]
    heard = all_gather_bytes(wire, _FIGURES.pack(*steps, os.cpu_count() or 1) + host)
    hosts = [text[_FIGURES.size :] for text in heard]
    *steps_of, cores = zip(*map(_FIGURES.unpack_from, heard), strict=True)
    # ranks to a core, where they are closest together
    crowd = max(hosts.count(host) / n for host, n in zip(hosts, cores, strict=True))
    alpha, beta, work, carry = (2.0 ** (max(steps) / 4) for steps in steps_of)
    share = max(1.0, crowd)
    return Link(alpha, beta, merge * share, work * share, share, carry * crowd)


def _latency(wire: Wire) -> tuple[float, float]:
    """Seconds that a small exchange with everybody takes, and a core's for a message of it."""
    message, best, busy = torch.zeros(256, dtype=torch.uint8), math.inf, []
    for _ in range(4 * _PASSES):
        start, before = time.perf_counter(), time.process_time()
        pending = wire.small_all_gather(message, 256)
        pending.wait()
        pending.release()
        best = min(best, time.perf_counter() - start)
        busy.append(time.process_time() - before)
    return best, statistics.median(busy) / max(1, wire.size - 1)


def _rate(wire: Wire) -> tuple[float, float]:
    """Seconds a byte takes when every rank sends to the next and receives from the last.

    Also, seconds of a core that this rank takes for it.

    The size grows until the slowest rank is busy for long enough. Shapers let a first burst pass:
    so what a byte more takes counts, where that is more than the average byte.
    """
    if wire.size == 1:
        return 1e-10, 0.0
    nbytes, before = 1 << 19, (0, 0.0)
    while True:
        # twice, since one hiccup would be believed for as long as the wire lives
        quickest, carry = min(_round(wire, nbytes), _round(wire, nbytes))
        if quickest >= _ENOUGH or nbytes >= _LARGEST:
            passes = range(2, _PASSES if quickest < 4 * _ENOUGH else 2)
            quickest, carry = min([(quickest, carry), *(_round(wire, nbytes) for _ in passes)])
            more = (quickest - before[1]) / (nbytes - before[0])
            return max(quickest / nbytes, more), carry / nbytes
        nbytes, before = 4 * nbytes, (nbytes, quickest)


def _round(wire: Wire, nbytes: int) -> tuple[float, float]:
    """Seconds that the slowest rank takes to send so much to the next one while it receives.

    Also, seconds of a core that this rank takes.
    """
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
    """Of a link, in seconds: `alpha` a round, `beta` a byte, `work` of a core alone a message."""

    alpha: float
    beta: float
    work: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What `weft tune` found.

    Attributes:
        hosts: the names of the hosts it is about; empty: of any.
        ranks: how many ranks measured.
        between: of the link between hosts, None if there was one host.
        within: of the link between ranks of one host, None if none had two.
        merge: seconds in which a core alone merges a byte.
    """

    hosts: tuple[str, ...]
    ranks: int
    between: Figures | None
    within: Figures | None
    merge: float

    def serves(self, hosts: Sequence[str]) -> str | None:
        """None, or why it does not serve a group on these hosts."""
        strange = sorted(set(hosts) - set(self.hosts))
        if self.hosts and strange:
            return f"was made for {', '.join(self.hosts)}, not for {', '.join(strange)}"
        if self.of(len(hosts)) is None:
            return (
                f"says nothing of ranks {'on several hosts' if len(hosts) > 1 else 'of one host'}"
            )
        return None

    def of(self, hosts: int) -> Figures | None:
        """What holds for a group on so many hosts."""
        return self.between if hosts > 1 else self.within


def read(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        WeftError: there is none, it is broken, or it is another version's.
    """
    return _parsed(_text(path), str(path))


def write(path: Path, profile: Profile) -> None:
    """Write a profile, as a whole or not at all."""
    about = {"format": _FORMAT, "version": _VERSION, "made": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    text = json.dumps(about | asdict(profile), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def default_path(hosts: Sequence[str]) -> Path | None:
    """Where the profile of a group on these hosts is kept; None without a home directory."""
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
    said = _places(wire)
    places = [one["place"] for one in said]
    members = [[r for r in range(wire.size) if places[r] == place] for place in Counter(places)]
    found = torch.zeros(7, dtype=torch.float64)
    parts = [(0, ranks) for ranks in members if len(ranks) > 1]
    if len(members) > 1:
        parts.append((3, [ranks[0] for ranks in members]))
    for at, ranks in parts:
        part = wire.sub(ranks)
        if part is not None:
            seen = measure(part)
            alone = seen.work * MERGE / seen.gamma  # without the cores shared
            found[at : at + 3] = torch.tensor([seen.alpha, seen.beta, alone])
            part.close()
    if wire.rank in [ranks[0] for ranks in members]:
        found[6] = _merging()
    wire.dense_all_reduce(found, "max").wait()
    within, between = (Figures(*found[at : at + 3].tolist()) for at in (0, 3))
    return Profile(
        tuple(sorted(set(_hosts(said)))),
        wire.size,
        between if between.beta else None,
        within if within.beta else None,
        float(found[6]),
    )


def hosts_of(wire: Wire) -> tuple[list[str], bool]:
    """The names of a group's hosts, and whether this rank is the first of its own; collective."""
    said = _places(wire)
    places = [one["place"] for one in said]
    return _hosts(said), places.index(places[wire.rank]) == wire.rank


def _merging() -> float:
    """Seconds in which a core alone merges a byte, as costs count bytes: into memory that served
    before, as that of results does."""
    runs = [torch.arange(_ROWS) * 3 + shift for shift in range(_RUNS)]
    values = [torch.full((_ROWS, _WIDTH), float(run)) for run in range(_RUNS)]
    sums = torch.empty(len(kernels.union(runs).indices), _WIDTH)
    seen: list[float] = []
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(_PASSES):
            seen.clear()
            start = time.perf_counter()
            with kernels.meter.metered(seen.append):
                for slots, rows in zip(kernels.union(runs).slots, values, strict=True):
                    kernels.combine(sums, slots, rows, OPS["sum"])
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times) / sum(seen)


def _profile(wire: Wire) -> tuple[Figures, float] | None:
    """What a profile says of the link, and of merging; collective, the same on every rank."""
    said = _everybody(wire, _place() | _file(os.environ.get("WEFT_PROFILE")))
    hosts, named = _hosts(said), any(one["named"] for one in said)
    if not named:
        said = _everybody(wire, _file(default_path(hosts)))
    try:
        profile = _agreed_profile(said, hosts)
    except WeftError as error:
        if named:
            raise
        _log.warning("%s: the link is measured instead", error)
        return None
    here = None if profile is None else profile.of(len(hosts))
    return None if profile is None or here is None else (here, profile.merge)


def _agreed_profile(said: list[dict[str, Any]], hosts: list[str]) -> Profile | None:
    """The profile that every rank has, None if none has any.

    Raises:
        WeftError: ranks could not read theirs, have different ones, or it does not serve.
    """
    for rank, one in enumerate(said):
        if one["error"]:
            raise WeftError(f"rank {rank}: {one['error']}")
    texts = [one["text"] for one in said]
    digests = [hashlib.sha256(text.encode()).hexdigest()[:12] if text else "none" for text in texts]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise WeftError(
            f"rank 0 has link profile {digests[0]}, rank {other} {digests[other]}: give every rank "
            "the same file"
        )
    if not texts[0]:
        return None
    profile = _parsed(texts[0], said[0]["named"])
    if why := profile.serves(hosts):
        raise WeftError(f"link profile {digests[0]} {why}: run weft tune on this group")
    return profile


def _file(path: str | Path | None) -> dict[str, Any]:
    """What this rank says of the profile in a file."""
    said: dict[str, Any] = {"named": "" if path is None else str(path)[-_TEXT:]}
    text = error = ""
    if isinstance(path, str) or (path is not None and path.exists()):
        try:
            text = _text(Path(path))
            _parsed(text, str(path))
        except WeftError as wrong:
            text, error = "", str(wrong)[:_TEXT]
    return said | {"text": text, "error": error}


def _places(wire: Wire) -> list[dict[str, Any]]:
    return _everybody(wire, _place())


def _everybody(wire: Wire, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks say, in rank order; collective."""
    text = json.dumps(mine).encode()
    heard = all_gather_bytes(wire, _LENGTH.pack(len(text)) + text, _CAP)
    start = _LENGTH.size
    return [json.loads(each[start : start + _LENGTH.unpack_from(each)[0]]) for each in heard]


def _hosts(said: list[dict[str, Any]]) -> list[str]:
    """The name of each host, once; hosts of a virtual network may share one."""
    return sorted({one["place"]: one["host"] for one in said}.values())


@functools.cache
def _place() -> dict[str, Any]:
    """This rank's host, and its place on the network: virtual hosts of a machine are several."""
    host, namespace = socket.gethostname()[:_TEXT], "/proc/self/ns/net"
    network = os.readlink(namespace) if os.path.exists(namespace) else ""
    return {"host": host, "place": f"{host} {network}"}


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_CAP // 2 + 1)
    except OSError as error:
        raise WeftError(f"link profile {path} cannot be read: {error.strerror}") from None
    return text.decode(errors="replace") if len(text) <= _CAP // 2 else "too long"


def _parsed(text: str, name: str) -> Profile:
    try:
        found = json.loads(text)
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise WeftError(f"{name} is no link profile: write one with weft tune")
    if found.get("version") != _VERSION:
        raise WeftError(
            f"link profile {name} has version {found.get('version')!r}, this weft reads "
            f"{_VERSION}: run weft tune again"
        )
    try:
        between, within = (
            None if found[part] is None else Figures(*(_time(found[part][f]) for f in _PARTS))
            for part in ("between", "within")
        )
        hosts = found["hosts"]
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError("hosts")
        return Profile(tuple(hosts), int(found["ranks"]), between, within, _time(found["merge"]))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise WeftError(f"link profile {name} is broken at {error}: run weft tune again") from None


_PARTS = ("alpha", "beta", "work")


def _time(given: object) -> float:
    """Seconds, as a profile may say them."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e3:
        raise ValueError(f"{given!r}, which is no time in seconds")
    return float(given)
