"""`weft doctor`: what this machine and this launch have, what is wrong, and what to type.

Alone it looks at this process: versions, what serves the arithmetic, backends, interfaces, the
launcher's variables, the place where the ranks are to meet. Under a launcher of several ranks it
also starts weft, and measures latency and bandwidth between every two of them, one pair at a time,
with messages as weft sends them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import torch
import torch.distributed as dist
import typer
from rich.text import Text
from typer import Option

import weft
from weft import Group
from weft.base.cores import cores_of_process
from weft.bootstrap import Preview, look_ahead
from weft.schedules import dense_all_reduce
from weft.schedules.hosts import hosts_of

from . import options, show, wording

_SMALL = 8  # bytes of a message that shows latency
_ROUNDS = 20  # how often it goes there and back
_SLOW = 3.0  # of the median: a pair that much slower than others is pointed out
_VARIABLES = ("WEFT_INTERFACE", "SAR_SOCKET_NAME", "GLOO_SOCKET_IFNAME")
_STYLES = {"ok": "green", "note": "yellow", "wrong": "red", "-": "dim"}


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        level: "ok", "note" (works, could be better), "wrong", or "-" (not here).
        what: the subject.
        text: what was found.
        remedy: what to type or do, or empty.
    """

    level: str
    what: str
    text: str
    remedy: str = ""

    @classmethod
    def of(cls, level: str, what: str, error: Exception) -> Finding:
        """From an error, whose text ends with the remedy."""
        text, _, remedy = str(error).rpartition(": ")
        return cls(level, what, text or remedy, remedy if text else "")


class Pair(NamedTuple):
    """The connection of two ranks: round trip in seconds, bandwidth in bytes a second.

    `near`: they are on one host.
    """

    low: int
    high: int
    round_trip: float
    bandwidth: float
    near: bool = False


def doctor(
    mib: Annotated[float, Option(min=0.01, help="Size of a message in MiB, for bandwidth.")] = 4.0,
    rendezvous: Annotated[str | None, Option(help="As in weft.init(rendezvous=).")] = None,
    timeout: Annotated[float, Option(help="Seconds to wait for the other ranks.")] = 30.0,
) -> None:
    """Check this machine, launch and network, and say what to type if something is wrong.

    Under torchrun, mpirun or srun it also measures every pair of ranks:
    torchrun --nproc-per-node 4 -m weft doctor
    """
    ahead = look_ahead(rendezvous)
    findings, pairs, in_force = [*look(ahead)], list[Pair](), ""
    if "launch" not in ahead.errors:  # weft.init would raise the same
        met, pairs, in_force = network(rendezvous, timeout, int(mib * 2**20))
        findings += met
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if ahead.rank == 0:  # the others say only what is wrong with them
        _print(findings, pairs)
        in_force = in_force or str(weft.config())
        show.console().print(f"\nin force (weft.config()):\n{in_force}", soft_wrap=True)
        show.console().print(f"\n{_next(findings, pairs)}", soft_wrap=True)
    else:
        _print(wrong, [])
    raise typer.Exit(1 if wrong else 0)


def _next(findings: list[Finding], pairs: list[Pair]) -> str:
    """What to do now."""
    if any(finding.level == "wrong" for finding in findings):
        return "what is marked as wrong comes first: its arrow says what to type"
    if pairs:
        return (
            "the ranks meet, so a program started in the same way will; weft bench times its sums"
        )
    return (
        "this process has what it needs; for several, and the links between them: "
        "torchrun --nproc-per-node 4 -m weft doctor"
    )


