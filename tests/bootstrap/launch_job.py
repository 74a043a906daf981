"""The program of each process in test_launch.py: starts weft, and says what it sees."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import weft

LATER_GROUPS = "TEST_LATER_GROUPS"  # where the program has groups of its own listen


def main(folder, *rendezvous):
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    failed = Path(folder) / "failed"  # not torchrun's count of restarts: hosts may differ in it
    if "TORCHELASTIC_RUN_ID" in os.environ and not failed.exists():
        with weft.init(timeout=60) as group:
            if group.rank == 1:
                failed.touch()
                sys.exit("this attempt fails, after all have met")
            group.all_gather_bytes(b"here", bytes)
    for url in rendezvous or (None,):
        with weft.init(rendezvous=None if url == "-" else url, timeout=60) as group:
            mine = torch.tensor([group.rank, 5]), torch.ones(2)
            indices, _ = weft.sparse_all_reduce(mine)
            untouched = "GLOO_SOCKET_IFNAME" not in os.environ
            if LATER_GROUPS in os.environ:
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ[LATER_GROUPS]
            other = dist.new_group()
            ones = torch.ones(1)
            dist.all_reduce(ones, group=other)
            found = f"rank {group.rank} of {group.size} {indices.tolist()} {ones.item()}"
            sys.stdout.write(f"{found} {untouched}\n")
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


if __name__ == "__main__":
    main(*sys.argv[1:])
