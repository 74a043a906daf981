"""The choice of an algorithm, and what suits a link.

`auto` takes the algorithm with the smallest predicted time among those that can serve the load and
keep within the memory a call may use. Among many ranks it takes the one with the fewest messages
of those that are nearly as quick (`cost.preferred`). If none keeps within that memory, it takes the
one that needs least.
Everything it looks at came out of the headers, which all ranks have, or was measured by all ranks
together, so every rank chooses alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..agree import DIRECT
from ..errors import WeftError
from ..group.group import Group
from ..schedules.hosts import hosts_of
from ..wire.link import Link
from .cost import Load, preferred
from .header import Header
from .link import link_of
from .registry import ALGORITHMS, ALONE, Algorithm, find, remembered

_CHUNK_SECONDS = 0.002  # seconds of a chunk on the link, at least: long beside a message's overhead
STEP_SECONDS = 1e-3  # seconds of overhead of a step of a stream, on a crowded core
_GAPS_PAY = 8  # bytes that a core merges in the time in which packing saves one byte of an index
_CHUNKS = (1 << 16, 1 << 20)  # bytes of the smallest and the largest chunk
_WHOLE = 1 << 48  # bytes of a chunk where messages are not cut
_NEAR = 1 << 24  # bytes of one chunk of every rank together, at most, if all share a host


def with_link(group: Group, load: Load, *, staying: bool = False) -> Load:
    """The load with the figures of the group's link and hosts, and what suits them; collective.

    Args:
        group: the group, for the device of the rows.
        load: the sizes of the call.
        staying: of the load. If it is set, or the wire is in rounds or `exact`, lists and values
            are sent in one message each, unpacked.
    """
    features = group.features
    lengths_known = features.lockstep or features.exact
    link = link_of(group)
    load = fitted(load.but(hosts=hosts_of(group)), link)
    if staying or lengths_known:
        load = load.but(chunk=_WHOLE, gaps=False, staying=staying, lengths_known=lengths_known)
    return load


def fitted(load: Load, link: Link) -> Load:
    """The load with what suits a link: the size of chunks, and whether index lists are packed."""
    smallest, largest = _CHUNKS
    if load.on_one_host:
        # within a host a copy keeps a core as busy as a merge, so small chunks overlap little
        largest = max(largest, 1 << (_NEAR // load.ranks).bit_length() - 1)
    # to the nearest power, so that a link measured a little faster than it is has the same chunks
    seconds = max(_CHUNK_SECONDS, _even_chunk(load.ranks, load.bound * link.beta))
    chunk = 1 << max(0, round(math.sqrt(0.5) * seconds / link.beta) - 1).bit_length()
    chunk = min(max(chunk, smallest), largest)
    return load.but(chunk=chunk, gaps=packs(link), link=link)


def _even_chunk(ranks: int, seconds: float) -> float:
    """The best duration of one chunk, in seconds, of a stream whose bytes take `seconds` (s).

    n chunks take n + P - 1 steps till the last one is through, so a call takes about
    s + nc + (P - 1) s/n, where a step costs c besides its bytes: least where s/n is the root of
    cs / (P - 1).
    """
    return math.sqrt(STEP_SECONDS * seconds / max(1, ranks - 1))


def packs(link: Link) -> bool:
    """Whether index lists are packed on that link."""
    return link.beta > _GAPS_PAY * link.gamma


def is_eager(load: Load, index: torch.dtype) -> bool:
    """Whether all ranks' rows, with indices of that dtype, fit in the opening exchange."""
    fits = load.ranks <= DIRECT and Header.fits(load.most, index.itemsize, load.row)
    return fits and not load.staying


def choose(load: Load, algorithm: str, carrier: str = "") -> str:
    """The name of the algorithm for a load that was not served eagerly.

    Args:
        load: the sizes of the call.
        algorithm: that was asked for, or "auto".
        carrier: what carries the rows, for the error.

    Raises:
        WeftError: the algorithm that was asked for cannot serve this load; the same on every rank.
    """
    if load.ranks == 1:
        return ALONE
    if algorithm != "auto":
        reason = find(algorithm).applies(load)
        if reason is not None:
            # other wires serve every algorithm, and need not be named
            over = f" over {carrier}" if load.staying or load.lengths_known else ""
            names = sorted(found.name for found in _serving(load))
            raise WeftError(
                f"algorithm {algorithm} cannot serve this call{over}: {reason}; use auto, or one "
                f"of {', '.join(names)}"
            )
        return algorithm
    return _preferred(load.coarse, tuple(sorted(found.name for found in _serving(load))))


@remembered
def _preferred(load: Load, names: Sequence[str]) -> str:
    """That of these algorithms, in the order of their names, which `auto` takes for a load."""
    costs = [ALGORITHMS[name].cost(load) for name in names]
    return names[preferred(load, costs, load.ranks)]


def _serving(load: Load) -> list[Algorithm]:
    """The algorithms that can serve a load."""
    return [found for found in ALGORITHMS.values() if found.applies(load) is None]
