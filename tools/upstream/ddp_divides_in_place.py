"""Show that DistributedDataParallel divides a sparse gradient in memory that others read.

    torchrun --standalone --nproc-per-node 2 ddp_divides_in_place.py

What happens, and the mend, is in ddp_divides_in_place.md.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """A sum of rows and of what a layer gives."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = own
        self.line = nn.Linear(2, 2)
        self.table = nn.Embedding(9, 2, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.line(torch.ones(3, 2))
        rows = self.table(index)  # looked up last, so that backward comes to it first
        return (hidden + (rows * 1 if self.own else rows)).square().sum()


def main() -> None:
    dist.init_process_group("gloo")
    index = torch.tensor([1, 5, 2 + dist.get_rank()])
    for own in (False, True):
        alone = Model(own)
        model = DistributedDataParallel(Model(own))
        alone(index).backward()
        model(index).backward()
        mean = alone.line.weight.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        part = (model.module.line.weight.grad / mean).mean().item()
        if dist.get_rank() == 0:
            print(
                f"a {'gradient of its own' if own else 'shared gradient'}: {part:.1f} of the mean"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
