"""One process and one device: what there is, whether nothing waits but reads, and what things cost.

alone.py env | waits | time
"""

import functools
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist

import weft
from weft.kernels.kinds import Kinds

CPU = os.environ.get("WEFT_GPU_CHECK", "cpu") == "cpu"
DEVICE = torch.device("cpu") if CPU else torch.device("cuda", 0)
CASES = {"50 x 64": (50, 64), "5,000 x 64": (5000, 64), "50,000 x 64": (50_000, 64)}


def show(*words):
    print(">", *words, flush=True)


def microseconds(body, turns=200):
    """What a turn costs: of the host, and until the device is through."""
    for _ in range(20):
        body()
    wait()
    began = time.perf_counter()
    for _ in range(turns):
        body()
    asked = time.perf_counter()
    wait()
    ended = time.perf_counter()
    return [1e6 * (each - began) / turns for each in (asked, ended)]


def wait():
    if not CPU:
        torch.cuda.synchronize()


def rows_of(count, width):
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(1_000_000, (count,), generator=draw)
    return weft.Rows(
        indices.to(DEVICE), torch.randn(count, width, generator=draw).to(DEVICE), 1_000_000
    )


def env(group):
    """The machine, and what the host pays for each thing that a call asks it for."""
    name = "the CPU" if CPU else torch.cuda.get_device_name(DEVICE)
    show(name, "torch", torch.__version__, "backends", dist.get_backend_config())
    if not CPU:
        show("NCCL", torch.cuda.nccl.version(), "CUDA", torch.version.cuda)
    x, y = torch.ones(100, device=DEVICE), torch.ones(100, dtype=torch.int64, device=DEVICE)
    for what, body in {
        "an operation": lambda: x + 1,
        "a view": lambda: x[1:],
        "a read of 4 numbers": lambda: y[:4].tolist(),
        "a barrier of one rank": lambda: weft.barrier(),
    }.items():
        show(f"{what}: {microseconds(body)[0]:.1f} us of the host")


def waits(group):
    """Everything but reads goes on without waiting for the device: torch says which line does."""
    rows = rows_of(5000, 16)
    calls = {
        "sum": lambda: weft.sparse_all_reduce(rows),
        "min": lambda: weft.sparse_all_reduce(rows, "min"),
        "list": lambda: weft.sparse_all_reduce([rows, rows]),
        "all_gather": lambda: weft.sparse_all_gather(rows),
        "all_reduce": lambda: weft.all_reduce(rows.values),
        "all_to_all": lambda: weft.all_to_all([rows.values]),
        "exchange": lambda: weft.exchange(rows.values, [rows.indices % 5000]),
    }
    for call in calls.values():
        call()
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not CPU:
                torch.cuda.set_sync_debug_mode("warn")
            call()
            if not CPU:
                torch.cuda.set_sync_debug_mode("default")
        places = {f"{os.path.basename(each.filename)}:{each.lineno}" for each in caught}
        show(f"{name}: {len(caught)} waits, in", ", ".join(sorted(places)) or "nothing")


def coalesced(coo):
    return coo.clone().coalesce()


def costs(group):
    """A sum of one rank, and what it is made of, beside `coalesce()` of the same rows."""
    for name, (count, width) in CASES.items():
        rows = rows_of(count, width)
        parts = {
            "weft": functools.partial(weft.sparse_all_reduce, rows),
            "coalesce": functools.partial(coalesced, rows.to_coo()),
            "sort and kinds": functools.partial(Kinds.of, rows.indices),
        }
        found = {part: microseconds(body, 20) for part, body in parts.items()}
        said = ", ".join(f"{part} {host:.0f} / {all_:.0f}" for part, (host, all_) in found.items())
        show(f"{name}: us of the host / in all: {said}")


if __name__ == "__main__":
    if not CPU:
        torch.cuda.set_device(DEVICE)
    with weft.init(wire="group" if CPU else None) as one:
        {"env": env, "waits": waits, "time": costs}[sys.argv[1]](one)
