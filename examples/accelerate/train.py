"""Train a model with a sparse table under Accelerate over weft, on any number of processes.

The model predicts the next word of a text from the mean of the eight words before it. The gradients
of its table are sparse; all gradients are clipped. The trained weights are compared with those of
one process that has all the data, dense gradients and no weft.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import weft

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


def read_words() -> Tensor:
    """The words of a package of Python's as numbers; the most frequent word is 0."""
    files = sorted(Path(asyncio.__file__).parent.rglob("*.py"))
    lines = " ".join(file.read_text(encoding="utf-8").lower() for file in files)
    words = re.findall(r"\b[^\W\d]\w*", lines)
    number = {word: place for place, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([number[word] for word in words])


def main() -> None:
    accelerator = weft.trainers.accelerate(Accelerator(cpu=True))
    ranks = accelerator.num_processes
    tokens = read_words()
    words = int(tokens.max()) + 1
    windows = tokens.unfold(0, BEFORE + 1, 1)
    windows = windows[: STEPS * BATCH * ranks]
    text = TensorDataset(windows[:, :-1], windows[:, -1])

    model = NextWord(words, sparse=True)
    update = torch.optim.SGD(model.parameters(), lr=RATE)
    model, update, batches = accelerator.prepare(model, update, DataLoader(text, BATCH))
    norms = []
    for before, word in batches:  # each rank gets other batches
        update.zero_grad()
        accelerator.backward(functional.cross_entropy(model(before), word))
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MOST)))
        update.step()

    other = in_one_process(text, words, ranks)
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
