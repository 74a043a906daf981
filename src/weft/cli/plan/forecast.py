"""About how long a call takes on a described network: latency, bandwidth and merging.

    seconds = max(rounds * alpha, bytes * beta) + messages * work + merged * MERGED

Rounds, messages and bytes are what each algorithm says of itself (`weft.sparse.Traffic`). Most
rounds are hops of a ring, which the time of the bytes hides if that is longer. The ranks of a host
share its link: a byte then takes as many times as long, as far as it comes from another host.
`merged` are the bytes of rows that go through kernels. So it is a forecast, by which clusters
can be compared; the rule does not look at it.

The time is that of LogGP (Alexandrov et al., SPAA 1995), with latency `alpha`, overhead `work` and
gap a byte `beta`, and with the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import weft

from ..counted import WITHIN, Counted

MERGED = 0.125e-9
"""Seconds for a byte of rows merged by one core, its cache shared with others';
benchmarks/kernels.py."""


class Forecast(NamedTuple):
    """What an algorithm would take after the opening exchange.

    Attributes:
        milliseconds: about.
        rounds, messages, bytes: of the average rank, see `weft.sparse.Traffic`.
        of_bound: bytes, as a multiple of the bound.
    """

    milliseconds: float
    rounds: int
    messages: int
    bytes: float
    of_bound: float


def forecasts(counted: Counted, link: weft.wire.Link) -> tuple[str, dict[str, Forecast]]:
    """What the rule takes, and the forecasts of all algorithms that it does not rule out."""
    sizes = weft.sparse.rate.fitted(counted.sizes, weft.sparse.rate.rate_of(1 / link.beta))
    found = {
        name: _forecast(name, sizes, counted, link)
        for name in sorted(weft.sparse.ALGORITHMS)
        if weft.sparse.choose.why_not(sizes, name) is None
    }
    if not weft.sparse.choose.is_eager(sizes, sizes.index):
        return weft.sparse.choose.chosen(sizes, "auto").algorithm, found
    traffic = weft.sparse.traffic.of_eager(sizes, sizes.index)
    merged = sizes.total * sizes.row
    found[weft.sparse.EAGER] = _of_traffic(traffic, sizes, counted, link, merged)
    return weft.sparse.EAGER, found


def _forecast(
    name: str, sizes: weft.sparse.Sizes, counted: Counted, link: weft.wire.Link
) -> Forecast:
    """Of an algorithm by name."""
    traffic_of = weft.sparse.ALGORITHMS[name].traffic
    assert traffic_of is not None  # it is one of weft's own
    if name == "split":
        sizes = weft.sparse.stages.in_stages(sizes)
    traffic = traffic_of(sizes, counted.union)
    return _of_traffic(traffic, sizes, counted, link, _merged(name, sizes, counted, traffic))


def _merged(
    name: str, sizes: weft.sparse.Sizes, counted: Counted, traffic: weft.sparse.Traffic
) -> float:
    """Bytes of rows that go through a rank's kernels."""
    if name == "gather":
        return sizes.total * sizes.row
    if name == "doubling":
        return 2 * traffic.bytes
    if name == "mask":
        return (3 * counted.union + sizes.mean) * sizes.partial
    return (sizes.mean + counted.union) * sizes.row


def _of_traffic(
    traffic: weft.sparse.Traffic,
    sizes: weft.sparse.Sizes,
    counted: Counted,
    link: weft.wire.Link,
    merged: float,
) -> Forecast:
    waiting = traffic.rounds * link.alpha
    streaming = traffic.bytes * _seconds_a_byte(sizes, counted, traffic, link)
    seconds = max(waiting, streaming) + traffic.messages * link.work + merged * MERGED
    bound = counted.bound
    of_bound = traffic.bytes / bound if bound else 1.0
    return Forecast(1e3 * seconds, *traffic, of_bound)


def _seconds_a_byte(
    sizes: weft.sparse.Sizes,
    counted: Counted,
    traffic: weft.sparse.Traffic,
    link: weft.wire.Link,
) -> float:
    """Of what a rank receives, some from its own host, some from others over the host's link."""
    crowd = max(sizes.ranks_of_hosts)
    if crowd == 1:
        return link.beta
    share = (sizes.ranks - crowd) / (sizes.ranks - 1)  # that comes from other hosts
    if sizes.blocks:
        inner = weft.sparse.stages.between(sizes)
        assert inner.algorithm.traffic is not None
        places = weft.sparse.stages.places_in(sizes.blocks)
        crossing = inner.algorithm.traffic(inner.sizes, counted.union // places).bytes
        share = min(1.0, crossing / traffic.bytes) if traffic.bytes else 0.0
    return share * crowd * link.beta + (1 - share) * WITHIN
