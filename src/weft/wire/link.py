"""What a network is like, in the three numbers that costs are computed from.

`measure` finds them by moving bytes round the ring of ranks for a few tens of milliseconds. All
ranks take the slowest rank's figures, rounded to coarse steps, so that they compute the same costs
and small noise does not change a choice. `WEFT_LINK=latency_us,gbit` in the environment (the same
on every rank) says them instead.
"""

from __future__ import annotations

import math
import os
import statistics
import struct
import time
from collections import Counter
from dataclasses import dataclass, replace

import torch

from ..errors import WeftError
from .base import Wire
from .pieces import SLOW

__all__ = ["MERGE", "Link", "agreed", "figures", "measure", "parse"]

MERGE = 0.125e-9
"""Seconds for a byte of rows merged by one core, its cache shared with others';
benchmarks/kernels.py."""

_WORK = 50e-6  # seconds of a core that a message costs, where nothing is to be measured
_NEAR = 2e-4, 0.5e-9  # alpha and beta of ranks of one host, whose cores are shared
_ENOUGH = 0.012  # seconds of streaming after which the rate is believed
_LARGEST = 1 << 23  # bytes
_FIGURES = struct.Struct("<5q?")  # steps of alpha, beta, work, carry; cores; numbers are packed
_HOST = 64  # bytes of a host's name that are compared
_PASSES = 3  # the quickest pass counts: other work on a machine only ever slows one down


@dataclass(frozen=True, slots=True)
class Link:
    """The figures of one group's network.

    Attributes:
        alpha: seconds from posting small messages to all peers until those of all have come.
        beta: seconds for each byte that a rank receives while it sends as much.
        gamma: seconds for each byte of rows merged, with this host's cores shared.
        work: seconds of a core that one message costs, sent and received, cores shared.
        measured: whether they were found by measuring, and measuring again may better them.
        early: whether ranks were busy with their start then, so that they are rough.
        share: ranks to a core, where they are closest together; at least 1.
        carry: seconds that the cores of a host are seen to be busy for each byte that one of its
            ranks receives while all do; 0 where that was not measured.
        packing: whether all ranks pack numbers where links are slow (`weft.wire.pieces`).
    """

    alpha: float
    beta: float
    gamma: float
    work: float
    measured: bool = False
    share: float = 1.0
    early: bool = False
    carry: float = 0.0
    packing: bool = False

    @property
    def packs(self) -> bool:
        """Whether numbers travel packed between hosts, as this is slow enough."""
        return self.packing and self.beta * SLOW > 1

    def quicker(self, other: Link) -> Link:
        """The better of two measurements of a network in each figure.

        What else goes on only ever slows a measurement down.
        """
        alpha, beta = min(self.alpha, other.alpha), min(self.beta, other.beta)
        work, carry = min(self.work, other.work), min(self.carry, other.carry)
        packing = other.packing
        return replace(self, alpha=alpha, beta=beta, work=work, carry=carry, packing=packing)

    def __str__(self) -> str:
        return (
            f"{self.alpha * 1e6:.0f} µs a round, {self.work * 1e6:.0f} µs a message, "
            f"{8e-9 / self.beta:.3g} Gbit/s, {1e-9 / self.gamma:.3g} GB/s merged"
            f"{', roughly: ranks are busy with their start' * self.early}"
        )


def measure(wire: Wire) -> Link:
    """Measure the link of a wire; collective, every rank gets the same figures."""
    said = os.environ.get("WEFT_LINK")
    return figures(wire) if said is None else agreed(wire, *parse(said), _WORK)


def figures(wire: Wire) -> Link:
    """`measure`, whatever WEFT_LINK says."""
    alpha, work = _latency(wire)
    beta, carry = _rate(wire)
    return replace(agreed(wire, alpha, beta, work, carry=carry), measured=True)


def rough(wire: Wire, *, near: bool) -> Link:
    """`figures` while ranks are busy with something else, the same on every rank.

    Args:
        wire: among whom; collective.
        near: all ranks read each other's memory: how quick that is differs less between machines
            than what can be measured while their cores are busy.
    """
    alpha, beta = _NEAR if near else (_latency(wire)[0], _rate(wire, busy=True)[0])
    # what a core did for messages cannot be told from what else it did
    return replace(agreed(wire, alpha, beta, _WORK), measured=True, early=True)


def agreed(
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
    steps = (_step(alpha), _step(beta), _step(work), _step(carry), os.cpu_count() or 1, wire.packs)
    heard = wire.all_gather_bytes(_FIGURES.pack(*steps) + host)
    hosts = [text[_FIGURES.size :] for text in heard]
    ranks_on = Counter(hosts)
    *steps_of, cores, packing = zip(*map(_FIGURES.unpack_from, heard), strict=True)
    # ranks to a core, where they are closest together
    crowd = max(ranks_on[host] / n for host, n in zip(hosts, cores, strict=True))
    alpha, beta, work, carry = (_unstep(max(steps)) for steps in steps_of)
    share = max(1.0, crowd)
    return Link(
        *(alpha, beta, merge * share, work * share),
        share=share,
        carry=carry * crowd,
        packing=all(packing),
    )


def parse(text: str) -> tuple[float, float]:
    """Latency in seconds and seconds a byte, from what WEFT_LINK says.

    Raises:
        WeftError: it does not say them.
    """
    try:
        latency, rate = (float(part) for part in text.split(","))
        if not (0 < latency < math.inf and 0 < rate < math.inf):
            raise ValueError
    except ValueError:
        raise WeftError(
            f"WEFT_LINK={text!r} is not 'latency in µs,rate in Gbit/s': e.g. 50,10"
        ) from None
    return latency * 1e-6, 8e-9 / rate


def _step(seconds: float) -> int:
    """Figures agree in steps of a quarter of an octave."""
    return round(4 * math.log2(max(seconds, 1e-15)))


def _unstep(step: int) -> float:
    return float(2.0 ** (step / 4))


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


def _rate(wire: Wire, *, busy: bool = False) -> tuple[float, float]:
    """Seconds a byte takes when every rank sends to the next and receives from the last.

    Also, seconds of a core that this rank takes for it.

    The size grows until the slowest rank is busy for long enough. Shapers let a first burst pass:
    so what a byte more takes counts, where that is more than the average byte. Where ranks are
    `busy` with something else, any message takes long: so the size grows until it matters, too.
    """
    if wire.size == 1:
        return 1e-10, 0.0
    nbytes, before = 1 << 19, (0, 0.0)
    while True:
        # twice, since one hiccup would be believed for as long as the wire lives
        quickest, carry = min(_round(wire, nbytes), _round(wire, nbytes))
        matters = not busy or quickest > 2 * before[1] > 0
        if (quickest >= _ENOUGH and matters) or nbytes >= _LARGEST:
            passes = range(2, _PASSES if quickest < 4 * _ENOUGH else 2)
            rounds = [(quickest, carry), *(_round(wire, nbytes) for _ in passes)]
            quickest, carry = min(rounds)
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
