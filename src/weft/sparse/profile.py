"""The link profile: figures of a network that were measured once, and are read ever after.

`weft tune` measures and writes it, as JSON; `auto` reads it where it would else measure. It holds
figures between hosts and within one, and how fast a core merges, so that it serves groups of
any number of ranks on the same hosts. `WEFT_PROFILE` in the environment names the file; without it
the one is taken that `weft tune` left in the user's cache directory for these hosts.

Figures decide what is communicated, so all ranks use the same or none: they compare digests of what
they found. A file that was named and does not serve is an error, the same on every rank; one
that was only found is passed over, which the log says, and the link is measured.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import kernels
from ..errors import WeftError
from ..kernels.cache import user_cache
from ..kernels.compile import compiler
from ..kernels.ops import OPS
from ..wire.base import Wire
from ..wire.link import MERGE, Link, agreed, figures, measure

__all__ = ["Figures", "Profile", "default_path", "hosts_of", "link", "read", "tune", "write"]

_log = logging.getLogger("weft")

_FORMAT, _VERSION = "weft link profile", 1
_LARGEST = 1 << 16  # bytes of a file that is read at all
_CAP = 2048  # bytes of what a rank says of its profile
_TEXT = 400  # characters of a name or a sentence in it
_FIGURES = ("alpha", "beta", "work")
_WAITS, _NAP = 600, 0.1  # times that ranks ask each other whether any is busy, seconds between
_LENGTH = struct.Struct("<q")
_RUNS, _ROWS, _WIDTH, _PASSES = 4, 20_000, 64, 3  # of what is merged to measure a core


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
    return _parsed(_bytes(path), str(path))


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
    folder = _folder()
    return None if folder is None else folder / f"{key}.json"


def link(wire: Wire, look: Callable[[Wire], Link] = figures) -> Link:
    """The figures of a wire's network, from a profile or measured; collective.

    Args:
        wire: whose network.
        look: measures it, where nothing else says what it is like.

    Raises:
        WeftError: WEFT_PROFILE names a file that does not serve, on any rank; on every rank.
    """
    if os.environ.get("WEFT_LINK") is not None:
        return measure(wire)
    said = _everybody(wire, _statement())
    hosts = _hosts(said)
    profile: Profile | None = None
    if any(one["named"] for one in said):
        profile = _named(said, hosts)
    elif all(one["kept"] for one in said):
        profile = _found(wire, hosts)
    here = None if profile is None else profile.of(len(hosts))
    if profile is None or here is None:
        return look(wire)
    return agreed(wire, here.alpha, here.beta, here.work, profile.merge)


def tune(wire: Wire) -> Profile:
    """Measure the hosts of a group, between and within; collective, the same on every rank.

    Takes some tenths of a second, and before that until no rank makes machine code any more, which
    keeps cores so busy that a link looks tens of times slower than it is. WEFT_LINK and
    WEFT_PROFILE change nothing here.
    """
    _calm(wire)
    said = _everybody(wire, _statement())
    places = [one["place"] for one in said]
    members = [[r for r in range(wire.size) if places[r] == place] for place in _distinct(places)]
    found = torch.zeros(7, dtype=torch.float64)
    parts = [(0, ranks) for ranks in members if len(ranks) > 1]
    if len(members) > 1:
        parts.append((3, [ranks[0] for ranks in members]))
    for at, ranks in parts:
        part = wire.sub(ranks)
        if part is not None:
            seen = figures(part)
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
    said = _everybody(wire, _statement())
    places = [one["place"] for one in said]
    return _hosts(said), places.index(places[wire.rank]) == wire.rank


def _calm(wire: Wire) -> None:
    """Have the machine code made that measuring asks for; wait until no rank is at that."""
    figures(wire)
    _merging()
    for _ in range(_WAITS):  # all hear the same, so all stop alike
        if not any(one[0] for one in wire.all_gather_bytes(bytes([compiler.busy]))):
            return
        time.sleep(_NAP)
    _log.warning("ranks still make machine code after %d s: figures are rough", _WAITS * _NAP)


def _merging() -> float:
    """Seconds in which a core alone merges a byte, as costs count bytes: into memory that served
    before, as that of results does."""
    kernels.warm([(torch.int64, torch.float32, OPS["sum"])])
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


def _named(said: list[dict[str, Any]], hosts: list[str]) -> Profile:
    """The profile that WEFT_PROFILE names; `said` is the same on every rank, and so is all this."""
    for rank, one in enumerate(said):
        if one["error"]:
            raise WeftError(f"rank {rank}: {one['error']}")
    digests = [one["digest"] or "none" for one in said]
    other = next((r for r, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise WeftError(
            f"rank 0 has link profile {digests[0]} in WEFT_PROFILE, rank {other} {digests[other]}: "
            "give every rank the same file"
        )
    profile = _parsed(_bytes(Path(os.environ["WEFT_PROFILE"])), os.environ["WEFT_PROFILE"])
    if why := profile.serves(hosts):
        raise WeftError(f"link profile {digests[0]} {why}: run weft tune on this group")
    return profile


def _found(wire: Wire, hosts: list[str]) -> Profile | None:
    """The profile that is kept for these hosts, if all ranks have the same; collective."""
    path, profile, mine = default_path(hosts), None, {"digest": "", "error": ""}
    if path is not None and path.exists():
        try:
            profile, mine["digest"] = read(path), _digest(_bytes(path))
        except WeftError as error:
            mine["error"] = str(error)[:_TEXT]
    said = _everybody(wire, mine)
    for rank, one in enumerate(said):
        if one["error"]:
            _log.warning("rank %d: %s: the link is measured instead", rank, one["error"])
            return None
    if len({one["digest"] for one in said}) > 1:
        _log.warning("the hosts keep different link profiles: the link is measured instead")
        return None
    if profile is not None and (why := profile.serves(hosts)):
        _log.warning("link profile %s %s: the link is measured instead", path, why)
        return None
    return profile


def _statement() -> dict[str, Any]:
    """What this rank says: where it is, and what it found."""
    name, digest, error = os.environ.get("WEFT_PROFILE"), "", ""
    if name is not None:
        try:
            read(Path(name))
            digest = _digest(_bytes(Path(name)))
        except WeftError as wrong:
            error = str(wrong)[:_TEXT]
    folder = _folder()
    return {
        "host": socket.gethostname()[:_TEXT],
        "place": _place()[:_TEXT],
        "named": name is not None,
        "kept": folder is not None and folder.is_dir(),
        "digest": digest,
        "error": error,
    }


def _everybody(wire: Wire, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks say, in rank order; collective."""
    text = json.dumps(mine).encode()
    heard = wire.all_gather_bytes(_LENGTH.pack(len(text)) + text, _CAP)
    start = _LENGTH.size
    return [json.loads(each[start : start + _LENGTH.unpack_from(each)[0]]) for each in heard]


