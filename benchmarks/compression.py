"""A language model trained with compressed gradients: loss by step, and time and bytes of a step.

    python benchmarks/compression.py train  # 4 ranks here, some minutes; again, until all is done
    tools/netlab -n 4 --rate 100mbit --raw -- python benchmarks/compression.py time --link 100mbit
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/compression.py time --link 1gbit
    python benchmarks/compression.py table

An LSTM (5.2 million parameters) predicts the next word of the demo's text, the source of the
Python standard library. The contenders are DistributedDataParallel on gloo, PyTorch's PowerSGD, and
`weft.ddp.TopK` with 1 % and 0.1 % of the entries, with and without error feedback. All begin with
the same weights, and see the same batches. Their optimizer is SGD with a momentum of 0.9, and their
learning rate rises for some steps and then falls to zero.

`train` notes the loss of text that is not trained on, in nats a word, every so many steps. It does
not depend on the link, nor on how busy the machine is. It may be cut: each piece goes on from the
checkpoint of the one before. `time` goes on from the end of the training, since what ranks pick in
common depends on it: the median time of a step with its optimizer, and the bytes that left a rank's
network interface, of which each has its own under netlab; the largest of the ranks', and of
what was measured several times the quickest. Time to a loss is the number of steps to it, between
two that were noted in proportion, by the time of a step. `table` prints what
docs/compression.md has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import weft
from turns import on_ranks
from weft.cli.demo.text import read

BATCH, LENGTH, WORDS, WIDTH = 4, 16, 8_000, 448
BLOCK, HELD_OUT = 2_000, 25  # words; one block of so many is not trained on
TESTED = 512  # sequences, of all ranks together
MOMENTUM = 0.9
PLAIN = 10  # steps before PowerSGD begins
SKIPPED = 4  # steps before those that are timed


@dataclasses.dataclass(frozen=True)
class Contender:
    """How gradients are summed.

    Attributes:
        state: makes the hook's; None: DistributedDataParallel without a hook.
        hook: of DistributedDataParallel.
        momentum: of the optimizer.
        options: of DistributedDataParallel.
    """

    state: Callable[[], Any] | None = None
    hook: Any = None
    momentum: float = MOMENTUM
    options: tuple[tuple[str, Any], ...] = ()


def power_sgd(rank: int) -> Contender:
    def state() -> power.PowerSGDState:
        # as its documentation has it: plain for some steps, since the first gradients are large
        return power.PowerSGDState(None, rank, start_powerSGD_iter=PLAIN)

    # of several buckets its calls meet in another order on each rank, and gloo ends the process:
    # "Received data size doesn't match expected size"
    return Contender(state, power.powerSGD_hook, options=(("bucket_cap_mb", 1000.0),))


def top_k(density: float, **settings: Any) -> Contender:
    return Contender(lambda: weft.ddp.TopK(density, **settings), weft.ddp.topk_hook)


CONTENDERS = {
    "DistributedDataParallel": Contender(),
    "PowerSGD, rank 1": power_sgd(1),
    "PowerSGD, rank 4": power_sgd(4),
    "TopK 1 %": top_k(0.01),
    "TopK 1 %, bfloat16": top_k(0.01, wire_dtype=torch.bfloat16),
    "TopK 1 %, momentum correction": dataclasses.replace(
        top_k(0.01, momentum=MOMENTUM), momentum=0.0
    ),
    "TopK 1 %, warm-up": top_k(0.01, warmup_steps=250),
    "TopK 0.1 %": top_k(0.001),
    "TopK 1 %, no feedback": top_k(0.01, error_feedback=False),
    "TopK 0.1 %, no feedback": top_k(0.001, error_feedback=False),
}
NOTHING = Contender(hook=debugging_hooks.noop_hook)  # arithmetic alone


class Model(nn.Module):
    """An LSTM; the table of words is that of the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.words(words[:, :-1]))
        scores = hidden @ self.words.weight.t() + self.bias
        return nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def text_of(folder: Path) -> tuple[Tensor, Tensor]:
    """What is trained on, and what is held out; rarer words are one word."""
    path = folder / "text.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, read([], min_count=1, ranks=4).tokens)
    text = torch.from_numpy(np.load(path)).long().clamp_(max=WORDS - 1)
    blocks = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % HELD_OUT == 0
    return blocks[~held].flatten(), blocks[held].flatten()


