"""What a network is like, in the few figures that costs and the simulated wire compute with.

`weft.sparse.link` finds them: the environment or the wire says them, or it measures.
"""

from __future__ import annotations

from dataclasses import dataclass

MERGE = 0.125e-9
"""Seconds for a byte of rows merged by one core, its cache shared with others';
benchmarks/kernels.py."""

WITHIN = 0.25e-9
"""Seconds for a byte that a rank receives from its own host: one mapped copy. For links that are
described and not measured."""

_CARRY = 16  # bytes that a core merges in the time that sending and receiving one takes, at least


@dataclass(frozen=True, slots=True)
class Link:
    """The figures of one group's network.

    Attributes:
        alpha: seconds from posting small messages to all peers, of many ranks to log2 P on each
            side, until as many have come.
        beta: seconds for each byte that enters a host's link while as much leaves it. If all ranks
            share one host: for each byte that a rank receives while it sends as much.
        gamma: seconds for each byte of rows merged, with this host's cores shared.
        work: seconds of a core that one message costs, sent and received, cores shared.
        share: ranks for each core, on the most crowded host; at least 1.
        carry: measured seconds of a host's cores for each byte that one of its ranks receives while
            all receive; 0: not measured.
        within: seconds for each byte that a rank receives from a rank of its host while all ranks
            do; 0: not measured, as where all share one host, or none shares its host.
    """

    alpha: float
    beta: float
    gamma: float
    work: float
    share: float = 1.0
    carry: float = 0.0
    within: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds for each byte received in which a rank's core has no time for arithmetic."""
        return max(_CARRY * self.gamma * (1 - 1 / self.share), self.carry)

    def __str__(self) -> str:
        text = (
            f"{self.alpha * 1e6:.0f} µs a round, {self.work * 1e6:.0f} µs a message, "
            f"{8e-9 / self.beta:.3g} Gbit/s, {1e-9 / self.gamma:.3g} GB/s merged"
        )
        if self.within:
            text += f", {1e-9 / self.within:.3g} GB/s within a host"
        return text
