"""Time sparse all-reduces as on an accelerator, beside what a user would call instead; and kernels.

    python benchmarks/device.py                                  # 4 ranks on the CPU, over gloo
    python benchmarks/device.py --rounds 0 --kernels cuda        # the kernels on a GPU

Calls: CPU tensors are treated as if they were on an accelerator (`as_device`). Then
the kernels are torch's operations, and exchanges use the process group. `weft bench` times that
beside `torch.distributed.all_reduce` and the padded all-gather of Horovod and DeepSpeed, and checks
all results. So all contenders use gloo and torch's operations, as on GPUs all use NCCL and torch's
operations. *xbound* is the number of bytes sent over that which the average rank must receive.

Kernels: what a rank does to its own rows (`distinct`, `reduce`), and what the owner of an index
range does to the rows of 4 ranks (`merge`), each beside `coalesce()` of the same rows. *peak* is
the most GPU memory that they use beside their input, over the bytes of the input's values.

The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from kernels import CASES as OF_KERNELS
from kernels import SUM, Case, coalesce, least
from weft import kernels
from weft.base.devices import as_device
from weft.cli.bench.cases import CASES
from weft.cli.bench.measure import Job, run
from weft.cli.bench.results import Shown
from weft.testing import launch, send

RUNS = 4  # that an owner merges
REPEAT = 20  # of a kernel; the least counts


def rank(job: Job) -> bool:
    """One rank's program."""
    with as_device():
        return run(job, send)


def calls(cases: list[str], algorithms: list[str], ranks: int, rounds: int) -> bool:
    """Print the table of calls; whether all results were right."""
    some = tuple(CASES[name] for name in cases)
    job = Job(some, tuple(algorithms), ("torch", "horovod"), rounds)
    with Shown(Console(highlight=False, width=200), job.peers, False, None) as shown:
        return all(launch(ranks, rank, (job,), on_message=lambda rank, found: shown.show(found)))


def of_kernels(case: Case, device: torch.device) -> None:
    """Print what the kernels take in a case, beside `coalesce()`."""
    ids = [case.indices(seed) for seed in range(RUNS)]
    own = torch.cat([ids[0], ids[0][: case.rows // 2]]).to(device)  # some of them twice
    runs = [each.unique().to(device) for each in ids]
    values, *rows = (case.values(len(each)).to(device) for each in (own, *runs))

    def reduced() -> tuple[Tensor, Tensor]:
        (found,) = kernels.survey([own], 64, 256)
        return found.distinct.indices, kernels.reduce(values, found.distinct, SUM)

    def merged() -> tuple[Tensor, Tensor]:
        return kernels.merge([*zip(runs, rows, strict=True)], SUM)

    beside(f"{case.name}: own rows", case.height, reduced, own, values)
    beside(f"{case.name}: {RUNS} runs", case.height, merged, torch.cat(runs), torch.cat(rows))


def beside(
    what: str, height: int, ours: Callable[[], tuple[Tensor, Tensor]], ids: Tensor, values: Tensor
) -> None:
    """Compare results and times with those of `coalesce()` of these rows."""
    gpu = torch.cuda if values.is_cuda else None

    def theirs() -> Tensor:
        return coalesce(ids, values, height)

    def through(job: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            job()
            if gpu:
                gpu.synchronize()

        return timed

    expected, found = theirs(), ours()
    assert torch.equal(expected.indices()[0], found[0].long()), what
    assert torch.equal(expected.values(), found[1]), what
    del expected, found
    peak = ""
    if gpu:
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        through(ours)()
        peak = f"{(gpu.max_memory_allocated() - before) / values.nbytes:8.2f}"
    times = least({"ours": through(ours), "theirs": through(theirs)}, REPEAT)
    mine, other = times["ours"], times["theirs"]
    print(f"{what:24} {mine:10.3f} {other:10.3f} {other / mine:10.2f} {peak}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="uniform,zipf,identical,wide")
    parser.add_argument("--algorithm", default="auto", help="several, divided by commas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each; 0: none")
    there = "cuda" if torch.cuda.is_available() else None
    parser.add_argument("--kernels", default=there, help="time the kernels, too, on this device")
    given = parser.parse_args()
    right = True
    if given.rounds:
        asked = given.case.split(","), given.algorithm.split(",")
        right = calls(*asked, given.ranks, given.rounds)
    if given.kernels:
        print(f"{'kernels, ms':24} {'weft':>10} {'coalesce':>10} {'coalesce/x':>10}     peak")
        with as_device():
            for case in OF_KERNELS:
                if case.name in ("uniform", "zipf", "scalar"):
                    of_kernels(case, torch.device(given.kernels))
    return not right


if __name__ == "__main__":
    sys.exit(main())
