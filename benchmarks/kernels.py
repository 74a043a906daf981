"""Time the kernels beside torch's operations for the same, and beside copying the bytes.

    python benchmarks/kernels.py [--threads N] [--repeat N] [--ranks N] [--dtype float32]

Results are checked first. Times are in milliseconds, the least of several runs that take turns.
*memcpy* copies the input values once, to memory that was used before. *torch* is `coalesce()` of
the COO tensor; for a merge, of the rows of all ranks together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft import kernels
from weft.kernels.ops import OPS

SUM = OPS["sum"]


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of `width` floats (0: scalars) with ids below `height`; Zipf or uniform."""

    name: str
    rows: int
    height: int
    width: int
    index_dtype: torch.dtype = torch.int64
    zipf: bool = False

    def indices(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.zipf:  # Zipf(1.0) by its continuous inverse
            part = torch.rand(self.rows, generator=generator, dtype=torch.float64)
            ids = (self.height**part).long() - 1
        else:
            some = torch.randint(self.height, (2 * self.rows,), generator=generator).unique()
            ids = some[torch.randperm(len(some), generator=generator)[: self.rows]]
        return ids.to(self.index_dtype)

    def values(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (rows, self.width) if self.width else (rows,)
        return torch.randint(-8, 8, shape).to(dtype)  # small integers: sums are exact


CASES = (
    Case("uniform", 50_000, 1_000_000, 64),
    Case("zipf", 50_000, 1_000_000, 64, zipf=True),
    Case("small", 500, 1_000_000, 64, zipf=True),
    Case("scalar", 1_000_000, 10_000_000, 0),
    Case("scalar int32", 1_000_000, 10_000_000, 0, torch.int32),
    Case("quarter runs", 250_000, 10_000_000, 0, torch.int32),
    Case("sparse ids", 250_000, 2_000_000_000, 0, torch.int32),
    Case("wide", 3_000, 100_000, 1024),
    Case("full", 60_000, 100_000, 16),
)


def least(jobs: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The shortest time of each job, milliseconds; they take turns, so a noisy moment hits all."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(repeat):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def coalesce(indices: Tensor, values: Tensor, height: int) -> Tensor:
    shape = (height, *values.shape[1:])
    coo = torch.sparse_coo_tensor(indices.unsqueeze(0), values, shape, check_invariants=False)
    return coo.coalesce()


def local(case: Case, dtype: torch.dtype, repeat: int) -> dict[str, float]:
    """Distinct, then reduce: what a rank does to its own rows."""
    indices = case.indices(0)
    values = case.values(len(indices), dtype)
    found = kernels.distinct(indices)
    out = values.new_empty((len(found.indices), *values.shape[1:]))
    kernels.reduce(values, found, SUM, out)
    expected = coalesce(indices, values, case.height)
    assert torch.equal(expected.indices()[0], found.indices.long()), case
    assert torch.equal(expected.values(), out), case
    copy = torch.empty_like(values)
    return least(
        {
            "memcpy": lambda: copy.copy_(values),
            "distinct": lambda: kernels.distinct(indices),
            "reduce": lambda: kernels.reduce(values, found, SUM, out),
            "torch": lambda: coalesce(indices, values, case.height),
        },
        repeat,
    )


def merge(case: Case, dtype: torch.dtype, ranks: int, repeat: int) -> dict[str, float]:
    """Union, then combine: what an owner does to the runs of all ranks."""
    runs = [torch.unique(case.indices(rank)) for rank in range(ranks)]
    values = [case.values(len(run), dtype) for run in runs]
    united = kernels.union(runs)
    out = values[0].new_empty((len(united.indices), *values[0].shape[1:]))

    def combine() -> None:
        for slots, rows in zip(united.slots, values, strict=True):
            kernels.combine(out, slots, rows, SUM)

    combine()
    together = torch.cat(runs), torch.cat(values)
    expected = coalesce(*together, case.height)
    assert torch.equal(expected.indices()[0], united.indices.long()), case
    assert torch.equal(expected.values(), out), case
    indices, merged = kernels.merge(list(zip(runs, values, strict=True)), SUM)
    assert torch.equal(indices, united.indices) and torch.equal(merged.to(dtype), out), case
    copy = torch.empty_like(together[1])
    return least(
        {
            "memcpy": lambda: copy.copy_(together[1]),
            "union": lambda: kernels.union(runs),
            "combine": combine,
            "torch": lambda: coalesce(torch.cat(runs), torch.cat(values), case.height),
        },
        repeat,
    )


def show(title: str, columns: tuple[str, str], rows: list[tuple[str, dict[str, float]]]) -> None:
    head = ("memcpy", *columns, "torch", "values / memcpy", "torch / ours")
    print(f"{title}\n{'case':22}" + "".join(f"{each:>17}" for each in head))
    for name, times in rows:
        ours = times[columns[0]] + times[columns[1]]
        cells = [f"{times[column]:.3f}" for column in head[:4]]
        cells += [f"{times[columns[1]] / times['memcpy']:.2f}", f"{times['torch'] / ours:.1f}"]
        print(f"{name:22}" + "".join(f"{cell:>17}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4, help="runs in a merge")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    print(kernels.describe())
    show(
        f"own rows, {options.dtype}, ms",
        ("distinct", "reduce"),
        [(case.name, local(case, dtype, options.repeat)) for case in CASES],
    )
    show(
        f"{options.ranks} runs merged, {options.dtype}, ms",
        ("union", "combine"),
        [(case.name, merge(case, dtype, options.ranks, options.repeat)) for case in CASES],
    )


if __name__ == "__main__":
    main()
