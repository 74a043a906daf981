"""Train a model whose dense part is FSDP2's, and whose embedding table is weft's, in two ways.

FSDP2 (`fully_shard`) cannot reduce sparse gradients, so the table is not one of its parameters:

* cut: the table is a `weft.nn.ShardedEmbeddingBag`; each of its rows is on one rank;
* replicated: every rank has the whole table, and `weft.sync_grads` averages its sparse gradients.

Both must have the losses of one process, to rounding. The first also writes a checkpoint in the
middle of the training. Half of the ranks load it and continue, and must have the same losses.

The model predicts the next word of Python's own source (of the package `email`) from the eight
words before it.
"""

from __future__ import annotations

import email
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import weft

STEPS = 30
SAVED = 15  # the step before which a checkpoint is written
BATCH = 512  # of all ranks together
WORDS = 64  # that are told apart: all others are the last of these


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
    """The model, cut over the ranks of a mesh, or whole; and its optimizers."""

    def __init__(self, words: int, way: str, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        table = nn.EmbeddingBag(words, 32, mode="mean", sparse=True)
        dense = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WORDS)
        self.model = nn.Sequential(table, *dense)
        if way == "cut":
            weft.nn.shard_embeddings(self.model, min_rows=1, group=mesh)
        self.table, self.way, self.mesh = self.model[0], way, mesh
        if mesh is not None:
            fully_shard(self.model, mesh=mesh, ignored_params={self.table.weight})
        self.optimizer = torch.optim.Adagrad(
            self.model.parameters(), lr=0.1, initial_accumulator_value=1e-6
        )

    def train(self, tokens: Tensor, first: int, end: int) -> Tensor:
        """Train steps `first` up to `end`; return their losses, averaged over the ranks."""
        rank, ranks = (0, 1) if self.mesh is None else (self.mesh.get_rank(), self.mesh.size())
        losses = []
        for step in range(first, end):
            words, following = batch(tokens, step, rank, ranks)
            loss = functional.cross_entropy(self.model(words), following)
            self.optimizer.zero_grad()
            loss.backward()
            if self.way == "replicated" and ranks > 1:
                weft.sync_grads(self.table, group=self.mesh)
            self.optimizer.step()
            losses.append(loss.detach())
        found = torch.stack(losses)
        return weft.all_reduce(found, "avg", group=self.mesh) if ranks > 1 else found


def compare(group: weft.Group, folder: Path) -> None:
    tokens = text()
    words = int(tokens.max()) + 1
    world = DeviceMesh("cpu", list(range(group.size)))
    half = DeviceMesh("cpu", list(range(max(1, group.size // 2))))
    want = Training(words, "whole", None).train(tokens, 0, STEPS)

    cut = Training(words, "cut", world)
    before = cut.train(tokens, 0, SAVED)
    dcp.save(weft.nn.sharded_state(cut.model, cut.optimizer), checkpoint_id=folder)
    found = {"cut": torch.cat([before, cut.train(tokens, SAVED, STEPS)])}
    found["replicated"] = Training(words, "replicated", world).train(tokens, 0, STEPS)
    if half.get_coordinate() is not None:
        fewer = Training(words, "cut", half)
        state = weft.nn.sharded_state(fewer.model, fewer.optimizer)
        dcp.load(state, checkpoint_id=folder, process_group=half.get_group())
        weft.nn.load_sharded_state(fewer.model, fewer.optimizer, state)
        found["resumed"] = torch.cat([before, fewer.train(tokens, SAVED, STEPS)])

    for way, losses in found.items():
        apart = float((losses - want).abs().max())
        if group.rank == 0:
            ranks = half.size() if way == "resumed" else group.size
            print(
                f"{way:>10}: {ranks} ranks, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
                f"{apart:.1e} from those of one process"
            )
        if not apart < 1e-5:
            raise SystemExit(f"FAILED: rank {group.rank}: the losses of {way} differ by {apart:g}")


def main() -> None:
    torch.set_num_threads(1)
    with torch.sparse.check_sparse_tensor_invariants(False), weft.init() as group:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        compare(group, Path(folder[0]))
        weft.barrier()
        if group.rank == 0:
            shutil.rmtree(folder[0])
            print("PASSED")


if __name__ == "__main__":
    main()