def batch(text: Tensor, generator: torch.Generator, size: int) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (size,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def sent() -> int:
    """Bytes that left this rank's own interface so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def of_ranks(value: float, op: Any) -> float:
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, op)
    return told.item()


class Training:
    """One contender's, on this rank, from where its last piece ended."""

    def __init__(self, name: str, contender: Contender, arguments: argparse.Namespace) -> None:
        self.arguments, self.rank = arguments, dist.get_rank()
        self.text, self.held = text_of(arguments.folder)
        self.path = arguments.folder / f"{name.replace(' ', '_')}.{self.rank}.pt"
        saved: dict[str, Any] = {}
        if self.path.exists():
            saved = torch.load(self.path, weights_only=False)
        torch.manual_seed(0)
        model = Model()
        self.generator = torch.Generator().manual_seed(self.rank)
        self.model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, **dict(contender.options)
        )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=contender.momentum)
        self.state = contender.state() if contender.state else None
        if contender.hook:
            self.model.register_comm_hook(self.state, contender.hook)
        self.step, self.losses = 0, []
        if saved:
            if isinstance(self.state, power.PowerSGDState):
                # what it keeps is by bucket, and buckets change behind the first step
                self.model(batch(self.text, self.generator, BATCH)).backward()
                self.state.__setstate__(saved["state"].__getstate__())
            elif self.state is not None:
                self.state.load_state_dict(saved["state"])
            model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.generator.set_state(saved["generator"])
            self.step, self.losses = saved["step"], saved["losses"]

    def save(self) -> None:
        state = self.state
        torch.save(
            {
                "state": state.state_dict() if isinstance(state, weft.ddp.TopK) else state,
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "generator": self.generator.get_state(),
                "step": self.step,
                "losses": self.losses,
            },
            self.path,
        )

    def advance(self) -> None:
        """One step."""
        done = self.step / self.arguments.steps
        rate = self.arguments.rate * min(1.0, (self.step + 1) / self.arguments.rise) * (1 - done)
        self.optimizer.param_groups[0]["lr"] = max(rate, 0.0)
        self.optimizer.zero_grad()
        self.model(batch(self.text, self.generator, BATCH)).backward()
        self.optimizer.step()
        self.step += 1

    def note(self) -> None:
        """The loss of text that is held out."""
        generator = torch.Generator().manual_seed(99 + self.rank)
        rounds = TESTED // dist.get_world_size() // 32
        with torch.no_grad():
            losses = [
                self.model.module(batch(self.held, generator, 32)).item() for _ in range(rounds)
            ]
        mean = of_ranks(statistics.mean(losses), dist.ReduceOp.SUM) / dist.get_world_size()
        self.losses.append((self.step, mean))
        if self.rank == 0:
            self.path.with_suffix("").with_suffix(".json").write_text(json.dumps(self.losses))

    def piece(self, until: float) -> bool:
        """Train to the end, or until it is so late; whether it is the end."""
        while self.step < self.arguments.steps:
            self.advance()
            if self.step % self.arguments.every == 0:
                self.note()
            if self.step % 10 == 0 and of_ranks(time.time(), dist.ReduceOp.MAX) > until:
                break
        self.save()
        return self.step >= self.arguments.steps

    def timed(self, steps: int) -> tuple[float, float]:
        """Milliseconds and kilobytes of a step."""
        took = []
        for number in range(SKIPPED + steps):
            if number == SKIPPED:
                before = sent()
            start = time.perf_counter()
            self.advance()
            took.append(time.perf_counter() - start)
        size = (sent() - before) / steps
        longest = of_ranks(statistics.median(took[SKIPPED:]), dist.ReduceOp.MAX)
        return longest * 1e3, of_ranks(size, dist.ReduceOp.MAX) / 1e3


