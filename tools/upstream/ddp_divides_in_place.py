"""torchrun --standalone --nproc-per-node 2 ddp_divides_in_place.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.ModuleList):
    def forward(self, index: torch.Tensor, factor: int | None) -> torch.Tensor:
        hidden, rows = self[0](torch.ones(3, 2)), self[1](index)
        return (hidden + (rows if factor is None else rows * factor)).square().sum()


dist.init_process_group("gloo")
index = torch.tensor([1, 5, 2 + dist.get_rank()])
for factor in (None, 1):
    model = Model([torch.nn.Linear(2, 2), torch.nn.Embedding(9, 2, sparse=True)])
    parallel = DistributedDataParallel(model)
    (mean,) = torch.autograd.grad(model(index, factor), model[0].weight)
    dist.all_reduce(mean)
    parallel(index, factor).backward()
    part = (model[0].weight.grad * dist.get_world_size() / mean).mean()
    print(f"{'a gradient of its own' if factor else 'a shared gradient'}: {part:.1f} of the mean")

dist.destroy_process_group()  # or its threads may abort the process as Python ends
