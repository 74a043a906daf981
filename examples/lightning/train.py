"""Train a model with a sparse table by Lightning over weft, on two processes.

The model predicts the next word of a text from the mean of the eight words before it. The gradients
of its table are sparse; all gradients are clipped. The trained weights are compared with those of
one process that has all the data, dense gradients and no weft.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import weft

RANKS, STEPS, BATCH, BEFORE, DIM = 2, 40, 64, 8, 32
RATE, MOST = 1.0, 0.25  # of learning; norm of the gradients


class NextWord(pl.LightningModule):
    def __init__(self, words: int, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(words, DIM, sparse=sparse)
        self.out = nn.Linear(DIM, words)
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], _: int = 0) -> Tensor:
        before, word = batch
        return functional.cross_entropy(self.out(self.table(before)), word)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(weft.clip_grad_norm_(self.parameters(), inf)))  # before it clips


def in_one_process(text: TensorDataset, words: int) -> NextWord:
    model = NextWord(words, sparse=False)
    update = model.configure_optimizers()
    order = DistributedSampler(text, num_replicas=1, rank=0)  # Lightning's
    for batch in DataLoader(text, BATCH * RANKS, sampler=order):  # the batches of all ranks
        update.zero_grad()
        model.training_step(batch).backward()
        clip_grad_norm_(model.parameters(), MOST)
        update.step()
    return model


def read_words() -> Tensor:
    """The words of a package of Python's as numbers; the most frequent word is 0."""
    files = sorted(Path(asyncio.__file__).parent.rglob("*.py"))
    lines = " ".join(file.read_text(encoding="utf-8").lower() for file in files)
    words = re.findall(r"\b[^\W\d]\w*", lines)
    number = {word: place for place, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([number[word] for word in words])


def main() -> None:
    tokens = read_words()
    words = int(tokens.max()) + 1
    windows = tokens.unfold(0, BEFORE + 1, 1)
    windows = windows[: STEPS * BATCH * RANKS]
    text = TensorDataset(windows[:, :-1], windows[:, -1])

    model, strategy = NextWord(words), weft.trainers.lightning()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=MOST,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(text, BATCH))  # each rank gets other batches

    other = in_one_process(text, words)
    ours, its = (parameters_to_vector(each.parameters()).detach() for each in (model, other))
    apart = strategy.reduce((ours - its).abs().max(), reduce_op="max")
    clipped = sum(norm > MOST for norm in model.norms)
    calls = len(strategy.weft_state.calls)
    if trainer.is_global_zero:
        print(
            f"{trainer.world_size} ranks, {calls} sparse sums, clipped in {clipped} of "
            f"{len(model.norms)} steps; weights within {apart:.1e} of one process"
        )
        if not (apart < 1e-5 and calls == STEPS and clipped):
            raise SystemExit("FAILED")
        print("PASSED")


if __name__ == "__main__":
    main()
