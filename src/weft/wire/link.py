"""What a described network is like, in the few figures that the simulated wire computes with."""

from __future__ import annotations

from dataclasses import dataclass

MERGE = 0.125e-9
"""Seconds for a byte of rows merged by one core, its cache shared with others';
benchmarks/kernels.py."""

WITHIN = 0.25e-9
"""Seconds for a byte that a rank receives from its own host: one mapped copy."""


@dataclass(frozen=True, slots=True)
class Link:
    """The figures of a network.

    Attributes:
        alpha: seconds from posting small messages to all peers until as many have come.
        beta: seconds for each byte that enters a host's link while as much leaves it.
        gamma: seconds for each byte of rows merged.
        work: seconds of a core that one message costs, sent and received.
    """

    alpha: float
    beta: float
    gamma: float
    work: float

    def __str__(self) -> str:
        return (
            f"{self.alpha * 1e6:.0f} µs a round, {self.work * 1e6:.0f} µs a message, "
            f"{8e-9 / self.beta:.3g} Gbit/s, {1e-9 / self.gamma:.3g} GB/s merged"
        )
