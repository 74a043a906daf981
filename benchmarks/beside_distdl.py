"""Time the layers of weft.compat.distdl and those of DistDL itself, forward and backward.

    git clone https://github.com/distdl/distdl
    mpirun -n 4 python benchmarks/beside_distdl.py distdl/src

The same lines of code make the layers of both libraries, in the same processes, so both do the same
work. DistDL sends messages over MPI (extra `mpi`), weft over its own wire. Outputs and gradients
are compared first. Then the two take turns, with a barrier before each call. Times are medians of
the slowest rank, for tensors of `--mib` MiB of float32 a rank, and of 256 bytes. The exit status is
1 if a layer of weft is slower than DistDL's.

DistDL's repository has version 0.5, which lacks AllGather and ReduceScatter. Its compiled code, for
interpolation, moves no data and is not needed here.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import weft
from turns import turns
from weft.compat import distdl as ours
from weft.schedules import dense_all_reduce

Program = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A layer's output and, once 1.5 times the output went back through it, the input's gradient."""


def original(source: Path) -> types.SimpleNamespace:
    """DistDL's names, from a checkout whose C++ parts were not built."""
    compiled = types.ModuleType("distdl.functional.interpolate._cpp")
    for kind in ("constant", "linear"):
        setattr(compiled, f"{kind}_interpolation_forward", None)
        setattr(compiled, f"{kind}_interpolation_adjoint", None)
    sys.modules[compiled.__name__] = compiled
    sys.path.insert(0, str(source))
    np.int = int  # type: ignore[attr-defined]  # which NumPy had when DistDL was written
    import distdl
    from distdl.backends.mpi.partition import MPIPartition
    from mpi4py import MPI

    world = functools.partial(MPIPartition, MPI.COMM_WORLD)
    return types.SimpleNamespace(**vars(distdl.nn), MPIPartition=world)


def layers(names: Any, ranks: int, rank: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """Name, layer, and whether only rank 0 brings a tensor; the same lines for both libraries."""
    world = names.MPIPartition()
    root = world.create_partition_inclusive(np.arange(1))
    root = root.create_cartesian_topology_partition([1, 1])
    some = world.create_partition_inclusive(np.arange(ranks))
    rows = some.create_cartesian_topology_partition([ranks, 1])
    columns = some.create_cartesian_topology_partition([1, ranks])
    yield "Broadcast", names.Broadcast(root, rows), True
    yield "SumReduce", names.SumReduce(rows, root), False
    yield "AllSumReduce", names.AllSumReduce(rows, axes_reduce=(0,)), False
    yield "Repartition", names.Repartition(rows, columns), False
    width = np.array([[int(rank > 0), int(rank < ranks - 1)], [0, 0]])
    yield "HaloExchange", names.HaloExchange(rows, width, width, width), False


def program(layer: nn.Module) -> Program:
    # DistDL fills the margins of the very tensor that it is given, which may be no leaf
    in_place = type(layer).__name__ == "HaloExchange" and not isinstance(layer, ours.HaloExchange)

    def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x.detach().requires_grad_()
        y = layer(x.clone() if in_place else x)
        y.backward(1.5 * y.detach())
        return y.detach(), x.grad

    return run


def same(left: tuple[Tensor, Tensor | None], right: tuple[Tensor, Tensor | None]) -> bool:
    """Equal; what one side leaves None or empty holds nothing."""
    return all(
        a is None or b is None or a.numel() + b.numel() == 0 or torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="weft's layers beside DistDL's.")
    parser.add_argument("distdl", type=Path, help="the folder src of a checkout of DistDL")
    parser.add_argument("--mib", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="words of the layers to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    theirs = original(options.distdl)
    with weft.init() as group:
        slower = measure(group, theirs, options)
    sys.exit(1 if slower else 0)


def measure(group: Any, theirs: Any, options: argparse.Namespace) -> bool:
    table = Table("layer", "a rank", "DistDL ms", "weft ms", "DistDL / weft")
    table.title = f"forward and backward, {group.size} ranks, load {os.getloadavg()[0]:.1f}"
    slower = False
    sizes = ((f"{options.mib:g} MiB", int(options.mib * (1 << 18)), 1), ("256 B", 64, 20))
    for size, elements, calls in sizes:
        columns = 4 * group.size if elements > 64 * group.size else elements // 4
        shape = (elements // columns, columns)
        pairs = zip(
            layers(theirs, group.size, group.rank),
            layers(ours, group.size, group.rank),
            strict=True,
        )
        for (name, other, only_root), (_, mine, _) in pairs:
            if not any(word in name for word in options.only.split(",")):
                continue
            own = torch.Generator().manual_seed(group.rank)
            x = torch.randint(-8, 8, shape, generator=own).float()  # sums are exact in any order
            if only_root and group.rank:
                x = ours.zero_volume_tensor()
            first, second = program(other), program(mine)
            right = torch.tensor([same(first(x), second(x))], dtype=torch.int64)
            dense_all_reduce(group, right, "min").wait()
            if not right.item():
                sys.exit(f"{name}: the two differ; nothing is timed")
            contenders = {
                "distdl": functools.partial(first, x),
                "weft": functools.partial(second, x),
            }
            times = turns(group, options.rounds, contenders, calls=calls)
            distdl, mine_took = (statistics.median(times[who]) for who in ("distdl", "weft"))
            slower |= mine_took > distdl
            figures = (f"{distdl * 1e3:.3g}", f"{mine_took * 1e3:.3g}", f"{distdl / mine_took:.2f}")
            table.add_row(name, size, *figures)
    if group.rank == 0:
        Console(width=100).print(table)
    return slower


if __name__ == "__main__":
    main()
