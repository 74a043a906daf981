"""`weft doctor`: what this machine and this launch have, what is wrong, and what to type.

Alone it looks at this process: what is installed, what serves the arithmetic, interfaces, the
launcher's variables, the place where the ranks are to meet. Under a launcher of several ranks it
also starts weft, and measures latency and bandwidth between every two of them, one pair at a time,
with messages as weft sends them. It needs no extra: it is to say which one is missing.
"""

from __future__ import annotations

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

import weft
from weft import Group
from weft.bootstrap import TIMEOUT, Preview, look_ahead
from weft.schedules.hosts import hosts_of

from .words import about, number

_ROUNDS = 20  # exchanges of a byte
_LONG = 4 << 20  # bytes of a message that shows bandwidth
_SLOW = 3.0  # a pair that has so much less than the median of its kind is pointed out
_SOON = 10.0  # seconds after which a rank says for whom it waits
_TIMEOUT = (
    f"a call waits for other ranks for {TIMEOUT:.0f} s, unless weft.init(timeout=) says another"
)

Finding = tuple[str, str]
"""A level, "ok", "note" (works, could be better) or "WRONG", and what was found, with a remedy."""


def add_options(parser: ArgumentParser) -> None:
    """What `weft doctor` takes."""
    parser.add_argument("--rendezvous", metavar="PLACE", help="as in weft.init(rendezvous=)")


def doctor(given: Namespace) -> int:
    """Check this machine, launch and network, and say what to type if something is wrong.

    Under torchrun, mpirun or srun it also measures every pair of ranks:
    torchrun --nproc-per-node 4 -m weft doctor
    """
    ahead = look_ahead(given.rendezvous)
    findings = list(look(ahead))
    if ahead.error is None:  # else weft.init would raise the same
        findings += network(given.rendezvous)
    wrong = [finding for finding in findings if finding[0] == "WRONG"]
    for level, text in findings if ahead.rank == 0 else wrong:
        print(f"{level:6}{text}")
    return int(bool(wrong))


def look(ahead: Preview) -> Iterator[Finding]:
    """What can be seen without the other ranks."""
    yield namesake()
    yield "ok", about()
    for name, what, package in (
        ("numba", "weft's arithmetic as machine code, and for algorithm holders", "numba"),
        ("rich", "weft demo", "'weft-collectives[demo]'"),
        ("matplotlib", "weft demo", "'weft-collectives[demo]'"),
    ):
        if find_spec(name) is None:
            yield "note", f"no {name}, for {what}: pip install {package}"
    in_force = weft.config()
    address = in_force["listens at"]
    if address.startswith("wrong"):
        what = address.removeprefix("wrong: ")
        yield "WRONG", f"{what}: unset WEFT_INTERFACE, or name another"
    elif address.startswith(("127.", "::1")):
        yield "note", f"address {address}, which other hosts cannot reach: set WEFT_INTERFACE"
    if ahead.shared:
        yield "ok", f"memory: ranks of this host share up to {ahead.shared >> 20} MiB"
    else:
        yield (
            "note",
            "memory: memfd_create is refused, so that long messages within a host take about twice "
            "the time: allow it in the container's seccomp profile, and raise ulimit -v and -f",
        )
    if ahead.error is not None:
        yield "WRONG", str(ahead.error)
    else:
        yield "ok", f"meeting at {ahead.meeting or 'no place: it is alone'}"
    yield "ok", _TIMEOUT
    yield "ok", f"in force:\n{in_force}"


def namesake() -> Finding:
    """Where weft was imported from, and whether another project's `weft` is installed, too."""
    imported = f"weft-collectives, imported from {Path(weft.__file__).parent}"
    try:
        other = metadata.metadata("weft")
    except metadata.PackageNotFoundError:
        return "ok", imported
    if "weft-collectives" in str(other.get_all("Project-URL")):  # a checkout's, of before
        return "ok", imported
    return (
        "WRONG",
        f"{imported}; and weft {other['Version']} is installed, which is another project's "
        f"({other['Summary']}): each puts its files into the other's folder: pip uninstall weft "
        "weft-collectives, and install weft-collectives again",
    )


def network(rendezvous: str | None) -> Iterator[Finding]:
    """Start weft, and measure if there is somebody to measure with; the same on all ranks.

    Args:
        rendezvous: as for `weft.init`.
    """
    began = time.perf_counter()
    try:
        with weft.init(rendezvous=rendezvous, watch=_SOON) as group:
            yield "ok", f"weft.init of {group.size} ranks took {time.perf_counter() - began:.1f} s"
            if group.size > 1:
                yield from links(group)
    except (weft.Error, OSError) as error:
        yield "WRONG", str(error)


def links(group: Group) -> Iterator[Finding]:
    """Each two ranks, one pair after the other: what an exchange takes, and those that are slow.

    The others stand still meanwhile. The same on all ranks.
    """
    hosts = hosts_of(group).of

    def seconds(pair: tuple[int, int], length: int) -> float:
        """Of both, which send so many bytes to each other."""
        ranks = range(group.size)
        parts = [length * ({group.rank, peer} == {*pair}) for peer in ranks]
        message = [torch.zeros(part, dtype=torch.uint8) for part in parts]
        weft.barrier()
        began = time.perf_counter()
        weft.all_to_all(message)
        return weft.all_reduce(torch.tensor(time.perf_counter() - began), "max").item()

    pairs = list(itertools.combinations(range(group.size), 2))
    near = [hosts[low] == hosts[high] for low, high in pairs]
    short = [median(seconds(pair, 1) for _ in range(_ROUNDS)) for pair in pairs]
    speed = [_LONG / min(seconds(pair, _LONG) for _ in range(3)) for pair in pairs]
    for pair, is_near, took, own in zip(pairs, near, short, speed, strict=True):
        usual = median(each for each, alike in zip(speed, near, strict=True) if alike == is_near)
        text = f"ranks {pair}, {'one host' if is_near else 'two hosts'}: "
        text += f"{number(took, 1e3)} ms, {number(own, 8e-9)} Gbit/s"
        if own * _SLOW >= usual:
            yield "ok", text
        elif is_near:
            yield "note", f"{text}: slow; see what keeps the host busy, or binds ranks to one core"
        else:
            yield "note", f"{text}: slow; see load, cables and switch, or set WEFT_INTERFACE"
