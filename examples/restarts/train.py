"""A rank dies, torchrun restarts all ranks, and training continues from a checkpoint.

In the first attempt one rank kills itself. The others raise weft's `WireError`, which names that
rank, and end. torchrun restarts the job. At the end the program trains again without a fault: all
losses must be equal, bit for bit.

The model predicts the next word of Python's own source (of the package `email`) from the eight
words before it. Its table is cut over the ranks. Its dense part is in DistributedDataParallel, with
compressed gradients (`weft.ddp.TopK`). So a checkpoint has

* the model, which is the same on all ranks, but for the table, of which each rank writes its rows;
* the state of the optimizer, likewise;
* the residuals of each rank, in a file for each rank.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import weft

STEPS = 30
SAVED = 10  # steps from one checkpoint to the next
BATCH = 512  # of all ranks together
WORDS = 64  # that are told apart: all others are the last of these
DIES, AT = 1, 17  # which rank, and in which step
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def text() -> Tensor:
    """The words of a package of Python's as numbers; the most frequent word is 0."""
    files = sorted(Path(email.__file__).parent.rglob("*.py"))
    lines = " ".join(file.read_text(encoding="utf-8").lower() for file in files)
    words = re.findall(r"\b[^\W\d]\w*", lines)
    number = {word: place for place, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([number[word] for word in words])


def batch(tokens: Tensor, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """A rank's part of a step's batch: eight words `[n, 8]`, and the one after them `[n]`."""
    draw = torch.Generator().manual_seed(step)
    at = torch.randint(8, len(tokens), (BATCH,), generator=draw).chunk(ranks)[rank]
    return tokens[at[:, None] - torch.arange(1, 9)], tokens[at].clamp(max=WORDS - 1)


class Training:
    """The model, its optimizer, and the number of steps done."""

    def __init__(self, words: int) -> None:
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(words, 32, mode="mean", sparse=True)
        dense = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WORDS)
        self.model = weft.nn.shard_embeddings(nn.Sequential(self.table, *dense), min_rows=1)
        self.table = self.model[0]
        self.wrapped = DistributedDataParallel(self.model)
        self.unsent = weft.ddp.TopK(density=0.05, min_numel=1024)
        self.wrapped.register_comm_hook(self.unsent, weft.ddp.topk_hook)
        self.optimizer = torch.optim.Adagrad(
            self.model.parameters(), lr=0.1, initial_accumulator_value=1e-6
        )
        self.losses = torch.zeros(STEPS)
        self.step = torch.zeros((), dtype=torch.int64)

    def state(self) -> dict[str, Any]:
        """What `torch.distributed.checkpoint` writes, and fills in place."""
        state = weft.nn.sharded_state(self.model, self.optimizer)
        return state | {"losses": self.losses, "step": self.step}

    def save(self, folder: Path, group: weft.Group) -> None:
        begun = folder / "begun"
        dcp.save(self.state(), checkpoint_id=begun)
        torch.save(self.unsent.state_dict(self.model), begun / f"unsent-{group.rank}.pt")
        weft.barrier()  # all have written
        if group.rank == 0:
            begun.rename(folder / f"step-{self.step:06d}")
        weft.barrier()

    def load(self, folder: Path, group: weft.Group) -> None:
        last = max(folder.glob("step-*"))
        state = self.state()
        dcp.load(state, checkpoint_id=last)
        weft.nn.load_sharded_state(self.model, self.optimizer, state)
        unsent = torch.load(last / f"unsent-{group.rank}.pt")
        self.unsent.load_state_dict(unsent, self.model)


def train(group: weft.Group, tokens: Tensor, folder: Path | None) -> Training:
    """Train all steps; return the training, which has their losses.

    With a folder it continues from the last checkpoint there; the first attempt has the fault.
    """
    job = Training(int(tokens.max()) + 1)
    if folder is not None and ATTEMPT > 0:
        job.load(folder, group)
        print(f"rank {group.rank}: attempt {ATTEMPT} goes on at step {job.step}", flush=True)
    while job.step < STEPS:
        if folder is not None and (ATTEMPT, group.rank, int(job.step)) == (0, DIES, AT):
            os.kill(os.getpid(), signal.SIGKILL)
        words, following = batch(tokens, int(job.step), group.rank, group.size)
        loss = functional.cross_entropy(job.wrapped(words), following)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.losses[job.step] = weft.all_reduce(loss.detach(), "avg")
        job.step += 1
        if folder is not None and job.step % SAVED == 0:
            job.save(folder, group)
    return job


def main() -> None:
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) < 1:
        raise SystemExit("start this by torchrun with --max-restarts 1, and 2 ranks or more")
    torch.set_num_threads(1)
    # the same in each attempt of one torchrun, on one host
    folder = Path(tempfile.gettempdir()) / f"weft-restarts-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    # torchrun sends this to all when one has died; here, to check what weft tells them, they
    # come to an end by themselves
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:
        tokens = text()
        try:
            found = train(group, tokens, folder).losses
        except weft.WireError as error:
            (folder / f"told-{group.rank}").write_text(f"{error.culprit} {error}")
            raise
        told = {path.name: path.read_text() for path in folder.glob("told-*")}
        want = train(group, tokens, None).losses
        if group.rank == 0:
            shutil.rmtree(folder)
            for name, line in sorted(told.items()):
                print(f"{name}: {line}")
            print(f"loss {found[0]:.4f} -> {found[-1]:.4f}; without a fault {want[-1]:.4f}")
        named = [line.split()[0] for line in told.values()]
        if ATTEMPT != 1 or named != [str(DIES)] * (group.size - 1) or not torch.equal(found, want):
            raise SystemExit(f"FAILED: rank {group.rank}")
        weft.barrier()
        if group.rank == 0:
            print("PASSED")


if __name__ == "__main__":
    main()
