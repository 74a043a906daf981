"""What a split in stages sends: rows, bytes and messages of each stage, and the time they take.

    python benchmarks/stages.py                                  # all factors, to 10,240 ranks
    python benchmarks/stages.py --case zipf --ranks 8 --per-host 4 --stages
    python benchmarks/stages.py --case code --ranks 64 --drawn   # real sets, too
    python benchmarks/stages.py --rounded                        # with wire_dtype=torch.bfloat16
    python benchmarks/stages.py --simulated --rows 500 --height 20000 --ranks 2,8,16,64 \\
        --per-host 1,2,4,8                                       # beside the real schedule

A model, made before the schedule is written. Ranks are numbered host by host. With P = f1 x f2 x
..., a rank exchanges with f1 - 1 peers in the first stage: each of the f1 keeps one part of the
indices, gets what the others have of it, and merges. In the second stage it does so with the f2 - 1
ranks that have another number there and keep the same part, and so on; after the last, each rank
has the complete sums of one range. They are shared back through the same factors, round a ring of a
stage's ranks: so a sum enters a host once in a stage. One factor P is a flat `split`.

In a stage a rank sends each other one two messages to reduce, an index list and the rows, and two
to share; none, where it has no rows, and more, where they are longer than a chunk. Sums wait a
latency in each hop of the ring, unless the link carries other bytes meanwhile. Stages follow each
other, but for the last: the ranks of a host share sums while those of other hosts still come.

With `--rounded` rows that ranks bring, and complete sums, are sent in bfloat16. Sums of some ranks,
which the stages after the first reduce, stay in float32.

`--simulated` runs the schedule itself, with a split between the blocks, too, on simulated ranks
(`weft.testing.simulation`), and prints the model's figures over those.

Rows are counted from the chance that a rank holds an index: the union of n ranks has index j with
chance 1 - (1 - q_j)^n, if ranks draw independently. `--drawn` draws sets and counts them instead.
The ranges are cut so that all owners receive and sum as many rows, as `sparse.owners` does.

Source: the bound is that of docs/holders.md, for hosts in the place of ranks; time is LogGP's
(Alexandrov et al., SPAA 1995). Factors as in Zhao and Canny, "Kylix" (ICPP 2014), section 4.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import typer
from numpy.typing import NDArray

import weft
from weft.sparse.bound import rows_of_average
from weft.sparse.codec import PREFIX
from weft.sparse.factors import load_between_blocks
from weft.sparse.registry import Algorithm
from weft.testing.simulation import Simulation, simulate
from weft.wire.link import MERGE, WITHIN, Link

Floats = NDArray[np.float64]

HEIGHT, ROWS, WIDTH = 1_000_000, 50_000, 64
CHUNK_SECONDS = 0.002  # on a link: rows are sent in chunks that take so long
INDEX_BYTES = 4
MERGED_BYTES = 4 * WIDTH + INDEX_BYTES  # of a row, which is added in float32
RATES = (1, 10, 100, 400)  # Gbit/s of a host's link
SIMULATED = (1, 10)  # Gbit/s, of these; links as quick as memory have no ring
LATENCY = 50e-6  # seconds of a round
WORK = 10e-6  # seconds of a core for a message


@dataclass(frozen=True)
class Case:
    """Rows whose indices ranks draw independently.

    Attributes:
        name: of the case.
        held: for each index the chance that a rank holds it.
        draw: the indices of one rank, given its number: sorted, each once.
        is_rounded: rows and complete sums are sent in bfloat16, sums of some ranks are not.
    """

    name: str
    held: Floats
    draw: Callable[[int], NDArray[np.int64]]
    is_rounded: bool = False

    def bytes_in(self, stage: Stage) -> int:
        """Of the values and the index of a row, as the stage sends it."""
        is_half = self.is_rounded and not stage.is_partial
        return (2 if is_half else 4) * WIDTH + INDEX_BYTES

    def union_of(self, ranks: int) -> Floats:
        """For each index the chance that one of so many ranks holds it."""
        return -np.expm1(ranks * np.log1p(-np.minimum(self.held, 1 - 1e-15)))


@dataclass(frozen=True)
class Stage:
    """What the average and the busiest rank and host do in one stage; rows, not bytes.

    Attributes:
        factor: how many ranks exchange with each other.
        is_shared: whether sums are shared, after they are complete.
        received: rows that each rank receives.
        remote: the part of them that comes from other hosts.
        into_hosts: rows that enter each host's link.
        filled: the chance that a rank has rows for a peer.
        is_partial: whether rows are sums of some ranks: in all stages that reduce, but the first.
    """

    factor: int
    is_shared: bool
    received: Floats
    remote: float
    into_hosts: Floats
    filled: float
    is_partial: bool = False

    @property
    def messages(self) -> float:
        """That a rank sends, if its rows to a peer are one chunk: their list, and the rows."""
        return (self.factor - 1) * (1 + self.filled)

    @property
    def is_hidden(self) -> bool:
        """Whether sums are shared within a host, which is while other hosts' bytes still come."""
        return self.is_shared and not self.remote

    def waits(self, row_bytes: int, rate: float) -> float:
        """Latencies that a rank waits beside the time of the bytes: see `Load.hops`."""
        if not self.is_shared:
            return 1  # rows leave behind their list
        if self.is_hidden:
            return 1  # for the last ones, which go to all directly
        hops = self.factor - 1
        own = float(self.received.mean()) / hops * row_bytes * 8 / rate
        chunk = min(own, CHUNK_SECONDS)
        hop = LATENCY + chunk * self.remote
        # meanwhile the link carries what all ranks of the host receive
        meanwhile = float(self.into_hosts.mean()) * row_bytes * 8 / rate
        ring = own - chunk + hops * hop - meanwhile
        return 1 + max(1.0, ring / LATENCY)

    def __str__(self) -> str:
        what = "share" if self.is_shared else "reduce"
        return (
            f"{what} among {self.factor}: {self.received.mean():.0f} rows, busiest "
            f"{self.received.max():.0f}, {self.into_hosts.mean():.0f} into a host"
        )


