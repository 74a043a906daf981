"""Train under Ray Train with weft for the gradients; the losses must be those of one process.

Ray starts the workers, and torch.distributed in them. `weft.init` uses that group, and
`weft.ddp.register` sums the gradients of the table as sparse tensors.

The model predicts the next word of Python's own source (of the package `email`) from the eight
words before it.
"""

from __future__ import annotations

import email
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import weft

WORKERS = 2
STEPS = 30
BATCH = 512  # of all workers together
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


def network(tokens: Tensor) -> nn.Module:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(int(tokens.max()) + 1, 32, mode="mean", sparse=True)
    return nn.Sequential(table, nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WORDS))


def train(model: nn.Module, tokens: Tensor, rank: int, ranks: int) -> list[float]:
    """The losses of all steps, averaged over the ranks."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # which Adagrad asks to be told
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=1e-6)
    losses = []
    for step in range(STEPS):
        words, following = batch(tokens, step, rank, ranks)
        loss = functional.cross_entropy(model(words), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = torch.stack(losses)
    return (weft.all_reduce(found, "avg") if ranks > 1 else found).tolist()


def worker() -> dict[str, Any]:
    """The program that Ray runs in each worker."""
    with weft.init() as group:  # the group that Ray has set up
        tokens = text()
        model = DistributedDataParallel(network(tokens))
        state = weft.ddp.register(model)
        losses = train(model, tokens, group.rank, group.size)
        return {"losses": losses, "ranks": group.size, "sparse": len(state.calls)}


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # as little as Ray takes; in a cluster `ray.init()` is all
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            worker,
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=folder),
        )
        found = trainer.fit().return_value  # of the first worker
    ray.shutdown()
    tokens = text()
    alone = train(network(tokens), tokens, 0, 1)
    apart = max(abs(a - b) for a, b in zip(found["losses"], alone, strict=True))
    print(
        f"{found['ranks']} workers, {found['sparse']} sparse sums; loss {alone[0]:.4f} -> "
        f"{alone[-1]:.4f}, {apart:.1e} from those of one process"
    )
    if found["ranks"] != WORKERS or found["sparse"] != STEPS or not apart < 1e-5:
        raise SystemExit("FAILED")
    print("PASSED")


if __name__ == "__main__":
    main()
