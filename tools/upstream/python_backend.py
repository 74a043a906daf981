"""torch 2.15, torch alone: works of a `c10d::Backend` that is written in Python only wait.

`PyBackend` puts each work into a `PyWorkHolder`, which passes on `wait` and `getFuture` alone. So
the caller is told that a work which has ended has not, and `recv` from any rank fails, since it
asks for the source. Mend: `PyWorkHolder` passes on `isCompleted`, `exception`, `result` and
`sourceRank`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend


class Ended(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def source_rank(self) -> int:
        return 0


class Plain(Backend):
    def getBackendName(self) -> str:
        return "plain"

    def allreduce(self, tensors: Any, options: Any) -> dist.Work:
        return Ended()

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        return Ended()


if __name__ == "__main__":
    dist.Backend.register_backend(
        "plain", lambda store, rank, size, timeout: Plain(rank, size), devices=["cpu"]
    )
    dist.init_process_group("cpu:plain", store=dist.HashStore(), rank=0, world_size=1)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    print("is_completed after wait:", work.is_completed())  # False
    try:
        dist.recv(torch.ones(1))
    except RuntimeError as error:
        print("recv from any rank:", error)
