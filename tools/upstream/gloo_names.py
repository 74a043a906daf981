"""Show that two threads of one ProcessGroupGloo corrupt memory: torch alone, one process, seconds.

    python gloo_names.py [seconds] [threads of the group]

With two threads, which is torch's default, the process dies, as a rule within ten seconds
("unaligned tcache chunk detected", "double free", a segmentation fault). With one it does not.
What happens, and the mend, is in gloo_names.md.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

AT_ONCE = 16  # of each kind


def main(seconds: float = 20.0, threads: int = 2) -> None:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = threads
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)

    dense = [torch.ones(4) for _ in range(AT_ONCE)]
    sparse = [torch.eye(4).to_sparse() for _ in range(AT_ONCE)]
    end = time.monotonic() + seconds
    operations = 0
    while time.monotonic() < end:
        works = []
        for one, other in zip(dense, sparse, strict=True):
            works.append(group.allreduce([one]))
            works.append(group.allreduce([other]))
        for work in works:
            work.wait()
        operations += len(works)
    print(f"torch {torch.__version__}, {threads} threads: no crash in {operations} operations")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]))