def look(ahead: Preview) -> Iterator[Finding]:
    """What can be seen without the other ranks."""
    yield _package()
    versions = wording.versions()
    yield Finding("ok", "versions", wording.listed(versions))
    if "numba" not in versions["kernels"].lower():
        remedy = "pip install numba: machine code is several times quicker"
        yield Finding("note", "arithmetic", versions["kernels"], remedy)
    yield from _backends(ahead)
    if missing := options.missing_extra():
        yield Finding("-", "weft demo", *missing.split(": ", 1))
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        kind, count = accelerator.type, torch.accelerator.device_count()
        backend = dist.get_default_backend_for_device(kind)
        way = f"{count}; tensors stay there where the group's backend is cpu:gloo,{kind}:{backend}"
        yield Finding("ok", f"device {kind}", way)
    for name, there in psutil.net_if_addrs().items():
        numeric = [one.address for one in there if one.family in (socket.AF_INET, socket.AF_INET6)]
        if numeric:
            yield Finding("ok", f"interface {name}", ", ".join(numeric))
    yield _address(ahead)
    if ahead.shared:
        text = f"ranks of this host share up to {ahead.shared >> 20} MiB"
        yield Finding("ok", "memory", text)
    elif psutil.LINUX:
        yield Finding(
            "note",
            "memory",
            "memfd_create is refused, so long messages between ranks of this host go over sockets, "
            "which takes about twice the CPU time",
            "allow it in the container's seccomp profile, and raise ulimit -v and -f",
        )
    if "launch" in ahead.errors:
        yield Finding.of("wrong", "launch", ahead.errors["launch"])
    else:
        yield Finding("ok", "launched by", ahead.launcher)
        if ahead.meeting:
            yield Finding("ok", "meeting at", ahead.meeting)


def _package() -> Finding:
    """Where weft was imported from, and whether another project's `weft` is installed, too."""
    imported = f"weft-collectives {weft.__version__}, imported from {Path(weft.__file__).parent}"
    try:
        namesake = metadata.distribution("weft").metadata
    except metadata.PackageNotFoundError:
        return Finding("ok", "package", imported)
    addresses = namesake.get_all("Project-URL", [])
    if any("weft-collectives" in address for address in addresses):  # a checkout's, of before
        return Finding("ok", "package", imported)
    return Finding(
        "wrong",
        "package",
        f"{imported}; and weft {namesake['Version']} is installed, which is another project's "
        f"({namesake['Summary']}): each puts its files into the other's folder",
        "pip uninstall weft weft-collectives, and install weft-collectives again",
    )


def _backends(ahead: Preview) -> Iterator[Finding]:
    """Those that are here; of the others, which ranks on CPUs do not need, what each lacks."""
    for name, found in ahead.backends.items():
        if isinstance(found, str):
            yield Finding("ok", f"backend {name}", found)
    absent = {name: found for name, found in ahead.backends.items() if not isinstance(found, str)}
    if torch.accelerator.is_available():
        for name, error in absent.items():
            yield Finding.of("-", f"backend {name}", error)
    elif absent:
        text = f"{', '.join(absent)}: tensors on CPUs need none of them"
        yield Finding("-", "backends that are not here", text)


def _address(ahead: Preview) -> Finding:
    """Where other ranks would reach this one."""
    named = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    if "interface" in ahead.errors:
        remedy = f"unset {named[0].partition('=')[0]}"
        return Finding("wrong", "interface", str(ahead.errors["interface"]), remedy)
    said = f"{ahead.address}{f' ({named[0]})' if named else ''}"
    if ipaddress.ip_address(ahead.address.partition("%")[0]).is_loopback:
        remedy = "export WEFT_INTERFACE=<name>, if there are to be several hosts"
        return Finding("note", "address", f"{said}: other hosts cannot reach that", remedy)
    return Finding("ok", "address", said)


def network(
    rendezvous: str | None, timeout: float, nbytes: int
) -> tuple[list[Finding], list[Pair], str]:
    """Start weft, and measure if there is somebody to measure with.

    Args:
        rendezvous, timeout: as for `weft.init`.
        nbytes: of a message, for bandwidth.

    Returns:
        What was found, the pairs, and what `weft.config` says while the group stands.
    """
    began = time.perf_counter()
    try:
        with weft.init(rendezvous=rendezvous, timeout=timeout) as group:
            took = time.perf_counter() - began
            in_force = str(weft.config())
            size = f"{group.size} rank{'s' * (group.size > 1)}"
            findings = [Finding("ok", "start", f"weft.init of {size} took {took:.1f} s")]
            if group.size == 1:
                return findings, [], in_force
            hosts = hosts_of(group)
            each = enumerate(hosts.ranks)
            text = "; ".join(f"host {number}: ranks {[*here]}" for number, here in each)
            findings.append(Finding("ok", "hosts", text))
            findings += crowded(len(hosts.ranks[hosts.of[group.rank]]))
            pairs = [
                pair._replace(near=hosts.of[pair.low] == hosts.of[pair.high])
                for pair in measure(group, nbytes)
            ]
            return [*findings, *slow(pairs)], pairs, in_force
    except (weft.Error, OSError) as error:
        return [Finding.of("wrong", "start", error)], [], ""


