"""What a network is like, in the three numbers that costs are computed from.

`measure` finds them once for each wire, by moving bytes round the ring of ranks for a few tens of
milliseconds. All ranks take the slowest rank's figures, rounded to coarse steps, so that they
compute the same costs and small noise does not change a choice. `WEFT_LINK=latency_us,gbit` in
the environment (the same on every rank) says them instead.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

import torch

from ..errors import WeftError
from .base import Wire

__all__ = ["Link", "measure", "parse"]

_MERGE = 0.35e-9  # seconds for a byte of rows merged by one core; benchmarks/kernels.py
_ENOUGH = 0.012  # seconds of streaming after which the rate is believed
_LARGEST = 1 << 23  # bytes


@dataclass(frozen=True, slots=True)
class Link:
    """The figures of one group's network.

    Attributes:
        alpha: seconds that one message costs.
        beta: seconds for each byte that a rank receives while it sends as much.
        gamma: seconds for each byte of rows merged, with this host's cores shared.
    """

    alpha: float
    beta: float
    gamma: float

    def __str__(self) -> str:
        return (
            f"{self.alpha * 1e6:.0f} µs a message, {8e-9 / self.beta:.3g} Gbit/s, "
            f"{1e-9 / self.gamma:.3g} GB/s merged"
        )


def measure(wire: Wire) -> Link:
    """Measure the link of a wire; collective, every rank gets the same figures."""
    said = os.environ.get("WEFT_LINK")
    alpha, beta = parse(said) if said is not None else (_latency(wire), _rate(wire))
    mine = [_step(alpha), _step(beta), *wire.host.encode()[:48].ljust(48, b"\0")]
    message = torch.tensor(mine, dtype=torch.int64).view(torch.uint8)
    pending = wire.small_all_gather(message, message.numel())
    rows = torch.stack([row.clone() for row in pending.wait()]).view(torch.int64)
    pending.release()
    together = int((rows[:, 2:] == rows[0, 2:]).all(1).sum()) if wire.size > 1 else 1
    hosts = {bytes(row[2:].tolist()) for row in rows}
    crowd = math.ceil(wire.size / len(hosts))
    share = max(1.0, max(crowd, together) / (os.cpu_count() or 1))
    steps = rows[:, :2].max(0).values.tolist()
    return Link(_unstep(steps[0]), _unstep(steps[1]), _MERGE * share)


def parse(text: str) -> tuple[float, float]:
    """Latency in seconds and seconds a byte, from what WEFT_LINK says.

    Raises:
        WeftError: it does not say them.
    """
    try:
        latency, rate = (float(part) for part in text.split(","))
        if latency <= 0 or rate <= 0:
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


def _latency(wire: Wire) -> float:
    """Seconds a message costs: small exchanges with everybody, the quickest of a few."""
    message, best = torch.zeros(256, dtype=torch.uint8), math.inf
    for _ in range(5):
        start = time.perf_counter()
        pending = wire.small_all_gather(message, 256)
        pending.wait()
        pending.release()
        best = min(best, time.perf_counter() - start)
    return best / max(1, wire.size - 1)


def _rate(wire: Wire) -> float:
    """Seconds a byte takes when every rank sends to the next and receives from the last.

    The size grows until the slowest rank is busy for long enough: shapers let a first burst pass.
    """
    if wire.size == 1:
        return 1e-10
    after, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    nbytes = 1 << 19
    while True:
        with wire.lease(nbytes) as outgoing, wire.lease(nbytes) as incoming:
            start = time.perf_counter()
            wire.post([(after, outgoing)], [(before, incoming)]).wait()
            seconds = time.perf_counter() - start
        slowest = torch.tensor([int(seconds * 1e9)], dtype=torch.int64)
        wire.dense_all_reduce(slowest, "max").wait()
        if slowest.item() >= _ENOUGH * 1e9 or nbytes >= _LARGEST:
            return float(slowest.item()) * 1e-9 / nbytes
        nbytes *= 4
