"""Train a model with a sparse table under Accelerate over weft, on any number of processes.

The model predicts the next word of a text from the mean of the eight words before it. The gradients
of its table are sparse; all gradients are clipped. The trained weights are compared with those of
one process that has all the data, dense gradients and no weft.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.cli.demo.text import read

STEPS, BATCH, BEFORE, DIM = 40, 64, 8, 32
RATE, MOST = 1.0, 0.25  # of learning; norm of the gradients


class NextWord(nn.Module):
    def __init__(self, words: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(words, DIM, sparse=sparse)
        self.out = nn.Linear(DIM, words)

    def forward(self, before: Tensor) -> Tensor:
        return self.out(self.table(before))


def in_one_process(text: TensorDataset, words: int, ranks: int) -> NextWord:
    model = NextWord(words, sparse=False)
    update = torch.optim.SGD(model.parameters(), lr=RATE)
    for before, word in DataLoader(text, BATCH * ranks):  # the batches of all ranks
        update.zero_grad()
        functional.cross_entropy(model(before), word).backward()
        clip_grad_norm_(model.parameters(), MOST)
        update.step()
    return model


def main() -> None:
    accelerator = weft.trainers.accelerate(Accelerator(cpu=True))
    ranks = accelerator.num_processes
    corpus = read([Path(asyncio.__file__).parent], min_count=1, ranks=1)
    windows = torch.from_numpy(corpus.tokens).long().unfold(0, BEFORE + 1, 1)
    windows = windows[: STEPS * BATCH * ranks]
    text = TensorDataset(windows[:, :-1], windows[:, -1])

    model = NextWord(len(corpus.words), sparse=True)
    update = torch.optim.SGD(model.parameters(), lr=RATE)
    model, update, batches = accelerator.prepare(model, update, DataLoader(text, BATCH))
    norms = []
    for before, word in batches:  # each rank gets other batches
        update.zero_grad()
        accelerator.backward(functional.cross_entropy(model(before), word))
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MOST)))
        update.step()

    other = in_one_process(text, len(corpus.words), ranks)
    ours, its = (parameters_to_vector(each.parameters()).detach() for each in (model, other))
    apart = float((ours - its).abs().max())
    clipped, calls = sum(norm > MOST for norm in norms), len(accelerator.weft_state.calls)
    if accelerator.is_main_process:
        print(
            f"{ranks} ranks, {calls} sparse sums, clipped in {clipped} of {len(norms)} steps; "
            f"weights within {apart:.1e} of one process"
        )
    expected = STEPS if ranks > 1 else 0
    if not (apart < 1e-5 and calls == expected and clipped):
        raise SystemExit(f"FAILED on rank {accelerator.process_index}")
    accelerator.print("PASSED")
    accelerator.end_training()


if __name__ == "__main__":
    main()
