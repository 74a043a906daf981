"""`weft doctor`: what this machine and this launch have, what is wrong, and what to type.

Alone it looks at this process: versions, what serves the arithmetic, backends, interfaces, the
launcher's variables, the place where the ranks are to meet. Under a launcher of several ranks it
also starts weft, and measures latency and bandwidth between every two of them, one pair at a time,
with messages as weft sends them.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..wire.base import Wire

__all__ = ["Finding", "Pair", "doctor", "look", "measure", "slow"]

_SMALL = 8  # bytes of a message that shows latency
_ROUNDS = 20  # how often it goes there and back
_SLOW = 3.0  # of the median: a pair that much slower than others is pointed out


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "ok", "note" (works, could be better) or "wrong".
        what: the subject.
        text: what was found.
        remedy: what to type or do, or empty.
    """

    level: str
    what: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """The connection of two ranks: round trip in seconds, bandwidth in bytes a second."""

    low: int
    high: int
    round_trip: float
    bandwidth: float


def doctor(
    mib: Annotated[
        float, typer.Option(help="Size of the messages that show the bandwidth, in MiB.", min=0.01)
    ] = 4.0,
    rendezvous: Annotated[
        str | None, typer.Option(help="Where the ranks meet, as for weft.init.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the other ranks.")] = 30.0,
) -> None:
    """Say what is wrong with this machine, this launch and this network, and what to type.

    Under torchrun, mpirun or srun it measures every pair of ranks:
    torchrun --nproc-per-node 4 -m weft doctor
    """
    findings = list(look(rendezvous))
    met, rank, pairs = _network(rendezvous, timeout, int(mib * 2**20))  # also tells the others
    wrong = [finding for finding in (*findings, *met) if finding.level == "wrong"]
    if rank == 0:
        _print([*findings, *met], pairs)
    else:
        _print(wrong, [])
    raise typer.Exit(1 if wrong else 0)


def look(rendezvous: str | None = None) -> Iterator[Finding]:
    """What can be seen without the other ranks."""
    yield from _versions()
    yield from _backends()
    yield from _interfaces()
    yield from _memory()
    yield from _launch(rendezvous)


def _versions() -> Iterator[Finding]:
    import torch

    from .. import __version__, kernels

    text = f"weft {__version__}, torch {torch.version.__version__}, "
    text += f"Python {platform.python_version()}"
    yield Finding("ok", "versions", text)
    described = kernels.describe()
    level, remedy = "ok", ""
    if "numba" not in described.lower():
        level, remedy = "note", "pip install numba: machine code is several times quicker"
    yield Finding(level, "arithmetic", described, remedy)


def _backends() -> Iterator[Finding]:
    from ..bootstrap import backends
    from ..errors import WeftError

    for name in backends.known():
        try:
            yield Finding("ok", f"backend {name}", backends.spec(name))
        except WeftError as error:
            text, _, remedy = str(error).partition(": ")
            yield Finding("ok", f"backend {name}", f"not here: {text}", remedy)


def _interfaces() -> Iterator[Finding]:
    import torch.distributed as dist

    from ..wire.interface import VARIABLES, interfaces, is_loopback, own_address

    there = interfaces()
    for each in there:
        yield Finding("ok", f"interface {each.name}", ", ".join(each.addresses))
    named = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    try:
        address = own_address(dist.HashStore())
    except OSError as error:
        yield Finding("wrong", "interface", str(error), f"unset {named[0].partition('=')[0]}")
        return
    said = f"{address}{f' ({named[0]})' if named else ''}"
    if is_loopback(address):
        yield Finding(
            "note",
            "address",
            f"{said}: other hosts cannot reach that",
            "export WEFT_INTERFACE=<name>, if there are to be several hosts",
        )
    else:
        yield Finding("ok", "address", said)
    try:
        means = socket.gethostbyname(socket.gethostname())
    except OSError:
        means = ""
    if (not means or is_loopback(means)) and not named:
        yield Finding(
            "note",
            "host name",
            f"{socket.gethostname()} means {means or 'nothing'} here: gloo alone would take that; "
            "weft names the interface to it",
            "export GLOO_SOCKET_IFNAME=<name>, for programs without weft",
        )


def _memory() -> Iterator[Finding]:
    """Whether ranks of this host can share memory."""
    from ..wire.shm import Segment

    segment = Segment.make()
    if segment is not None:
        yield Finding("ok", "memory", f"ranks of this host share up to {segment.nbytes >> 20} MiB")
        segment.close()
    elif sys.platform.startswith("linux"):
        yield Finding(
            "note",
            "memory",
            "memfd_create is refused, so long messages between ranks of this host go over sockets, "
            "which takes some twice the CPU time",
            "allow it in the container's seccomp profile, and raise ulimit -v and -f",
        )


