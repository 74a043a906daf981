"""What a call costs at least, by the rows of all ranks: for `weft bench`."""

from __future__ import annotations

from dataclasses import dataclass

import weft

WITHIN = 0.25e-9
"""Seconds for a byte that a rank receives from its own host: one mapped copy."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The sizes of a call, and what no rank knows before it.

    Attributes:
        sizes: of the call.
        union: U, rows of the result.
        rows_of_hosts: for each host the rows in the union of its ranks, and those in the union of
            all other ranks.
    """

    sizes: weft.sparse.Sizes
    union: int
    rows_of_hosts: tuple[tuple[float, float], ...]

    @property
    def bound(self) -> float:
        """Bytes that the average rank must receive, an index counted as 4."""
        return self.sizes.bound(self.union)

    @property
    def host_bound(self) -> float:
        """Bytes that must enter or leave the link of the host with most, an index counted as 4."""
        if len(self.rows_of_hosts) == 1:
            return 0.0
        own, others = zip(*self.rows_of_hosts, strict=True)
        # the rank with most rows sends them all, if it is alone on its host or not
        busiest = max(weft.sparse.bound.rows_of_busiest(own, others, self.union), self.sizes.most)
        return busiest * (self.sizes.row + 4)

    def least_seconds(self, beta: float, within: float = WITHIN) -> float:
        """The time that any exact schedule takes at least with these ranks on these hosts.

        The link of the busiest host carries `host_bound`. All ranks together receive P times
        `bound`: over the links of the hosts and, where a rank is not alone on its host, from there.

        Args:
            beta: seconds for a byte that enters a host's link.
            within: seconds for a byte that a rank receives from its own host.
        """
        counts = self.sizes.ranks_of_hosts
        if len(counts) == 1:
            return self.bound * within
        neighbours = sum(count for count in counts if count > 1)
        speed = len(counts) / beta + neighbours / within
        return max(self.host_bound * beta, self.sizes.ranks * self.bound / speed)
