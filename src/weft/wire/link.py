"""What a described network is like, in the few figures that the simulated wire computes with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """The figures of a network.

    Attributes:
        alpha: seconds from posting small messages to all peers until as many have come.
        beta: seconds for each byte that enters a host's link while as much leaves it.
        work: seconds of a core that one message costs, sent and received.
    """

    alpha: float
    beta: float
    work: float

    def __str__(self) -> str:
        return (
            f"{self.alpha * 1e6:.0f} µs a round, {self.work * 1e6:.0f} µs a message, "
            f"{8e-9 / self.beta:.3g} Gbit/s"
        )
