"""Train a language model with compressed gradients: its loss, and the time and bytes of a step.

    python benchmarks/compression.py train  # 4 ranks here, some minutes; again, until all is done
    python benchmarks/compression.py train --seed 1  # then --seed 2
    tools/netlab -n 4 --rate 100mbit --raw -- python benchmarks/compression.py time --link 100mbit
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/compression.py time --link 1gbit
    python benchmarks/compression.py table

An LSTM (5.2 million parameters) predicts the next word of the demo's text, the source of the
Python standard library. The contenders (`CONTENDERS`) are DistributedDataParallel on gloo,
PyTorch's PowerSGD, and `weft.ddp.TopK` with 1 %, 0.2 % and 0.1 % of the entries and several
settings. With one seed all begin with the same weights and get the same batches. The optimizer is
SGD with a momentum of 0.9, or none for momentum correction. The learning rate rises for some steps
and then falls to zero.

`train` writes the loss of text that is not trained on, in nats a word, every so many steps. The
loss depends neither on the link nor on the load of the machine. A call trains for `--seconds` and
saves checkpoints; the next one goes on from there. A training is continued only with the same
number of ranks, `--steps`, `--rise`, `--rate` and `--seed`: its files have them in their names.

`time` continues from the end of the training, because the bytes depend on which entries the ranks
select in common. It measures the median time of a step with its optimizer, and the bytes that left
a rank's network interface (under netlab each rank has one), of the rank that sent most. Contenders
take turns. Then it measures, from new weights, the first steps of contenders that send more in
these. Results are added to those of earlier calls.

`table` prints the table of docs/compression.md, of the trainings with these settings: mean and
range over seeds, the fastest and the slowest turn. The time to a loss is that of the first steps,
plus, for each further step that the training needed, the time of a step in the fastest turn.
Between two losses that were written, the step at which a loss was reached is interpolated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
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
from turns import on_ranks, sent
from weft.cli.demo.text import read

BATCH, LENGTH, WORDS, WIDTH = 4, 16, 8_000, 448
BLOCK, HELD_OUT = 2_000, 25  # words; one block of so many is not trained on
TESTED = 512  # sequences, of all ranks together
MOMENTUM = 0.9
PLAIN = 10  # steps before PowerSGD begins
SKIPPED = 3  # steps before those that are timed


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to reduce gradients.

    Attributes:
        state: makes the state of the hook; None: there is none.
        hook: the communication hook; None: DistributedDataParallel without a hook.
        momentum: of the optimizer.
        options: of DistributedDataParallel.
        first: the number of steps at the beginning that send more than the others.
        rate: the highest learning rate. With 5 the loss of one seed of PowerSGD stayed high.
    """

    state: Callable[[], Any] | None = None
    hook: Any = None
    momentum: float = MOMENTUM
    options: tuple[tuple[str, Any], ...] = ()
    first: int = 0
    rate: float = 4.0


def power_sgd(rank: int) -> Contender:
    def state() -> power.PowerSGDState:
        # as its documentation has it: plain for some steps, since the first gradients are large
        return power.PowerSGDState(None, rank, start_powerSGD_iter=PLAIN)

    # of several buckets its calls meet in another order on each rank, and gloo ends the process:
    # "Received data size doesn't match expected size"
    return Contender(state, power.powerSGD_hook, options=(("bucket_cap_mb", 1000.0),), first=PLAIN)


def top_k(density: float, **settings: Any) -> Contender:
    first = settings.get("warmup_steps", 0)
    return Contender(
        lambda: weft.ddp.TopK(density, **settings), weft.ddp.topk_hook, first=first, rate=5.0
    )