def rank(arguments: argparse.Namespace) -> None:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    with weft.init():
        timed = {"no communication": NOTHING} if arguments.task == "time" else {}
        for name, contender in (timed | CONTENDERS).items():
            if arguments.contender and name not in arguments.contender:
                continue
            training = Training(name, contender, arguments)
            if arguments.task == "train":
                if training.step < arguments.steps and not training.piece(
                    arguments.start + arguments.seconds
                ):
                    break
                told = f"{training.losses[-1][1]:.3f}"
            else:
                ms, size = training.timed(arguments.timed)
                told = f"{ms:,.0f} ms, {size:,.0f} KB"
                if training.rank == 0:
                    times = arguments.folder / f"{arguments.link}.json"
                    known = json.loads(times.read_text()) if times.exists() else {}
                    known[name] = min(known.get(name, [ms, size]), [ms, size])
                    times.write_text(json.dumps(known))
            if training.rank == 0:
                print(f"{name}: step {training.step}, {told}", flush=True)
            del training
    dist.destroy_process_group()


def steps_to(losses: list[tuple[int, float]], target: float) -> float | None:
    """How many steps a training took to a loss; None: it did not come so far."""
    before = losses[0]
    for step, loss in losses:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (step - before[0])
        before = step, loss
    return None


def table(arguments: argparse.Namespace) -> None:
    """Print what was found."""
    found = arguments.folder.glob
    times = {path.stem: json.loads(path.read_text()) for path in found("*bit.json")}
    links = sorted(times)
    of = {name: arguments.folder / f"{name.replace(' ', '_')}.json" for name in CONTENDERS}
    losses = {name: json.loads(path.read_text()) for name, path in of.items() if path.exists()}
    dense = losses[next(iter(CONTENDERS))][-1][1]
    target = arguments.target or round(1.01 * dense, 2)
    columns = ["way", "loss", "of dense's", "KB a step"]
    columns += [f"ms, {link}" for link in links]
    columns += [f"steps to {target}", *(f"minutes, {link}" for link in links)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, noted in losses.items():
        step, loss = noted[-1]
        needed = steps_to(noted, target)
        ms = [times[link].get(name, (0, 0)) for link in links]
        row = [name, f"{loss:.3f}" + (f" ({step} steps)" if step < arguments.steps else "")]
        row += [
            f"{100 * (loss / dense - 1):+.1f} %",
            *(f"{size:,.0f}" if size else "-" for _, size in ms[:1]),
        ]
        row += [f"{each:,.0f}" if each else "-" for each, _ in ms]
        row += [f"{needed:,.0f}" if needed else "never"]
        row += [f"{needed * each / 60e3:.1f}" if needed else "-" for each, _ in ms]
        print(f"| {' | '.join(row)} |")
    if arguments.curves:
        for name, noted in losses.items():
            print(name, *(f"{step}:{loss:.3f}" for step, loss in noted))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=["train", "time", "table"])
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/compression"), help="of all that is kept"
    )
    parser.add_argument("--contender", nargs="+", help="their names; else all")
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--every", type=int, default=50, help="steps between two losses")
    parser.add_argument("--rate", type=float, default=5.0, help="of learning, the highest")
    parser.add_argument("--rise", type=int, default=50, help="steps until it is the highest")
    parser.add_argument("--seconds", type=float, default=280, help="of this piece of the training")
    parser.add_argument("--link", default="100mbit", help="its name")
    parser.add_argument("--timed", type=int, default=16, help="steps that are timed")
    parser.add_argument(
        "--target", type=float, help="loss; else 1 %% above that of dense gradients"
    )
    parser.add_argument("--curves", action="store_true", help="print all losses, too")
    arguments = parser.parse_args()
    arguments.start = time.time()
    if arguments.task == "table":
        table(arguments)
        return
    text_of(arguments.folder)  # read once
    on_ranks(rank, arguments, lambda found, ranks: None)


if __name__ == "__main__":
    main()
