"""Time a large dense model under DistributedDataParallel, with weft's hook and without.

    tools/netlab -n 4 --rate 1gbit -- python benchmarks/ddp.py
    python benchmarks/ddp.py [--ranks 4] [--rounds 6] [--layers 6] [--width 2048]

All contenders train the same perceptron (25 million parameters) from the same weights on the same
batches, on a gloo group, and take turns in one run. They are: DistributedDataParallel without a
hook; with a hook that does what PyTorch's `bf16_compress_hook` does (which itself refuses gloo);
with `weft.ddp.register`; and with `weft.ddp.register(wire_dtype=torch.bfloat16)`.

The gradients are checked first. Those in float32 are compared with the mean in float64, rounded
ones with the error bound in docs/wire-dtype.md, and all ranks must have the same bits. `off` is the
largest error of an element, divided by the mean magnitude of the ranks' values for it. Times are of
a step (forward and backward): medians of the slowest rank, and the fastest and the slowest step.
"""

# No postponed annotations here: DistributedDataParallel compares those of the hook with types.

import argparse
import copy
import functools
import os
import statistics
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import weft
from turns import on_ranks, turns
from weft.group.group import Group

BATCH = 4  # small: what is measured is not arithmetic
UNIT = 2.0**-8  # unit roundoff of bfloat16
Rows = list[list[str]]


def compressed(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook that PyTorch has for NCCL: rounded, divided, then summed as bfloat16."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    done = dist.all_reduce(narrow, async_op=True).get_future()
    return done.then(lambda _: bucket.buffer().copy_(narrow))


REGISTER: dict[str, Callable[[DistributedDataParallel], object]] = {
    "DistributedDataParallel (gloo)": lambda model: None,
    "the same, rounded to bfloat16": lambda model: model.register_comm_hook(None, compressed),
    "weft.ddp.register": weft.ddp.register,
    "the same, wire_dtype=torch.bfloat16": functools.partial(
        weft.ddp.register, wire_dtype=torch.bfloat16
    ),
}


def perceptron(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU()))
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def far(found: Tensor, own: Tensor, bound: float) -> float:
    """How far gradients are off the mean of all ranks', as a share of its magnitude; checked."""
    mean, most = own.double().div_(dist.get_world_size()), own.double().abs_()
    dist.all_reduce(mean)
    dist.all_reduce(most.div_(dist.get_world_size()))
    off = found.double().sub_(mean).abs_()
    assert off.le(bound * (1 + UNIT) * most + bound * mean.abs_() + 1e-12).all(), bound
    same = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(same, found)
    assert all(torch.equal(each, found) for each in same)
    return float(off.div_(most.clamp_(min=1e-12)).max())


def measure(group: Group, rounds: int, layers: int, width: int) -> Rows:
    model = perceptron(layers, width)
    batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(group.rank))

    def step(wrapped: nn.Module) -> None:
        wrapped.zero_grad()
        wrapped(batch).square().sum().backward()

    step(model)
    own = flat(model)
    models: dict[str, DistributedDataParallel] = {}
    offs: dict[str, float] = {}
    for name, register in REGISTER.items():
        models[name] = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
        register(models[name])
        step(models[name])
        rounded = name.startswith("the same")
        # what gloo's hook does is rounded once more for each rank that is added
        bound = UNIT * (1 if "wire_dtype" in name else group.size) if rounded else 2.0**-22
        offs[name] = far(flat(models[name]), own, bound)
    times = turns(
        group, rounds, {name: functools.partial(step, each) for name, each in models.items()}
    )
    medians = {name: statistics.median(each) for name, each in times.items()}
    first = next(iter(medians.values()))
    return [
        [
            name,
            f"{medians[name] * 1e3:.0f}",
            f"{min(each) * 1e3:.0f}-{max(each) * 1e3:.0f}",
            f"{first / medians[name]:.2f}",
            f"{offs[name]:.1e}",
        ]
        for name, each in times.items()
    ]


def rank(arguments: argparse.Namespace) -> Rows:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    with weft.init() as group:
        rows = measure(group, arguments.rounds, arguments.layers, arguments.width)
    dist.destroy_process_group()
    return rows


def show(rows: Rows, ranks: int) -> None:
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{ranks} ranks, load {load}")
    for way, *cells in [["way", "ms", "range", "times as fast", "off"], *rows]:
        print(f"{way:38}" + "".join(f"{cell:>15}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    on_ranks(rank, parser.parse_args(), show)


if __name__ == "__main__":
    main()
