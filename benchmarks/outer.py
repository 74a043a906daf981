"""Time the outer exchange of a loop such as SparseLoCo's: steps apart, then changes are shared.

    tools/netlab -n 4 --rate 100mbit --delay 25 --raw -- python benchmarks/outer.py --link 100mbit
    tools/netlab -n 4 --rate 100mbit --delay 25 --loss 0.1 --raw -- \\
        python benchmarks/outer.py --link 100mbit

The model is that of `compression.py`, an LSTM of 5.2 million parameters on the standard library's
source. Each rank takes `--inner` steps of AdamW by itself. Then the ranks share by how much their
weights have changed, and all go on from the same weights, the old ones less the mean of what was
shared. Where only some entries are, it is 64 of each 4,096, with error feedback and values in
bfloat16, as in Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo" (2025,
arXiv 2508.15706), which besides rounds values to two bits. The ways:

* `TopK`: `weft.sync_sparsified`; all tensors are sparsified.
* `all-gather`: SparseLoCo's way on gloo: places in their chunks (2 bytes) and values (2 bytes) of
  all ranks go to all ranks, in one all-gather, and each adds them up. Its sums are not rounded.
* `all-reduce`: all changes, in float32, by one `dist.all_reduce`.

Each trains weights of its own, and they take turns. The *exchange* has all but the inner steps:
selection, *communication*, and what is done with what came; it is that of the slowest rank. The
communication is the sparse call with its sums, the all-gather or the all-reduce, from when the last
rank has come. MB left the network interface of the rank that sent most. The bound is that of an
exact sum of the selected entries with 4 bytes an index (docs/algorithms.md), and its time is held
against communication. The loss is of held-out text, at the end.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from compression import TESTED, Model, batch, of_ranks, text_of
from turns import on_ranks, sent
from weft.cli import options
from weft.cli.bench.measure import meet
from weft.group.group import Group

CHUNK = 4096
KEPT = 64  # entries of a chunk that are sent
BATCH = 4

Exchange = Callable[[list[Tensor]], float]
"""Replaces changes of this rank by means over the ranks, in place; seconds of communication."""


def all_reduced(changes: list[Tensor]) -> float:
    """All of the changes."""
    flat = torch.cat([each.flatten() for each in changes])
    start = time.perf_counter()
    dist.all_reduce(flat)
    seconds = time.perf_counter() - start
    flat /= dist.get_world_size()
    put(flat, changes)
    return seconds


def put(flat: Tensor, changes: list[Tensor]) -> None:
    """Copy means to where the changes were."""
    parts = flat.split([each.numel() for each in changes])
    for each, part in zip(changes, parts, strict=True):
        each.copy_(part.view_as(each))


class Gathered:
    """The largest entries of each chunk, gathered from all ranks by gloo, with error feedback."""

    def __init__(self) -> None:
        self._residual: Tensor | None = None  # [chunks, CHUNK]

    def __call__(self, changes: list[Tensor]) -> float:
        count = sum(each.numel() for each in changes)
        flat = torch.zeros(math.ceil(count / CHUNK) * CHUNK)
        torch.cat([each.flatten() for each in changes], out=flat[:count])
        chunks = flat.view(-1, CHUNK)
        if self._residual is not None:
            chunks += self._residual
        places = chunks.abs().topk(KEPT, dim=1, sorted=False).indices
        values = chunks.gather(1, places).bfloat16()
        self._residual = chunks.scatter_add(1, places, -values.float())

        message = torch.cat([places.short().view(-1), values.view(torch.int16).view(-1)])
        message = message.view(torch.uint8)  # gloo knows no int16
        heard = message.new_empty(dist.get_world_size() * len(message))
        start = time.perf_counter()
        dist.all_gather_single(heard, message)
        seconds = time.perf_counter() - start
        heard = heard.view(torch.int16)
        total = torch.zeros_like(chunks)
        for one in heard.view(dist.get_world_size(), 2, *places.shape):
            total.scatter_add_(1, one[0].long(), one[1].view(torch.bfloat16).float())
        put(total.view(-1)[:count].div_(dist.get_world_size()), changes)
        return seconds


class Loop:
    """The training of one contender, on this rank."""

    def __init__(self, exchange: Exchange, group: Group, arguments: argparse.Namespace) -> None:
        self._exchange = exchange
        self._group = group
        self._inner = arguments.inner
        self._text, self._held = text_of(arguments.folder)
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(0)
        self._model = Model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=arguments.rate)
        self._weights = [each.detach().clone() for each in self._model.parameters()]

    def turn(self) -> list[float]:
        """Train, and exchange: seconds of the exchange and of communication, and bytes sent."""
        for _ in range(self._inner):
            self._optimizer.zero_grad()
            self._model(batch(self._text, self._generator, BATCH)).backward()
            self._optimizer.step()
        own = [each.detach() for each in self._model.parameters()]
        changes = [old - new for old, new in zip(self._weights, own, strict=True)]
        meet(self._group)
        before, start = sent(), time.perf_counter()
        communicating = self._exchange(changes)
        exchanging = time.perf_counter() - start
        nbytes = sent() - before
        figures = [
            of_ranks(exchanging, dist.ReduceOp.MAX),
            of_ranks(communicating, dist.ReduceOp.MIN),  # of the rank that came last
            of_ranks(nbytes, dist.ReduceOp.MAX),
        ]
        for weight, change, new in zip(self._weights, changes, own, strict=True):
            weight -= change
            new.copy_(weight)
        return figures

    def loss(self) -> float:
        """Of held-out text, in nats a word."""
        generator = torch.Generator().manual_seed(99 + dist.get_rank())
        rounds = TESTED // dist.get_world_size() // 32
        with torch.no_grad():
            losses = [self._model(batch(self._held, generator, 32)).item() for _ in range(rounds)]
        return of_ranks(statistics.mean(losses), dist.ReduceOp.SUM) / dist.get_world_size()


def rank(arguments: argparse.Namespace) -> str:
    """One rank's program: the table, in Markdown."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    with weft.init() as group:
        state = weft.ddp.TopK(
            KEPT / CHUNK, chunk=CHUNK, wire_dtype=torch.bfloat16, min_numel=1, group=group
        )

        def top_k(changes: list[Tensor]) -> float:
            weft.sync_sparsified(changes, state)
            return state.calls[-1].seconds

        loops = {
            "TopK": Loop(top_k, group, arguments),
            "all-gather": Loop(Gathered(), group, arguments),
            "all-reduce": Loop(all_reduced, group, arguments),
        }
        found: dict[str, list[list[float]]] = {name: [] for name in loops}
        for number in range(-arguments.warmup, arguments.rounds):
            for name in random.Random(number).sample([*loops], len(loops)):
                figures = loops[name].turn()
                if number >= 0:
                    found[name].append(figures)
        bound, head = least(state, arguments)
        titles = "exchange, ms", "communication, ms", "MB", "over bound", "loss"
        lines = [head, "", f"| way | {' | '.join(titles)} |", "|---" * 6 + "|"]
        for name, loop in loops.items():
            exchange, communication, nbytes = zip(*found[name], strict=True)
            middle = statistics.median(communication)
            cells = spread(exchange), spread(communication), f"{max(nbytes) / 1e6:.2f}"
            cells += f"{middle / bound:.2f}", f"{loop.loss():.3f}"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    dist.destroy_process_group()
    return "\n".join(lines)