CONTENDERS = {
    "DistributedDataParallel": Contender(),
    "PowerSGD, rank 1": power_sgd(1),
    "PowerSGD, rank 4": power_sgd(4),
    "TopK 1 %": top_k(0.01),
    "TopK 1 %, bfloat16": top_k(0.01, wire_dtype=torch.bfloat16),
    "TopK 1 %, momentum correction": dataclasses.replace(
        top_k(0.01, momentum=MOMENTUM), momentum=0.0
    ),
    "TopK 1 %, bfloat16, warm-up 100": top_k(0.01, wire_dtype=torch.bfloat16, warmup_steps=100),
    "TopK 1 %, total 1 %": top_k(0.01, total_density=0.01),
    "TopK 1 %, total 1 %, bfloat16, warm-up 100": top_k(
        0.01, total_density=0.01, wire_dtype=torch.bfloat16, warmup_steps=100
    ),
    "TopK 0.2 %, bfloat16, warm-up 100": top_k(0.002, wire_dtype=torch.bfloat16, warmup_steps=100),
    "TopK 0.1 %": top_k(0.001),
    "TopK 1 %, no feedback": top_k(0.01, error_feedback=False),
    "TopK 0.1 %, no feedback": top_k(0.001, error_feedback=False),
}
NOTHING = {"no communication": Contender(hook=debugging_hooks.noop_hook)}  # arithmetic alone


class Model(nn.Module):
    """An LSTM language model; the input and the output layer share their weights."""

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
    """The text to train on, and the held-out text, as numbers; all rare words are one word."""
    path = folder / "text.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, read([], min_count=1, ranks=4).tokens)
    text = torch.from_numpy(np.load(path)).long().clamp_(max=WORDS - 1)
    blocks = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % HELD_OUT == 0
    return blocks[~held].flatten(), blocks[held].flatten()


def training_of(name: str, arguments: argparse.Namespace, seed: int) -> str:
    """What the files of a training begin with: all that two trainings may differ in."""
    rate = "own" if arguments.rate is None else arguments.rate
    settings = (
        f"{arguments.ranks} ranks, {arguments.steps} steps, rise {arguments.rise}, "
        f"rate {rate}, seed {seed}"
    )
    return f"{name}, {settings}".replace(" ", "_")


def times_of(link: str, ranks: int) -> str:
    """The name of the file of times on a link."""
    return f"{link},_{ranks}_ranks.json"


def batch(text: Tensor, generator: torch.Generator, size: int) -> Tensor:
    starts = torch.randint(len(text) - LENGTH - 1, (size,), generator=generator)
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


def of_ranks(value: float, op: Any) -> float:
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, op)
    return told.item()


