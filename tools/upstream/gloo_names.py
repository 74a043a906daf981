"""Two threads of one gloo group corrupt memory: python gloo_names.py [threads of the group]"""

import sys
import time

import torch
import torch.distributed as dist

options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_default_device()]
options._threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2  # torch's default
group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
pairs = [(torch.ones(4), torch.eye(4).to_sparse()) for _ in range(16)]
end = time.monotonic() + 20.0
operations = 0
while time.monotonic() < end:
    works = [group.allreduce([tensor]) for pair in pairs for tensor in pair]
    for work in works:
        work.wait()
    operations += len(works)
print(f"torch {torch.__version__}: no crash in {operations} operations")