def spread(seconds: Sequence[float]) -> str:
    """The median of times in milliseconds, with the least and the most."""
    least, middle, most = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.0f} ({1e3 * least:.0f} to {1e3 * most:.0f})"


def least(state: weft.ddp.TopK, arguments: argparse.Namespace) -> tuple[float, str]:
    """Seconds of the bound's bytes of the last call; and that as text."""
    call = state.calls[-1]
    count = sum(each.numel() for each in Model().parameters())
    bound = call.bound_bytes * 8 / options.rate(arguments.link)
    text = (
        f"{state.group.size} ranks, {call.rows} of {count} entries each, {call.union} in the mean, "
        f"{call.algorithm}; the bound's {call.bound_bytes / 1e6:.2f} MB take {1e3 * bound:.0f} ms "
        f"at {arguments.link}"
    )
    return bound, text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/compression"), help="of the text")
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--link", default="100mbit", help="its speed")
    parser.add_argument("--inner", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--rate", type=float, default=2e-3, help="of learning")
    parser.add_argument("--rounds", type=int, default=7, help="exchanges of each contender")
    parser.add_argument("--warmup", type=int, default=2, help="exchanges before, not timed")
    arguments = parser.parse_args()
    text_of(arguments.folder)  # read once
    on_ranks(rank, arguments, lambda found, ranks: print(found, flush=True))


if __name__ == "__main__":
    main()