class Training:
    """The training of one contender, on this rank: continued from its checkpoint, or new."""

    def __init__(
        self, name: str, contender: Contender, arguments: argparse.Namespace, new: bool = False
    ) -> None:
        self.arguments, self.rank = arguments, dist.get_rank()
        self.rate = arguments.rate or contender.rate
        self.text, self.held = text_of(arguments.folder)
        self.files = arguments.folder / training_of(name, arguments, arguments.seed)
        self.path = self.files.with_name(f"{self.files.name}.{self.rank}.pt")
        saved: dict[str, Any] = {}
        if self.path.exists() and not new:
            saved = torch.load(self.path, weights_only=False)
        step = saved.get("step", 0)
        if of_ranks(step, dist.ReduceOp.MIN) < of_ranks(step, dist.ReduceOp.MAX):
            # they would wait for each other in the step where the first ones are done
            raise RuntimeError(f"the ranks' checkpoints are of different steps: rm {self.files}.*")
        torch.manual_seed(arguments.seed)
        model = Model()
        own = self.rank + dist.get_world_size() * arguments.seed
        self.generator = torch.Generator().manual_seed(own)
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
                self.state.load_state_dict(saved["state"], self.model)
            model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.generator.set_state(saved["generator"])
            self.step, self.losses = saved["step"], saved["losses"]

    def save(self) -> None:
        state = self.state
        torch.save(
            {
                "state": state.state_dict(self.model)
                if isinstance(state, weft.ddp.TopK)
                else state,
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "generator": self.generator.get_state(),
                "step": self.step,
                "losses": self.losses,
            },
            self.path,
        )

    def advance(self) -> None:
        """Train one step."""
        done = self.step / self.arguments.steps
        rate = self.rate * min(1.0, (self.step + 1) / self.arguments.rise) * (1 - done)
        self.optimizer.param_groups[0]["lr"] = max(rate, 0.0)
        self.optimizer.zero_grad()
        self.model(batch(self.text, self.generator, BATCH)).backward()
        self.optimizer.step()
        self.step += 1

    def note(self) -> None:
        """Compute the loss of the held-out text, and write all losses so far."""
        generator = torch.Generator().manual_seed(99 + self.rank)
        rounds = TESTED // dist.get_world_size() // 32
        with torch.no_grad():
            losses = [
                self.model.module(batch(self.held, generator, 32)).item() for _ in range(rounds)
            ]
        mean = of_ranks(statistics.mean(losses), dist.ReduceOp.SUM) / dist.get_world_size()
        self.losses.append((self.step, mean))
        if self.rank == 0:
            losses_at = self.files.with_name(f"{self.files.name}.json")
            losses_at.write_text(json.dumps(self.losses))

    def piece(self, until: float) -> bool:
        """Train to the end, or until the time `until`; return whether it is the end."""
        while self.step < self.arguments.steps:
            self.advance()
            if self.step % self.arguments.every == 0:
                self.note()
            if self.step % 10 == 0 and of_ranks(time.time(), dist.ReduceOp.MAX) > until:
                break
        self.save()
        return self.step >= self.arguments.steps

    def timed(self, steps: int) -> tuple[list[float], float]:
        """Train; return milliseconds of each step, and kilobytes of all, of the worst rank."""
        took = []
        before = sent()
        for _ in range(steps):
            start = time.perf_counter()
            self.advance()
            took.append(of_ranks(time.perf_counter() - start, dist.ReduceOp.MAX) * 1e3)
        return took, of_ranks(sent() - before, dist.ReduceOp.MAX) / 1e3


def rank(arguments: argparse.Namespace) -> None:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    arguments.ranks = dist.get_world_size()  # which a launcher may have chosen
    with weft.init():
        wanted = arguments.contender or [*CONTENDERS]
        if arguments.task == "time":
            measure({name: (CONTENDERS | NOTHING)[name] for name in wanted}, arguments)
        else:
            for name in wanted:
                training = Training(name, CONTENDERS[name], arguments)
                if training.step < arguments.steps and not training.piece(
                    arguments.start + arguments.seconds
                ):
                    break
                if training.rank == 0:
                    print(f"{name}: step {training.step}, {training.losses[-1][1]:.3f}", flush=True)
                del training
    dist.destroy_process_group()


def measure(wanted: dict[str, Contender], arguments: argparse.Namespace) -> None:
    """Measure and write the time and bytes of a step, in turns, and the time of first steps."""
    path = arguments.folder / times_of(arguments.link, arguments.ranks)
    known = json.loads(path.read_text()) if path.exists() else {}
    found: dict[str, dict[str, list[float]]] = {name: known.get(name, {}) for name in wanted}
    ready = {name: Training(name, each, arguments) for name, each in wanted.items()}
    for number in range(arguments.rounds):
        for name in random.Random(number).sample([*ready], len(ready)):
            ready[name].timed(SKIPPED)
            took, size = ready[name].timed(arguments.timed)
            found[name].setdefault("ms", []).append(statistics.median(took))
            found[name].setdefault("KB", []).append(size / arguments.timed)
    for name, contender in wanted.items():
        if contender.first:
            took, _ = Training(name, contender, arguments, new=True).timed(contender.first)
            found[name].setdefault("first s", []).append(sum(took) / 1e3)
        if dist.get_rank() == 0:
            path.write_text(json.dumps(known | found))
            print(name, json.dumps(found[name]), flush=True)


