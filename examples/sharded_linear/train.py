"""Train a stack of linear layers that are sharded over all ranks; compare it with one process.

Each rank has a P-th of the rows of every weight, of its gradient, and of the optimizer's state.
AllGather makes the whole weight where it is needed. Its adjoint, ReduceScatter, gives each rank the
sum of all ranks' gradients of the rows that it has. So the training has no code for gradients, and
any optimizer that works element by element works on shards.

The task is to predict the next character of Python's own source from the eight characters before
it. Losses and weights must be those of one process, to rounding.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import weft

CONTEXT = 8
CHARACTERS = string.printable
WIDTHS = (CONTEXT * len(CHARACTERS), 90, 70, len(CHARACTERS))  # which 4 ranks cannot cut evenly
BATCH = 90
STEPS = 12


class ShardedLinear(nn.Module):
    """A `torch.nn.Linear` of which each rank has some rows.

    Args:
        partition: a grid of one dimension, of the ranks that share the layer.
        whole: the layer, with the same weights on all of these ranks.
        regather: whether to free the gathered weight after forward and gather it again in backward,
            which needs less memory and more communication.
    """

    def __init__(
        self, partition: weft.Partition, whole: nn.Linear, *, regather: bool = False
    ) -> None:
        super().__init__()
        rows = partition.box((whole.out_features,)).slices
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())
        self.bias = nn.Parameter(whole.bias.detach()[rows].clone())
        self.gather = weft.nn.AllGather(partition, 0)
        self.regather = regather

    def forward(self, x: Tensor) -> Tensor:
        if self.regather:
            found: Tensor = checkpoint(
                self.linear, x, use_reentrant=False, preserve_rng_state=False
            )
            return found
        return self.linear(x)

    def linear(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.gather(self.weight), self.gather(self.bias))


def stack(linear: Sequence[nn.Module]) -> nn.Sequential:
    """The layers with ReLU between them."""
    between = [each for layer in linear for each in (layer, nn.ReLU())]
    return nn.Sequential(*between[:-1])


def layers() -> list[nn.Linear]:
    """The layers before training, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for inputs, outputs in pairwise(WIDTHS):
        layer = nn.Linear(inputs, outputs, dtype=torch.float64)
        for each in layer.parameters():
            nn.init.uniform_(each, -(inputs**-0.5), inputs**-0.5, generator=generator)
        found.append(layer)
    return found


def sharded(partition: weft.Partition, *, regather: bool = False) -> nn.Sequential:
    """The sharded model."""
    return stack([ShardedLinear(partition, each, regather=regather) for each in layers()])


def whole() -> nn.Sequential:
    """The same model in one process, by torch alone."""
    return stack(layers())


def batches() -> list[tuple[Tensor, Tensor]]:
    """The batch of each step: the characters before, one-hot, and the next character."""
    with open(argparse.__file__, encoding="utf-8") as source:
        text = [CHARACTERS.index(each) for each in source.read() if each in CHARACTERS]
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator).tolist()
        before = torch.tensor([text[at : at + CONTEXT] for at in starts])
        after = torch.tensor([text[at + CONTEXT] for at in starts])
        one_hot = functional.one_hot(before, len(CHARACTERS)).double().flatten(1)
        found.append((one_hot, after))
    return found


def train(model: nn.Module, share: slice) -> list[float]:
    """Train on a share of each batch; return the share's part of the loss in each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for before, after in batches():
        logits = model(before[share])
        loss = functional.cross_entropy(logits, after[share], reduction="sum") / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(partition: weft.Partition, *, regather: bool = False) -> dict[str, float]:
    """Train both models; return loss, memory, and the largest difference of losses and weights.

    Raises:
        SystemExit: they differ by more than rounding.
    """
    torch.set_num_threads(1)
    model, reference = sharded(partition, regather=regather), whole()
    (mine,) = partition.box((BATCH,)).slices  # each rank sees its part of the batch
    losses = torch.tensor(train(model, mine), dtype=torch.float64)
    losses = weft.nn.AllSumReduce(partition, 0)(losses)
    expected = torch.tensor(train(reference, slice(None)), dtype=torch.float64)
    apart = float((losses - expected).abs().max())
    gather = weft.nn.AllGather(partition, 0)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        gathered = gather(one.detach())
        apart = max(apart, float((gathered - other.detach()).abs().max()))
    if not apart < 1e-9:
        raise SystemExit(f"FAILED: rank {partition.rank}: weights or losses differ by {apart:g}")
    kept = sum(each.numel() for each in model.parameters())
    of = sum(each.numel() for each in reference.parameters())
    return {"first": float(losses[0]), "last": float(losses[-1]), "apart": apart, "kept": kept / of}


def drawn(partition: weft.Partition) -> str:
    """What AllGather makes of the shards of the first weight, as a text."""
    shards = partition.boxes((WIDTHS[1], WIDTHS[0]))
    shapes = {rank: box.shape for rank, box in shards.items()}
    return weft.nn.AllGather(partition, 0).plan(shapes).draw(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="a sharded stack of linear layers")
    parser.add_argument("--regather", action="store_true", help="gather again for backward")
    parser.add_argument("--picture", action="store_true", help="draw who holds what")
    options = parser.parse_args()
    with weft.init() as group:
        partition = weft.Partition(group.size)
        found = compare(partition, regather=options.regather)
        if group.rank == 0:
            if options.picture:
                print(drawn(partition))
            print(
                f"{group.size} ranks, each keeps {found['kept']:.1%} of the weights: "
                f"loss {found['first']:.3f} -> {found['last']:.3f} in {STEPS} steps, "
                f"{found['apart']:.1e} from one process"
            )
            print("PASSED")


if __name__ == "__main__":
    main()
