"""What rows would cost in aligned blocks, without an index for each row: why there is no `block`.

OmniReduce (Fei et al., SIGCOMM'21) sends the blocks of a tensor that are not zero. Here a row of
zeros is a row, so a block needs a bit for each of its rows beside an index of its own. Printed is
what split's schedule would move with blocks of some sizes, as a multiple of what it moves with rows
whose index lists are gaps (`weft.sparse.codec`); and how much of a merge's time is spent on
indices. `python benchmarks/blocks.py` takes half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft import kernels
from weft.kernels.ops import OPS
from weft.sparse import codec
from weft.wire.memory import Pool

RANKS, BLOCKS = 4, (2, 4, 8, 32, 256)


def uniform(count: int, height: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(height, (count,), generator=draw).unique() for _ in range(RANKS)]


def zipf(count: int, height: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    mass = torch.cumsum(1.0 / torch.arange(1, height + 1, dtype=torch.float64), 0)
    return [
        torch.searchsorted(
            mass, torch.rand(count, generator=draw, dtype=torch.float64) * mass[-1]
        ).unique()
        for _ in range(RANKS)
    ]


def runs(count: int, height: int, length: int) -> list[torch.Tensor]:
    """Rows that come in runs of that length, which begin anywhere."""
    return [
        (each[:, None] + torch.arange(length)).view(-1).unique()
        for each in uniform(count // length, height - length)
    ]


CASES = {
    "uniform": (uniform(50_000, 1_000_000), 256),
    "zipf": (zipf(50_000, 1_000_000), 256),
    "scalar": (uniform(1_000_000, 10_000_000), 4),
    "full": (uniform(60_000, 100_000), 64),
    "scalar, runs of 32": (runs(1_000_000, 10_000_000, 32), 4),
    "scalar, runs of 1024": (runs(1_000_000, 10_000_000, 1024), 4),
    "64 floats, runs of 32": (runs(50_000, 1_000_000, 32), 256),
}


def in_rows(indices: torch.Tensor, row: int) -> int:
    with codec.pack(indices.int(), Pool(), gaps=True) as packed:
        return len(packed) + len(indices) * row


def in_blocks(indices: torch.Tensor, row: int, block: int) -> int:
    touched = torch.unique_consecutive(indices // block)
    with codec.pack(touched.int(), Pool(), gaps=True) as packed:
        return len(packed) + len(touched) * (block * row + -(-block // 8))


def seconds(function: Callable[[], object], passes: int = 7) -> float:
    """Of the quickest pass."""
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def merges(parts: list[torch.Tensor], row: int) -> tuple[float, float]:
    """Uniting the index sets and combining the rows, of what adding them densely takes."""
    values = [torch.ones(len(part), row // 4) for part in parts]
    union = kernels.union(parts)
    out = torch.empty(len(union.indices), row // 4)

    def by_rows() -> None:
        for slots, each in zip(union.slots, values, strict=True):
            kernels.combine(out, slots, each, OPS["sum"])

    def densely() -> None:
        for each in values:
            out[: len(each)].add_(each)

    by_rows()  # whose memory is then as warm as that of the other
    dense = seconds(densely)
    return seconds(lambda: kernels.union(parts)) / dense, seconds(by_rows) / dense


def main() -> None:
    torch.set_num_threads(1)
    kernels.warm([(torch.int64, torch.float32, OPS["sum"])])
    print(f"{'bytes, of those in rows':24}" + "".join(f"{f'b={b}':>8}" for b in BLOCKS))
    for name, (parts, row) in CASES.items():
        lists = [*parts, torch.cat(parts).unique()]
        weights = [1 / RANKS] * RANKS + [1]  # k of the average rank, then U
        plain = sum(w * in_rows(each, row) for w, each in zip(weights, lists, strict=True))
        line = f"{name:24}"
        for block in BLOCKS:
            moved = sum(
                w * in_blocks(each, row, block) for w, each in zip(weights, lists, strict=True)
            )
            line += f"{moved / plain:8.2f}"
        print(line)
    print(f"\n{'merge: by rows, of dense':24}")
    for name in ("scalar, runs of 1024", "64 floats, runs of 32"):
        uniting, combining = merges(*CASES[name])
        print(f"{name:24}{uniting:8.2f} to unite{combining:8.2f} to combine")


if __name__ == "__main__":
    main()