def _hosts(said: list[dict[str, Any]]) -> list[str]:
    """The name of each host, once; hosts of a virtual network may share one."""
    return sorted({one["place"]: one["host"] for one in said}.values())


def _distinct(names: list[str]) -> list[str]:
    return list(Counter(names))


def _parsed(text: bytes, name: str) -> Profile:
    try:
        found = json.loads(text) if len(text) <= _LARGEST else None
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
        parts = [
            None if found[part] is None else Figures(*(_time(found[part][f]) for f in _FIGURES))
            for part in ("between", "within")
        ]
        hosts = found["hosts"]
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError("hosts")
        return Profile(tuple(hosts), int(found["ranks"]), parts[0], parts[1], _time(found["merge"]))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise WeftError(f"link profile {name} is broken at {error}: run weft tune again") from None


def _time(given: object) -> float:
    """Seconds, as a profile may say them."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e3:
        raise ValueError(f"{given!r}, which is no time in seconds")
    return float(given)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST + 1)
    except OSError as error:
        raise WeftError(f"link profile {path} cannot be read: {error.strerror}") from None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


@functools.cache
def _place() -> str:
    """This rank's host on the network: virtual hosts of one machine are several."""
    namespace = "/proc/self/ns/net"
    return f"{socket.gethostname()} {os.readlink(namespace) if os.path.exists(namespace) else ''}"


def _folder() -> Path | None:
    given = os.environ.get("WEFT_CACHE_DIR")
    try:
        return (Path(given) if given else user_cache()) / "links"
    except RuntimeError:  # no home directory
        return None
