"""torchrun --standalone --nproc-per-node 3 uneven_shards.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
lengths = [2 * owner + 1 for owner in range(size)]  # how much each rank owns
shard = torch.full((lengths[rank],), float(rank))

whole = torch.empty(sum(lengths))  # all_gather: everybody gets the same of me
dist.all_to_all_single(whole, shard.repeat(size), lengths, [lengths[rank]] * size)

parts = torch.empty(size, lengths[rank])  # reduce_scatter: I get my part of everybody
dist.all_to_all_single(parts.view(-1), whole, [lengths[rank]] * size, lengths)
mine = parts.sum(0)

assert torch.equal(whole, torch.cat([torch.full((n,), float(r)) for r, n in enumerate(lengths)]))
assert torch.equal(mine, size * shard)
print(f"rank {rank}: gathered {whole.numel()}, summed {mine.numel()}")

dist.destroy_process_group()  # or its threads may abort the process as Python ends
