"""Cuts a graph into parts of nearly one size, with few edges between them.

Linear deterministic greedy streaming (Stanton and Kliot, "Streaming Graph Partitioning for Large
Distributed Graphs", KDD 2012): nodes come in the order of a breadth-first search, and each goes
where most of its neighbours are, less so the fuller that part is. Some more passes, in which
neighbours that come later count with where they were (Nishimura and Ugander, "Restreaming Graph
Partitioning", KDD 2013).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["cut"]

_PASSES = 4
_SLACK = 1.03  # the largest part, as a multiple of the mean


def cut(
    starts: npt.NDArray[np.int64], neighbours: npt.NDArray[np.int64], parts: int
) -> npt.NDArray[np.int64]:
    """The part of each node; the same for the same graph.

    Args:
        starts, neighbours: as from `Graph.neighbours`.
        parts: how many.

    Example:
        >>> two_pairs = np.array([0, 1, 2, 3, 4]), np.array([1, 0, 3, 2])
        >>> cut(*two_pairs, 2).tolist()
        [0, 0, 1, 1]
    """
    count = len(starts) - 1
    if parts == 1:
        return np.zeros(count, np.int64)
    bounds, near = starts.tolist(), neighbours.tolist()
    room = max(-(-count // parts), int(count / parts * _SLACK))
    part = [-1] * count
    order = _breadth_first(bounds, near)
    for _ in range(_PASSES):
        sizes = [0] * parts
        for node in order:
            here = [0] * parts
            for other in near[bounds[node] : bounds[node + 1]]:
                if part[other] >= 0:
                    here[part[other]] += 1
            best = max(
                (p for p in range(parts) if sizes[p] < room),
                key=lambda p: (here[p] * (1 - sizes[p] / room), -sizes[p], -p),
            )
            part[node] = best
            sizes[best] += 1
    return np.array(part, np.int64)


def _breadth_first(bounds: list[int], near: list[int]) -> list[int]:
    seen = [False] * (len(bounds) - 1)
    order: list[int] = []
    for first in range(len(seen)):
        if seen[first]:
            continue
        seen[first] = True
        queue = deque([first])
        while queue:
            node = queue.popleft()
            order.append(node)
            for other in near[bounds[node] : bounds[node + 1]]:
                if not seen[other]:
                    seen[other] = True
                    queue.append(other)
    return order