def _launch(rendezvous: str | None) -> Iterator[Finding]:
    from ..bootstrap import launchers
    from ..bootstrap import rendezvous as places
    from ..errors import WeftError

    try:
        launch = launchers.detect()
        place = places.place(launch, rendezvous)
    except WeftError as error:
        text, _, remedy = str(error).partition(": ")
        yield Finding("wrong", "launch", text, remedy)
        return
    job = f", job {launch.job}" if launch.job else ""
    who = f"{launch.kind}, rank {launch.rank} of {launch.size}{job}"
    yield Finding("ok", "launched by", who)
    if place is not None:
        yield Finding("ok", "meeting at", place.where)


def _network(
    rendezvous: str | None, timeout: float, nbytes: int
) -> tuple[list[Finding], int, list[Pair]]:
    """Start weft, and measure if there is somebody to measure with."""
    from ..bootstrap import launchers
    from ..bootstrap.init import init
    from ..errors import Error
    from ..wire.hosts import hosts_of

    began = time.perf_counter()
    try:
        rank = launchers.detect().rank
    except Error:
        rank = 0  # whoever this is, it has something to say
    try:
        with init(rendezvous=rendezvous, timeout=timeout) as wire:
            took = time.perf_counter() - began
            findings = [Finding("ok", "start", f"{wire.size} ranks, {took:.1f} s")]
            if wire.size == 1:
                return findings, 0, []
            hosts = hosts_of(wire).ranks
            text = "; ".join(f"host {n}: ranks {list(ranks)}" for n, ranks in enumerate(hosts))
            findings.append(Finding("ok", "hosts", text))
            pairs = measure(wire, nbytes)
            return [*findings, *slow(pairs)], wire.rank, pairs
    except (Error, OSError) as error:
        text, _, remedy = str(error).rpartition(": ")
        return [Finding("wrong", "start", text, remedy)], rank, []


def measure(wire: Wire, nbytes: int) -> list[Pair]:
    """Round trip and bandwidth of every two ranks, one pair after the other; the same on all.

    Collective. Takes about `nbytes` divided by the bandwidth, thrice, for each pair.
    """
    import torch

    pairs = [(low, high) for high in range(wire.size) for low in range(high)]
    mine = torch.zeros(len(pairs), 2, dtype=torch.float64)
    turn = torch.zeros(1, dtype=torch.uint8)
    for number, (low, high) in enumerate(pairs):
        wire.small_all_gather(turn, 1).wait()  # the others stand still meanwhile
        if wire.rank == low:
            mine[number] = torch.tensor(_talk(wire, high, nbytes, first=True))
        elif wire.rank == high:
            _talk(wire, low, nbytes, first=False)
    (found,) = wire.dense_all_reduce(mine, "sum").wait()
    return [Pair(*pair, *figures) for pair, figures in zip(pairs, found.tolist(), strict=True)]


def _talk(wire: Wire, peer: int, nbytes: int, *, first: bool) -> tuple[float, float]:
    """Round trip and bandwidth to a peer, which calls this at the same time."""
    import torch

    def seconds(size: int) -> float:
        message = torch.zeros(size, dtype=torch.uint8)
        room = torch.zeros(size, dtype=torch.uint8)
        began = time.perf_counter()
        for sending in (first, not first):
            pending = wire.post([(peer, message)]) if sending else wire.post([], [(peer, room)])
            pending.wait()
            pending.release()
        return time.perf_counter() - began

    trips = sorted(seconds(_SMALL) for _ in range(_ROUNDS))
    seconds(nbytes)  # a connection starts slowly
    return trips[_ROUNDS // 2], 2 * nbytes / min(seconds(nbytes) for _ in range(2))


def slow(pairs: list[Pair]) -> list[Finding]:
    """The pairs that are much slower than most."""
    if len(pairs) < 3:
        return []
    usual = sorted(pair.bandwidth for pair in pairs)[len(pairs) // 2]
    return [
        Finding(
            "note",
            f"ranks {pair.low} and {pair.high}",
            f"{_rate(pair.bandwidth)}, where pairs usually have {_rate(usual)}",
            "look at the cables, the switch and the load of their hosts, or name another "
            "interface in WEFT_INTERFACE",
        )
        for pair in pairs
        if pair.bandwidth * _SLOW < usual
    ]


def _rate(bandwidth: float) -> str:
    return f"{bandwidth * 8 / 1e9:.3g} Gbit/s"


def _print(findings: list[Finding], pairs: list[Pair]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    style = {"ok": "green", "note": "yellow", "wrong": "red"}
    for finding in findings:
        mark = f"[{style[finding.level]}]{finding.level:5}[/]"
        console.print(f"{mark} {finding.what}: ", end="")
        console.print(finding.text, markup=False, highlight=False)
        if finding.remedy:
            console.print(f"      -> {finding.remedy}", markup=False, highlight=False)
    if pairs:
        table = Table("ranks", "round trip", "bandwidth")
        for pair in pairs:
            trip = f"{pair.round_trip * 1e6:.0f} µs"
            table.add_row(f"{pair.low} - {pair.high}", trip, _rate(pair.bandwidth))
        console.print(table)
