"""torchrun --standalone --nproc-per-node 2 sparse_all_reduce.py; on GPUs, where there are some"""

import os

import torch
from torch.nn.parallel import DistributedDataParallel

import weft

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
with weft.init() as group:
    model = DistributedDataParallel(torch.nn.Embedding(1000, 8, sparse=True, device=device))
    weft.ddp.register(model)
    model(torch.tensor([7, 7, 100 + group.rank], device=device)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.indices().tolist() == [[7, *(100 + rank for rank in range(group.size))]]
    assert gradient.values()[:, 0].tolist() == [2.0] + [1.0 / group.size] * group.size
    print(f"rank {group.rank}: the mean of {gradient.values().shape[0]} rows, on {device.type}")
if torch.cuda.is_available():
    torch.distributed.destroy_process_group()
