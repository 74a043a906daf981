"""Train a BERT with sparse word embeddings under Hugging Face's Trainer over weft.

From sixteen words of a text the model predicts how frequent the next one is. The gradients of its
word embeddings are sparse; all gradients are clipped. The trained weights are compared with those
of one process that has all the data, dense gradients and no weft.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import weft

STEPS, BATCH, BEFORE = 20, 16, 16
RATE, MOST = 0.5, 0.25  # of learning; norm of the gradients
FREQUENT = 50  # words: the classes are these, and all others


class Windows(Dataset[dict[str, Tensor]]):
    """Sixteen words each, and the class of the next; it remembers which were asked for."""

    def __init__(self, tokens: Tensor) -> None:
        self.windows = tokens.unfold(0, BEFORE + 1, 1)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        window = self.windows[index]
        return {"input_ids": window[:-1], "labels": (window[-1] < FREQUENT).long()}


def network(words: int, sparse: bool) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    table = model.bert.embeddings.word_embeddings
    model.bert.embeddings.word_embeddings = nn.Embedding.from_pretrained(
        table.weight.detach(), freeze=False, sparse=sparse
    )
    return model


def in_one_process(data: Windows, words: int, batches: list[list[int]]) -> nn.Module:
    model = network(words, sparse=False)
    update = torch.optim.SGD(model.parameters(), lr=RATE)
    for indices in batches:
        items = [data[index] for index in indices]
        update.zero_grad()
        model(
            **{name: torch.stack([item[name] for item in items]) for name in items[0]}
        ).loss.backward()
        clip_grad_norm_(model.parameters(), MOST)
        update.step()
    return model


class Norms(Trainer):
    """A Trainer that remembers what norms it logged."""

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        self.norms = [
            *getattr(self, "norms", []),
            *([logs["grad_norm"]] if "grad_norm" in logs else []),
        ]
        super().log(logs, *args, **options)


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
    data = Windows(tokens[:4000])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            optim="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=MOST,
            average_tokens_across_devices=False,  # of a mean over tokens: this one is over windows
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Norms(network(words, sparse=True), arguments, train_dataset=data)
        trainer = weft.trainers.huggingface(trainer)
        trainer.train()

    rank, ranks = arguments.process_index, arguments.world_size
    asked: list[Any] = [data.asked]
    if ranks > 1:
        asked = [None] * ranks
        dist.all_gather_object(asked, data.asked)
    batches = [
        [index for own in asked for index in own[step * BATCH : (step + 1) * BATCH]]
        for step in range(STEPS)
    ]
    other = in_one_process(data, words, batches)
    ours, its = (
        parameters_to_vector(each.parameters()).detach() for each in (trainer.model, other)
    )
    apart = float((ours - its).abs().max())
    clipped = sum(norm > MOST for norm in trainer.norms)
    calls = len(trainer.accelerator.weft_state.calls)
    if rank == 0:
        print(
            f"{ranks} ranks, {calls} sparse sums, clipped in {clipped} of {len(trainer.norms)} "
            f"steps; weights within {apart:.1e} of one process"
        )
    if not (apart < 1e-5 and calls == (STEPS if ranks > 1 else 0) and clipped):
        raise SystemExit(f"FAILED on rank {rank}")
    if rank == 0:
        print("PASSED")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
