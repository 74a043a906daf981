"""Time a dense sum on `cpu:weft` beside DeepSpeed's all-reduce in shared memory, and beside gloo.

    pip download --no-deps --no-binary :all: --no-build-isolation deepspeed==0.18.9
    tar -xzf deepspeed-0.18.9.tar.gz
    torchrun --standalone --nproc-per-node 2 benchmarks/beside_deepspeed.py deepspeed-0.18.9

DeepSpeed's is `csrc/cpu/comm/shm.cpp`, built with its builder's flags by torch's cpp_extension (a
C++ compiler and ninja). It holds what it wants with AVX-512 in its sums of float32, too, though
these use AVX2: so the copy that is built asks for AVX2 there, and works on more processors. It
spins, and compares nothing. Results are checked first. Then all take turns, with a barrier before
each. Times are medians of the slowest rank, in microseconds; ratios are theirs by weft's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils import cpp_extension

import weft
from turns import turns

SECONDS = 0.05  # that a turn takes, about
MOST = 500  # calls in a turn
LIKELY = 2e9  # bytes a second, for the number of calls in a turn


def built(source: Path) -> Callable[[Tensor], object]:
    """DeepSpeed's op, compiled from its sources."""
    copy = source / "for-avx2"
    if dist.get_rank() == 0:
        shutil.copytree(source / "csrc/cpu/comm", copy, dirs_exist_ok=True)
        header = copy / "x86_64/shm.h"
        declarations = header.read_text().split(";")
        for number, text in enumerate(declarations):
            if "reduce_fp32_buffers(" in text or "parallel_memcpy(" in text:
                declarations[number] = text.replace("avx512bw", "avx2")
        header.write_text(";".join(declarations))
        load(copy)
    dist.barrier()
    os.environ["LOCAL_SIZE"] = str(dist.get_world_size())
    load(copy).initialize(dist.get_world_size(), dist.get_rank())
    op: Callable[[Tensor], object] = torch.ops.deepspeed.inference_all_reduce_
    return op


def load(folder: Path) -> Any:
    """The module that torch makes of a folder's sources."""
    return cpp_extension.load(
        "deepspeed_shm_comm",
        [str(folder / name) for name in ("shm_interface.cpp", "shm.cpp")],
        extra_cflags=["-O2", "-fopenmp"],
        build_directory=str(folder),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="the folder of DeepSpeed's source distribution")
    parser.add_argument("--size", default="1024,65536,1048576,4194304,33554432")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:weft")
    group, gloo = weft.init(), dist.new_group(backend="gloo")
    deepspeed = built(given.source)
    contenders: dict[str, Callable[[Tensor], object]] = {
        "weft": dist.all_reduce,
        "weft, leased": dist.all_reduce,
        "DeepSpeed": deepspeed,
        "gloo": lambda tensor: dist.all_reduce(tensor, group=gloo),
    }
    table = Table("bytes", *contenders, "DeepSpeed / weft", "leased", title=f"{group.size} ranks")
    for nbytes in map(int, given.size.split(",")):
        with group.lease(nbytes) as memory:
            tensors = {name: torch.empty(nbytes // 4) for name in contenders}
            tensors["weft, leased"] = memory.view(torch.float32)
            for name, call in contenders.items():
                tensors[name].fill_(group.rank + 1)
                call(tensors[name])
                assert bool((tensors[name] == sum(range(1, group.size + 1))).all()), name
                tensors[name].zero_()
            timed = turns(
                group,
                given.rounds,
                {name: lambda c=call, t=tensors[name]: c(t) for name, call in contenders.items()},
                calls=max(1, min(MOST, int(SECONDS * LIKELY / (nbytes + 100_000)))),
            )
        us = {name: statistics.median(each) * 1e6 for name, each in timed.items()}
        ratios = (us["DeepSpeed"] / us[name] for name in ("weft", "weft, leased"))
        row = (f"{each:,.0f}" for each in us.values())
        table.add_row(f"{nbytes:,d}", *row, *(f"{each:.2f}" for each in ratios))
    if group.rank == 0:
        Console(width=110).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
