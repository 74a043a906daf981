"""Train a table of 20 GiB over all ranks, on a machine that need not have this memory.

The memory of the table is mapped, but not filled: the system takes a page when a row in it is first
written. So the bytes that a step sends and the time that it takes are measured at the true size.
The memory that the whole table would need is computed.
"""

from __future__ import annotations

import argparse
import mmap
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import weft

DIM = 64
BAG = 8  # rows that are added


def batch(rows: int, bags: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Bags whose rows are Zipf-distributed and anywhere in the table, and a label for each."""
    random = torch.Generator().manual_seed(step << 16 | rank)
    draws = torch.rand(bags, BAG, generator=random, dtype=torch.float64)
    common = torch.pow(float(rows), draws).long() - 1  # the k-th of them is drawn about as 1/k
    return common * 2_654_435_761 % rows, (common[:, 0] % 2).float()


def train(group: weft.Group, rows: int, bags: int, steps: int) -> dict[str, Any]:
    """Train; return this rank's losses, and bytes and time of a step.

    Returns:
        "losses": of each step; "shard": bytes of this rank's rows; "sent", "computed": bytes that a
        rank sends in a step, measured and computed; "resident": bytes of memory of a rank; "ms":
        milliseconds of a step.
    """
    table = weft.nn.ShardedEmbeddingBag(rows, DIM, mode="sum", dtype=torch.bfloat16, device="meta")
    pages = mmap.mmap(-1, table.weight.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # of zeros
    rows_here = torch.frombuffer(pages, dtype=torch.bfloat16).view(-1, DIM)
    table.weight = torch.nn.Parameter(rows_here)
    update = torch.optim.SGD(table.parameters(), lr=0.1)
    losses, needed, height = [], 0, -(-rows // group.size)
    for step in range(-2, steps):  # two to warm up
        weft.barrier()
        if step == 0:
            began, before = time.perf_counter(), group.traffic.bytes
        ids, labels = batch(rows, bags, group.rank, step + 2)
        scores = table(ids).sum(1, dtype=torch.float32)
        loss = functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / bags
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
        if step >= 0:
            owners = torch.bincount(ids.unique() // height, minlength=group.size)
            needed += int(owners.sum() - owners[group.rank])
    seconds, sent = time.perf_counter() - began, group.traffic.bytes - before
    wanted = int(weft.all_reduce(torch.tensor(needed)))  # each of them: an index, a row, a gradient
    sums = weft.all_reduce(torch.tensor([sent, resident()]))
    return {
        "losses": losses,
        "shard": table.weight.nbytes,
        "sent": int(sums[0]) / group.size / steps,
        "computed": wanted * (4 + 2 * 2 * DIM) / group.size / steps,
        "resident": int(sums[1]) / group.size,
        "ms": seconds / steps * 1000,
    }


def resident() -> int:
    """Resident bytes of this process's own memory (Linux)."""
    with open("/proc/self/status") as lines:
        found = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(found["RssAnon"].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description="a table that is larger than the machine's memory")
    parser.add_argument("--gib", type=float, default=20, help="of the whole table")
    parser.add_argument("--bags", type=int, default=1024, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = int(options.gib * 2**30) // (2 * DIM)
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:
        found = train(group, rows, options.bags, options.steps)
        if group.rank == 0:
            mib = {name: found[name] / 2**20 for name in ("shard", "sent", "computed", "resident")}
            print(
                f"{rows:,} rows of {DIM} in bfloat16, {group.size} ranks: a shard of "
                f"{mib['shard']:,.0f} MiB, {mib['resident']:,.0f} MiB resident a rank; "
                f"{mib['sent']:.2f} MiB sent a step and rank, of which rows and indices are "
                f"{mib['computed']:.2f}, in {found['ms']:.1f} ms; "
                f"loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}"
            )


if __name__ == "__main__":
    main()