def steps_to(losses: list[tuple[int, float]], target: float) -> float | None:
    """The number of steps until a training reached a loss; None if it did not reach it."""
    before = losses[0]
    for step, loss in losses:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (step - before[0])
        before = step, loss
    return None


def minutes(name: str, found: dict[str, list[float]], needed: list[float]) -> float:
    """The minutes to a loss: of the first steps, and of the other steps that were needed."""
    others = statistics.mean(needed) - CONTENDERS[name].first
    return (min(found.get("first s", [0.0])) + others * min(found["ms"]) / 1e3) / 60


def spread(values: list[float], form: str) -> str:
    """The mean of values and, if there are several, the least and the greatest."""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{ends}"


def table(arguments: argparse.Namespace) -> None:
    """Print the table."""
    times = {
        path.name.partition(",")[0]: json.loads(path.read_text())
        for path in arguments.folder.glob(times_of("*", arguments.ranks))
    }
    losses: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for name in CONTENDERS:
        of = {
            seed: arguments.folder / f"{training_of(name, arguments, seed)}.json"
            for seed in range(10)
        }
        noted = {seed: json.loads(path.read_text()) for seed, path in of.items() if path.exists()}
        losses[name] = {seed: n for seed, n in noted.items() if n[-1][0] == arguments.steps}
    dense = {seed: noted[-1][1] for seed, noted in losses[next(iter(CONTENDERS))].items()}
    target = arguments.target or round(1.01 * statistics.mean(dense.values()), 2)
    columns = ["way", "loss", "of dense's", f"steps to {target}"]
    columns += [f"{what}, {link}" for link in sorted(times) for what in ("KB", "ms", "minutes")]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, of_seeds in losses.items():
        if not of_seeds:
            continue
        ends = [noted[-1][1] for noted in of_seeds.values()]
        more = [100 * (noted[-1][1] / dense[seed] - 1) for seed, noted in of_seeds.items()]
        needed = [steps for noted in of_seeds.values() if (steps := steps_to(noted, target))]
        came = len(needed) == len(of_seeds)
        row = [name, spread(ends, ".3f"), f"{spread(more, '+.1f')} %"]
        row += [spread(needed, ",.0f") if came else "never"]
        for link in sorted(times):
            found = times[link].get(name)
            row += [f"{found['KB'][0]:,.0f}" if found else "-"]
            row += [f"{min(found['ms']):,.0f} to {max(found['ms']):,.0f}" if found else "-"]
            row += [f"{minutes(name, found, needed):.1f}" if found and came else "-"]
        print(f"| {' | '.join(row)} |")
    if arguments.curves:
        for name, of_seeds in losses.items():
            for noted in of_seeds.values():
                print(name, *(f"{step}:{loss:.3f}" for step, loss in noted))


def options() -> argparse.ArgumentParser:
    """What one may pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=["train", "time", "table"])
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/compression"), help="of all that is kept"
    )
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=[*CONTENDERS, *NOTHING],
        metavar="NAME",
        help="of those to train or to time; else all",
    )
    parser.add_argument("--ranks", type=int, default=4, help="a launcher's go before it")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--every", type=int, default=50, help="steps between two losses")
    parser.add_argument("--rate", type=float, help="of learning, the highest; else each's own")
    parser.add_argument("--rise", type=int, default=50, help="steps until it is the highest")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--seconds", type=float, default=280, help="of this piece of the training")
    parser.add_argument("--link", default="100mbit", help="its name")
    parser.add_argument("--timed", type=int, default=16, help="steps that are timed in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument(
        "--target", type=float, help="loss; else 1 %% above that of dense gradients"
    )
    parser.add_argument("--curves", action="store_true", help="print all losses, too")
    return parser


def main() -> None:
    arguments = options().parse_args()
    arguments.start = time.time()
    if arguments.task == "table":
        table(arguments)
        return
    text_of(arguments.folder)  # read once
    on_ranks(rank, arguments, lambda found, ranks: None)


if __name__ == "__main__":
    main()
