"""Train a network by DistributedDataParallel, FSDP2 and DTensor, over the backend that is named.

    torchrun --nproc-per-node 4 train.py cpu:weft

Each must have the losses of one process that has all the data, to rounding.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import weft  # noqa: F401  # registers the backend

STEPS = 40
BATCH = 64  # of all ranks together


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step % 4)  # the same batches again and again
    given = torch.randn(BATCH, 16, generator=draw)
    return given, given[:, :4] * given[:, 4:8]


def losses(model: nn.Module, rank: int = 0, ranks: int = 1) -> Tensor:
    """The loss of each step, of this rank's part of the batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    found = []
    for step in range(STEPS):
        given, wanted = (each.chunk(ranks)[rank] for each in batch(step))
        loss = nn.functional.mse_loss(model(given), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def main(backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    found = {
        "DistributedDataParallel": losses(DistributedDataParallel(network()), rank, ranks),
        "FSDP2": losses(fully_shard(network(), mesh=mesh), rank, ranks),
        "DTensor": losses(parallelize_module(network(), mesh, layers)),  # all have all the data
    }
    wanted = losses(network())
    for way, own in found.items():
        dist.all_reduce(own)
        own /= ranks
        apart = float((own - wanted).abs().max())
        if rank == 0:
            first, last = own[0].item(), own[-1].item()
            print(
                f"{way:>23}: loss {first:.4f} -> {last:.4f}, {apart:.1e} from those of one process"
            )
        if not apart < 1e-5:
            raise SystemExit(f"FAILED: rank {rank}: the losses of {way} differ by {apart:g}")
    dist.destroy_process_group()
    if rank == 0:
        print(f"PASSED over {backend}")


if __name__ == "__main__":
    main(*sys.argv[1:])