def measure(group: Group, nbytes: int) -> list[Pair]:
    """Round trip and bandwidth of every two ranks, one pair after the other; the same on all.

    Collective. Takes about `nbytes` divided by the bandwidth, thrice, for each pair.
    """
    pairs = [(low, high) for high in range(group.size) for low in range(high)]
    mine = torch.zeros(len(pairs), 2, dtype=torch.float64)
    turn = torch.zeros(1, dtype=torch.uint8)
    for number, (low, high) in enumerate(pairs):
        group.small_all_gather(turn, 1).wait()  # the others stand still meanwhile
        if group.rank == low:
            mine[number] = torch.tensor(_talk(group, high, nbytes, first=True))
        elif group.rank == high:
            _talk(group, low, nbytes, first=False)
    (found,) = dense_all_reduce(group, mine, "sum").wait()
    return [Pair(*pair, *figures) for pair, figures in zip(pairs, found.tolist(), strict=True)]


def _talk(group: Group, peer: int, nbytes: int, *, first: bool) -> tuple[float, float]:
    """Round trip and bandwidth to a peer, which calls this at the same time."""

    def seconds(size: int) -> float:
        message = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        for sending in (first, not first):
            end = [(peer, message)]
            (group.post(end) if sending else group.post([], end)).wait()
        return time.perf_counter() - began

    trips = sorted(seconds(_SMALL) for _ in range(_ROUNDS))
    seconds(nbytes)  # a connection starts slowly
    return trips[_ROUNDS // 2], 2 * nbytes / min(seconds(nbytes) for _ in range(2))


def crowded(ranks: int) -> Iterator[Finding]:
    """Whether so many ranks have more cores than there are."""
    cores = cores_of_process()
    if ranks <= cores:
        yield Finding("ok", "cores", f"{cores} for the {ranks} ranks of this host")
        return
    text = f"{cores} for the {ranks} ranks of this host, so that they wait for each other's turns"
    remedy = f"where times count, start at most {cores} ranks on a host like this"
    yield Finding("note", "cores", text, remedy)


def slow(pairs: list[Pair]) -> Iterator[Finding]:
    """The pairs that are much slower than most of their kind: of one host, or of two."""
    yield from _slower(
        [pair for pair in pairs if pair.near],
        "they share a host, and no network is between them: see whether other programs or more "
        "ranks than cores keep it busy, whether the launcher or a container binds several ranks to "
        "one core, and what `memory` says above; then measure again",
    )
    yield from _slower(
        [pair for pair in pairs if not pair.near],
        "look at the load of their hosts, then at cables and switch, or name another interface in "
        "WEFT_INTERFACE",
    )


def _slower(pairs: list[Pair], remedy: str) -> Iterator[Finding]:
    """Those that have less than a third of what is usual among them."""
    if len(pairs) < 3:
        return
    usual = sorted(pair.bandwidth for pair in pairs)[len(pairs) // 2]
    for pair in pairs:
        if pair.bandwidth * _SLOW < usual:
            kind = "pairs of one host" if pair.near else "pairs of two hosts"
            text = f"{_rate(pair.bandwidth)}, where {kind} usually have {_rate(usual)}"
            yield Finding("note", f"ranks {pair.low} and {pair.high}", text, remedy)


def _rate(bandwidth: float) -> str:
    return f"{wording.number(bandwidth, 8e-9)} Gbit/s"


def _print(findings: list[Finding], pairs: list[Pair]) -> None:
    console = show.console()
    for level, what, text, remedy in findings:
        line = Text.assemble((f"{level:5} ", _STYLES[level]), f"{what}: {text}")
        console.print(line + Text(f"\n      -> {remedy}" if remedy else ""), soft_wrap=True)
    if pairs:
        rows = [
            [
                f"{pair.low} - {pair.high}",
                "one host" if pair.near else "two hosts",
                f"{wording.number(pair.round_trip, 1e6)} µs",
                _rate(pair.bandwidth),
            ]
            for pair in pairs
        ]
        console.print(show.table(("ranks", "on", "round trip", "bandwidth"), rows, left=2))
