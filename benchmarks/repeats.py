"""Count what a call would save if it sent index lists as differences against the last call's.

    python benchmarks/repeats.py             # the cases of weft bench --case real, and zipf
    python benchmarks/repeats.py --ranks 64 --case text,ratings

Nothing is timed or sent, so the figures do not depend on the machine. Each rank draws the indices
of some steps of one run: a text that goes on, the ratings that come next. A call's bytes are those
of `split` on a slow link: of each rank's rows and of the sums, values and packed index lists.

* *own*, *sums*: rows that the last step had, too, of a rank's rows and of the union;
* *lists*: index lists, of all bytes;
* *bit*: saved of all bytes if a list that is equal to the last one were not sent;
* *difference*: saved of all bytes if a list were sent as what changed against the last one, where
  that is shorter: the places in the last list of what is gone, and the indices that are new, both
  packed by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from weft import kernels
from weft.cli.bench.cases import CASES, REAL, Case, indices
from weft.cli.bench.real import TRACES

Longs = NDArray[np.int64]

KNOWN = REAL | {"zipf": CASES["zipf"]}


@dataclass(frozen=True)
class Lists:
    """Two index lists that follow each other in one place, as rows and bytes.

    Attributes:
        rows: in the second.
        equal: of them, those that are in the first, too.
        plain: bytes of the second.
        changed: bytes of the difference, or of the second if they are fewer.
    """

    rows: int
    equal: int
    plain: int
    changed: int

    @classmethod
    def of(cls, last: Longs, now: Longs) -> Lists:
        plain = packed(now)
        gone = np.flatnonzero(~np.isin(last, now, assume_unique=True))
        new = np.setdiff1d(now, last, assume_unique=True)
        difference = packed(gone) + packed(new)
        return cls(len(now), len(now) - len(new), plain, min(plain, difference))

    @property
    def unequal(self) -> int:
        """Bytes of the second, if equal lists are not sent."""
        return 0 if self.changed == 0 else self.plain


def packed(found: Longs) -> int:
    """Bytes of a list on the wire: packed, or 4 for an index."""
    plain = 4 * len(found)
    code = kernels.index_code(torch.from_numpy(found)) if len(found) > 1 else None
    if code is None:
        return plain
    out = torch.empty(code.most, dtype=torch.uint8)
    return min(plain, kernels.encode(torch.from_numpy(found), code, out))


def steps_of(case: Case, ranks: int, steps: int, seed: int) -> list[list[Longs]]:
    """The sorted indices of each rank in each step, `[steps][ranks]`."""
    whole = replace(case, rows=steps * case.rows)
    runs = [indices(whole, rank, seed).numpy().reshape(steps, -1) for rank in range(ranks)]
    return [[np.unique(run[step]) for run in runs] for step in range(steps)]


def figures(own: list[Lists], sums: list[Lists], ranks: int, row_bytes: int) -> list[float]:
    """Shares of the columns, of so many ranks' lists and of the unions of the same steps."""
    # the sums, and their lists, travel once for each rank
    weighted = [(one, 1) for one in own] + [(one, ranks) for one in sums]
    plain = sum(one.plain * times for one, times in weighted)
    total = plain + sum(one.rows * row_bytes * times for one, times in weighted)
    unequal = sum(one.unequal * times for one, times in weighted)
    changed = sum(one.changed * times for one, times in weighted)
    equal = [sum(one.equal for one in each) for each in (own, sums)]
    rows = [sum(one.rows for one in each) for each in (own, sums)]
    saved = [(plain - unequal) / total, (plain - changed) / total]
    return [equal[0] / rows[0], equal[1] / rows[1], plain / total, *saved]


def lines(case: Case, widths: list[int], ranks: int, steps: int, seed: int) -> Iterator[str]:
    own, sums = [], []
    for last, now in pairwise(steps_of(case, ranks, steps, seed)):
        own += [Lists.of(*pair) for pair in zip(last, now, strict=True)]
        sums.append(Lists.of(reduce(np.union1d, last), reduce(np.union1d, now)))
    for width in widths:
        shares = figures(own, sums, ranks, 4 * width)
        yield f"{case.name:8} {ranks:6} {width:6} " + " ".join(f"{each:10.1%}" for each in shares)


def main(
    case: Annotated[str, typer.Option(help="Cases, divided by commas.")] = ",".join(KNOWN),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, divided by commas.")] = "4,64",
    width: Annotated[str, typer.Option(help="Floats of a row, divided by commas.")] = "1,16,64",
    steps: Annotated[int, typer.Option(help="Steps, at least two.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
) -> None:
    """Say what index lists have in common with those of the step before, and what that is worth."""
    titles = ("own", "sums", "lists", "bit", "difference")
    print(f"{'case':8} {'ranks':>6} {'width':>6} " + " ".join(f"{each:>10}" for each in titles))
    widths = [int(each) for each in width.split(",")]
    for name in case.split(","):
        trace = TRACES.get(name)
        if trace is not None and (missing := trace.missing()) is not None:
            print(f"repeats: {name}: {missing}")
            raise typer.Exit(2)
        for count in ranks.split(","):
            for line in lines(KNOWN[name], widths, int(count), steps, seed):
                print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