def stages_of(
    unions: Callable[[int, NDArray[np.int64]], Floats],
    empties: Callable[[int, NDArray[np.int64]], Floats],
    weights: Floats,
    factors: Sequence[int],
    per_host: int,
) -> list[Stage]:
    """All stages of a split by these factors, in their order.

    Args:
        unions: rows in the union of each block of so many neighbouring ranks, between cuts:
            `[blocks, ranges]`, or `[1, ranges]` where all blocks are expected to have as many.
        empties: of the same ranges, the logarithm of the chance that a block has no row there.
        weights: of each index; ranges of equal weight are equal work.
        factors: their product is the number of ranks.
        per_host: neighbouring ranks that share a host.
    """
    ranks = math.prod(factors)
    cuts = cut(weights, ranks)
    total = unions(ranks, cuts)[0]
    numbers = np.arange(ranks)
    reduced, shared = [], []
    joined = 1  # ranks whose rows are in a partial sum before the stage
    parts = 1  # parts into which the indices are cut before the stage
    place = np.zeros(ranks, np.int64)  # the part that each rank keeps
    for factor in factors:
        before = place
        digit = numbers // joined % factor
        place = before * factor + digit
        parts *= factor
        blocks = unions(joined, cuts)
        wide = ranks // parts  # final ranges in a part
        in_part = blocks.reshape(len(blocks), parts, wide).sum(2)
        empty = empties(joined, cuts).reshape(len(blocks), parts, wide).sum(2)
        filled = float(1 - np.exp(empty).mean())
        local = min(factor, max(1, per_host // joined))
        remote = (factor - local) / max(1, factor - 1)
        received = np.zeros(ranks)
        for step in range(1, factor):
            peer = numbers + ((digit + step) % factor - digit) * joined
            block = peer // joined if len(blocks) > 1 else np.zeros(ranks, np.int64)
            received += in_part[block, place]
        into_hosts = by_host(received * remote, per_host)
        reduced.append(Stage(factor, False, received, remote, into_hosts, filled, joined > 1))
        empty = empties(ranks, cuts).reshape(-1, parts, wide).sum(2)
        filled = float(1 - np.exp(empty).mean())
        sums = total.reshape(parts, wide).sum(1)
        whole = sums.reshape(parts // factor, factor).sum(1)
        # of the ranks of a stage on one host, the first gets each sum from another host
        into_hosts = by_host(whole[before] / local - sums[place], per_host)
        received = whole[before] - sums[place]
        shared.append(Stage(factor, True, received, remote, into_hosts, filled))
        joined *= factor
    return [*reduced, *reversed(shared)]


def by_host(rows: Floats, per_host: int) -> Floats:
    """The sums over the ranks of each host."""
    return np.maximum(
        rows.reshape(-1, per_host).sum(1), 0.0
    )  # of all within a host, rounding is left


def cut(weights: Floats, ranges: int) -> NDArray[np.int64]:
    """The first index of each of so many ranges of equal weight, as far as indices allow."""
    total = np.cumsum(weights)
    at = np.searchsorted(total, total[-1] * np.arange(1, ranges) / ranges, side="right")
    return np.concatenate([[0], at]).astype(np.int64)


def summed(weights: Floats, cuts: NDArray[np.int64]) -> Floats:
    """The sums of the weights in each range; a range without indices has none."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    return total[np.append(cuts[1:], len(weights))] - total[cuts]


def expected(case: Case, factors: Sequence[int], per_host: int) -> list[Stage]:
    """The stages, from the chances of the case."""
    ranks = math.prod(factors)

    def unions(joined: int, cuts: NDArray[np.int64]) -> Floats:
        return summed(case.union_of(joined), cuts)[None]

    def empties(joined: int, cuts: NDArray[np.int64]) -> Floats:
        return summed(joined * np.log1p(-np.minimum(case.held, 1 - 1e-15)), cuts)[None]

    weights = ranks * case.held + case.union_of(ranks)
    return stages_of(unions, empties, weights, factors, per_host)


def sets_of(case: Case, ranks: int) -> NDArray[np.bool_]:
    """Which indices each rank holds, drawn: `[ranks, height]`."""
    sets = np.zeros((ranks, len(case.held)), bool)
    for rank in range(ranks):
        sets[rank, case.draw(rank)] = True
    return sets


def counted(sets: NDArray[np.bool_], factors: Sequence[int], per_host: int) -> list[Stage]:
    """The stages, from sets."""
    height = sets.shape[1]

    def unions(joined: int, cuts: NDArray[np.int64]) -> Floats:
        blocks = sets.reshape(-1, joined, height).any(1)
        return np.stack([summed(block.astype(float), cuts) for block in blocks])

    def empties(joined: int, cuts: NDArray[np.int64]) -> Floats:
        return np.where(unions(joined, cuts) > 0, -np.inf, 0.0)

    weights = sets.sum(0) + sets.any(0).astype(float)
    return stages_of(unions, empties, weights, factors, per_host)


def bound_of(case: Case, ranks: int, per_host: int) -> float:
    """Rows that the average host must receive, from the chances of the case."""
    hosts = ranks // per_host
    rows = float(case.union_of(per_host).sum())
    return rows_of_average(hosts * rows, float(case.union_of(ranks).sum()), hosts)


def bound_of_sets(sets: NDArray[np.bool_], per_host: int) -> float:
    """Rows that the average host must receive, from sets."""
    hosts = len(sets) // per_host
    rows = sets.reshape(hosts, per_host, -1).any(1).sum()
    return rows_of_average(float(rows), float(sets.any(0).sum()), hosts)


def seconds(stages: Sequence[Stage], case: Case, rate: float) -> float:
    """The time of the stages, one after the other, on links of so many bits a second."""
    total = 0.0
    for one in stages:
        row_bytes = case.bytes_in(one)
        most = float(one.received.max())
        link = float(one.into_hosts.max()) * row_bytes * 8 / rate
        within = most * row_bytes * (1 - one.remote) * WITHIN  # beside what crosses the link
        merging = 0.0 if one.is_shared else most * MERGED_BYTES * MERGE
        waiting = one.waits(row_bytes, rate) * LATENCY
        if not one.is_hidden:
            waiting += one.messages * WORK
        total += waiting + max(link, within) + merging
    return total


# Cases -------------------------------------------------------------------------------------------


def uniform(rows: int, height: int) -> Case:
    def draw(rank: int) -> NDArray[np.int64]:
        chosen = np.random.default_rng(rank + 1).choice(height, rows, replace=False)
        return np.sort(chosen)

    return Case("uniform", np.full(height, rows / height), draw)


def identical(rows: int, height: int) -> Case:
    held = np.zeros(height)
    held[:: height // rows] = 1.0
    return Case("identical", held, lambda rank: np.flatnonzero(held))


def tokens(name: str, chances: Floats, count: int) -> Case:
    """Rows of so many tokens, drawn independently."""
    held = -np.expm1(count * np.log1p(-chances))

    def draw(rank: int) -> NDArray[np.int64]:
        return np.unique(np.random.default_rng(rank + 1).choice(len(chances), count, p=chances))

    return Case(name, held, draw)


def zipf(rows: int, height: int) -> Case:
    chances = 1 / np.arange(1, height + 1)
    return tokens("zipf", chances / chances.sum(), rows)


def code(rows: int, height: int) -> Case:
    """Words of the source of Python's standard library; a rank's are neighbours in the text.

    It has its own numbers of rows and words.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    words: list[str] = []
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" not in file.parts:
            words += re.findall(r"[A-Za-z_]+", file.read_text(errors="ignore"))
    counts = Counter(words)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common())}
    text = np.array([numbers[word] for word in words])
    chances = np.array([count for _, count in counts.most_common()], float)
    count = 4480  # 128 sentences of 35 words

    def draw(rank: int) -> NDArray[np.int64]:
        start = np.random.default_rng(rank + 1).integers(len(text) - count)
        return np.unique(text[start : start + count])

    return Case("code", tokens("code", chances / chances.sum(), count).held, draw)


CASES = {"uniform": uniform, "zipf": zipf, "identical": identical, "code": code}


# Factors -----------------------------------------------------------------------------------------


def lists_of(ranks: int, per_host: int) -> Iterator[tuple[int, ...]]:
    """Factors worth a look: one, those of hosts, square roots between hosts, twos."""
    hosts = ranks // per_host
    local = (per_host,) if per_host > 1 else ()
    found = [(ranks,), (*local, hosts)]
    root = next(n for n in range(math.isqrt(hosts), 0, -1) if hosts % n == 0)
    if root > 1:
        found.append((*local, root, hosts // root))
    if ranks & (ranks - 1) == 0:
        found.append((2,) * (ranks.bit_length() - 1))
    seen = set()
    for factors in found:
        kept = tuple(factor for factor in factors if factor > 1)
        if kept not in seen and math.prod(kept) == ranks:
            seen.add(kept)
            yield kept


def named(factors: Sequence[int], *, short: bool = True) -> str:
    """As users write factors; many alike as a power, if it may be short."""
    if short and len(factors) > 3 and len(set(factors)) == 1:
        return f"{factors[0]}^{len(factors)}"
    return "x".join(map(str, factors))


def show(
    case: Case, ranks: int, per_host: int, stages: Sequence[Stage], name: str, least: float
) -> None:
    """A line: rows and messages of the mean and the busiest, over the bound, and times."""
    into = np.sum([one.into_hosts for one in stages], axis=0)
    received = np.sum([one.received for one in stages], axis=0)
    messages = sum(one.messages for one in stages)
    times = "".join(f"{1e3 * seconds(stages, case, 1e9 * rate):10.1f}" for rate in RATES)
    print(
        f"{case.name:10}{ranks:7}{per_host:5}  {name:14}{messages:7.0f}{len(stages):7}"
        f"{received.mean():11.0f}{received.max():11.0f}"
        f"{into.mean() / least:8.3f}{into.max() / least:8.3f}{times}",
        flush=True,
    )


# The schedule -------------------------------------------------------------------------------------


def simulated(case: Case, factors: Sequence[int], per_host: int, rate: float) -> Simulation:
    """What the schedule takes on simulated ranks, with a split between the blocks, too."""
    ranks = math.prod(factors)
    between = Link(LATENCY, 8 / rate, MERGE, WORK, within=WITHIN if 1 < per_host < ranks else 0.0)

    def rows(rank: int) -> weft.Rows:
        indices = torch.from_numpy(case.draw(rank))
        return weft.Rows(indices, torch.ones(len(indices), WIDTH), len(case.held))

    def middle(load: weft.sparse.Load) -> tuple[Algorithm, weft.sparse.Load]:
        return weft.sparse.ALGORITHMS["split"], load_between_blocks(load)

    with (
        mock.patch("weft.sparse.stages.middle", middle),
        mock.patch.dict(os.environ, WEFT_FACTORS=named(factors, short=False)),
    ):
        return simulate(
            "split",
            rows,
            ranks,
            between,
            wire_dtype=torch.bfloat16 if case.is_rounded else None,
            hosts=[f"{rank // per_host}" for rank in range(ranks)],
            within=replace(between, beta=WITHIN),
        )


def of_simulated(
    case: Case, factors: Sequence[int], per_host: int, rate: float
) -> tuple[float, float, float]:
    """Messages, bytes and time of the model over those of the simulated schedule, same sets."""
    done = simulated(case, factors, per_host, rate)
    stages = counted(sets_of(case, math.prod(factors)), factors, per_host)
    messages = sum(one.messages for one in stages)
    nbytes = sum(float(one.received.mean()) * case.bytes_in(one) for one in stages)
    nbytes += sum(one.factor - 1 for one in stages) * PREFIX  # of a list
    taken = seconds(stages, case, rate)
    return messages / done.messages, nbytes / done.bytes, taken / done.seconds


def compare(case: Case, counts: Sequence[int], shares: Sequence[int]) -> None:
    """A line for each number of ranks and list of factors: the model over the simulation."""
    for ranks in counts:
        for per_host in shares:
            if ranks % per_host or ranks <= per_host:
                continue
            for factors in lists_of(ranks, per_host):
                found = [of_simulated(case, factors, per_host, 1e9 * rate) for rate in SIMULATED]
                messages, nbytes, _ = found[0]
                times = " ".join(f"{taken:8.2f}" for *_, taken in found)
                print(
                    f"{case.name:10}{ranks:7}{per_host:5}  {named(factors):14}"
                    f"{messages:9.2f}{nbytes:8.2f} {times}",
                    flush=True,
                )


def main(
    case: Annotated[str, typer.Option(help="Cases, divided by commas.")] = "uniform,zipf,identical",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "8,64,1024,10240",
    per_host: Annotated[str, typer.Option(help="Ranks of a host.")] = "1,4,16",
    stages: Annotated[bool, typer.Option(help="A line for each stage, too.")] = False,
    sets: Annotated[bool, typer.Option("--drawn", help="Count sets that are drawn, too.")] = False,
    rows: Annotated[int, typer.Option(help="Rows of a rank, or tokens.")] = ROWS,
    height: Annotated[int, typer.Option(help="Rows they are drawn from.")] = HEIGHT,
    rounded: Annotated[bool, typer.Option("--rounded", help="Sent in bfloat16.")] = False,
    beside: Annotated[
        bool, typer.Option("--simulated", help="Print the model over the simulated schedule.")
    ] = False,
) -> None:
    """Print a line for each case, number of ranks, ranks of a host and list of factors."""
    counts = [*map(int, ranks.split(","))]
    shares = [*map(int, per_host.split(","))]
    cases = [CASES[name](rows, height) for name in case.split(",")]
    cases = [replace(one, is_rounded=rounded) for one in cases]
    if beside:
        times = " ".join(f"{f'{rate} Gb/s':>8}" for rate in SIMULATED)
        print(f"case        ranks host  factors        messages   bytes {times}")
        for one in cases:
            compare(one, counts, shares)
        return
    rates = "".join(f"{f'{rate} Gb ms':>10}" for rate in RATES)
    print(
        "case        ranks host  factors       messages stages   received    busiest   bound"
        f" busiest{rates}"
    )
    for one in cases:
        for count in counts:
            for share in shares:
                if count % share or count <= share:
                    continue
                least = bound_of(one, count, share)
                drawn = sets_of(one, count) if sets else None
                for factors in lists_of(count, share):
                    found = expected(one, factors, share)
                    show(one, count, share, found, named(factors), least)
                    for each in found if stages else ():
                        print(f"{'':24}  {each}")
                    if drawn is not None:
                        found = counted(drawn, factors, share)
                        name = f"{named(factors)} drawn"
                        show(one, count, share, found, name, bound_of_sets(drawn, share))


if __name__ == "__main__":
    typer.run(main)
