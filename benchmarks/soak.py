"""Random programs: calls of all kinds one after the other, held against one process's arithmetic.

    python benchmarks/soak.py                          # 10,000 programs; `make soak` does the same
    python benchmarks/soak.py --programs 500 --first 20000 --world shm-4,tcp-3
    python benchmarks/soak.py --large                           # what is large; needs 12 GiB

A program is some ten steps, drawn alike on all ranks: sparse collectives of every kind, op, dtype
and form, lists, dense collectives, layers on grids of some of the ranks, gradients, arguments that
are wrong on one rank; on the whole group and on parts of it; asynchronous ones are waited for in
another order on each rank. Values are small integers, so sums are exact in any order. What comes
out is kept and looked at again, written to, pickled, saved and loaded; where ranks are processes it
goes through multiprocessing, a DataLoader's worker and forked children, and is used after shutdown.

A world is a wire and a number of ranks: `threads`, `shm` (processes of one host), `tcp` (as if each
were on a host of its own) or `torch` (over a process group). Memory, descriptors and threads are
those of the worst rank, after a tenth of the programs and after all. The exit status is 1 if
descriptors or threads have become more, or memory has by more than 64 MiB a rank and what a process
may keep of past results, a 64th of the machine's.

What is large: a message of more than 2 GiB, a result of more than 2**31 elements, 100,000 calls;
each on two processes of one host and on two as if on hosts of their own.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import math
import multiprocessing
import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.kernels.ops import DTYPES, OPS
from weft.sparse import ALGORITHMS
from weft.testing import expected, processes, run

WORLDS = ("threads-2", "threads-3", "threads-4", "threads-7", "shm-2", "shm-3", "shm-4")
WORLDS += ("tcp-3", "tcp-4", "torch-2", "torch-3")
SIZES = (0, 1, 100, 5000, 20_000, 40_000, 70_000, 140_000, 300_000)  # both sides of thresholds
HALF = (torch.float16, torch.bfloat16)
MIB = 1 << 20
KEPT = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 64  # of past results
SPARE = 64 * MIB  # of each rank, beside that

Group = tuple[Any, tuple[int, ...]]
"""What a call is given as its group, and the ranks of the whole that are in it."""
Check = Callable[[Any], list[Tensor]]
"""Holds a result against what it must be; its tensors."""


@dataclass(frozen=True, slots=True)
class State:
    """What a process has: bytes of memory, descriptors, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> State:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        counts = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), *counts)


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank has done, and what its process had, first after a tenth of it."""

    programs: int
    calls: int
    start: State
    end: State

    def has_grown(self, ranks: int) -> bool:
        """Whether its process has, which has so many ranks."""
        start, end = self.start, self.end
        more = end.files > start.files or end.threads > start.threads
        return more or end.memory > start.memory + KEPT + SPARE * ranks


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype is want.dtype and got.shape == want.shape, (got, want)
    assert torch.equal(got, want), (got, want)


def oracle(parts: Sequence[weft.Rows], op: str, narrow: torch.dtype | None) -> weft.Rows:
    """What a reduction gives: row by row or, of many rows, as exact sums."""
    if op not in ("sum", "avg") or sum(map(len, parts)) <= 200:
        return expected(parts, op, narrow)
    dtype = parts[0].values.dtype
    keys, places = torch.cat([each.indices for each in parts]).unique(return_inverse=True)
    values = torch.cat([each.values for each in parts])
    values = values.double() if dtype.is_floating_point else values.long()
    total = values.new_zeros(len(keys), *values.shape[1:]).index_add_(0, places, values)
    return weft.Rows(keys, (total / len(parts) if op == "avg" else total).to(dtype))


class Program:
    """One rank's side of one program."""

    def __init__(self, wire: weft.Wire, groups: Sequence[Group], seed: int) -> None:
        self.rank, self.size, self.groups, self.seed = wire.rank, wire.size, groups, seed
        self.drawn = random.Random(seed)  # the same on all ranks
        self.own = random.Random(f"{seed}, rank {wire.rank}")
        self.later: list[tuple[Any, Check]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []  # results, and what they were
        self.calls = 0

    def run(self) -> None:
        steps = [step for step, weight in STEPS for _ in range(weight)]
        for number in range(self.drawn.randint(4, 12)):
            step = self.drawn.choice(steps)
            try:
                step(self)
            except Exception as error:
                error.add_note(f"program {self.seed}, step {number}: {step.__name__}")
                raise
        while self.later:
            self.settle()
        self.look()

    def look(self) -> None:
        for result, was in self.kept:
            same(result, was)

    def settle(self) -> None:
        """Wait for some call that is under way."""
        if self.later:
            work, check = self.later.pop(self.own.randrange(len(self.later)))
            self.use(check(work.wait()))

    def take(self, result: Any, check: Check, later: bool) -> None:
        """A call was made."""
        self.calls += 1
        if later:
            self.later.append((result, check))
        else:
            self.use(check(result))

    def use(self, results: list[Tensor]) -> None:
        """What users do with results."""
        match self.own.choice(("drop", "keep", "write", "pickle", "save")):
            case "keep":
                self.kept += [(each, each.clone()) for each in results]
            case "write":
                for each in results:
                    each.fill_(1)
            case "pickle":
                for each, back in zip(results, pickle.loads(pickle.dumps(results)), strict=True):
                    same(back, each)
            case "save":
                file = io.BytesIO()
                torch.save(results, file)
                file.seek(0)
                for each, back in zip(results, torch.load(file), strict=True):
                    same(back, each)

    def table(self, ranks: int, op: str, dtype: torch.dtype, narrow: bool) -> list[weft.Rows]:
        """The rows of each rank: few where a sum of many could not be exact."""
        pick, draw = self.drawn.choice, torch.Generator().manual_seed(self.drawn.getrandbits(40))
        few = narrow or dtype in HALF or op not in ("sum", "avg")
        most = pick((0, 1, 7, 30)) if few else pick((0, 1, 30, 400, 3000, 12_000))
        shape = pick(((), (1,), (3,), (2, 2), (16,), (0,)) + (((64,),) if most < 3000 else ()))
        height = pick((None, 50, 2000, 10**6, 2**31 - 1))
        index = pick((torch.int32, torch.int64))
        low, high = (-1, 2) if few else (-4, 5)
        if dtype in (torch.uint8, torch.bool) or op == "prod":
            low, high = (1, 3) if op == "prod" else (0, 2)
        parts = []
        for _ in range(ranks):
            count = pick((0, most // 2, most, most))
            indices = torch.randint(height or 5000, (count,), generator=draw).to(index)
            values = torch.randint(low, high, (count, *shape), generator=draw).to(dtype)
            parts.append(weft.Rows(indices, values, height))
        return parts

    def kind(self) -> tuple[str, torch.dtype]:
        """An op, and a dtype that it takes."""
        dtype = self.drawn.choice(DTYPES)
        able = [name for name, op in OPS.items() if not op.refuses(dtype)]
        return self.drawn.choice(able), dtype

    def sparse(self) -> None:
        """One of the sparse collectives."""
        pick = self.drawn.choice
        (group, ranks), (op, dtype), later = pick(self.groups), self.kind(), pick((True, False))
        name = pick(("all_reduce",) * 3 + ("all_gather", "broadcast", "reduce", "reduce_scatter"))
        wide = dtype in (torch.float32, torch.float64)
        narrow = pick((None, None, *HALF)) if wide else None
        parts = self.table(len(ranks), op, dtype, narrow is not None)
        root, form = pick(range(len(ranks))), pick(("pair", "rows", "coo"))
        low = all(each.height in (50, 2000) for each in parts) and form != "pair"
        usable = sorted(ALGORITHMS) if low else sorted(ALGORITHMS.keys() - {"dense_tail"})
        algorithm = pick(["auto"] * len(usable) + usable)
        bounds = [0, *sorted(self.drawn.sample(range(1, 5000), len(ranks) - 1)), 2**31]
        if self.rank not in ranks:
            return
        me = ranks.index(self.rank)
        options: dict[str, Any] = {"group": group, "async_op": later, "wire_dtype": narrow}
        if name in ("all_reduce", "reduce", "reduce_scatter"):
            want = oracle(parts, op, narrow)
            options["op"] = op
        else:
            chosen = parts if name == "all_gather" else [parts[root]]
            indices, values = zip(*((each.indices, each.values) for each in chosen), strict=True)
            want = weft.Rows(torch.cat(indices), torch.cat(values))
        if name == "all_reduce":
            options["algorithm"] = algorithm
        if name == "reduce_scatter":
            options["ranges"] = bounds
            there = want.indices.long()
            mine = (there >= bounds[me]) & (there < bounds[me + 1])
            want = weft.Rows(want.indices[mine], want.values[mine])
        if name in ("broadcast", "reduce"):
            options["group_src" if name == "broadcast" else "group_dst"] = root
        given = None if name == "broadcast" and me != root else formed(parts[me], form)
        result = getattr(weft, f"sparse_{name}")(given, **options)
        nothing = name == "reduce" and me != root
        self.take(result, functools.partial(held_against, None if nothing else want), later)

    def tables(self) -> None:
        """A list of tables, of several dtypes."""
        pick = self.drawn.choice
        (group, ranks), later, op = pick(self.groups), pick((True, False)), pick(("sum", "max"))
        several = [
            self.table(len(ranks), op, pick(DTYPES[:-1]), False) for _ in range(pick((1, 2, 5)))
        ]
        if self.rank in ranks:
            mine = [parts[ranks.index(self.rank)] for parts in several]
            wants = [oracle(parts, op, None) for parts in several]

            def check(results: list[weft.Rows]) -> list[Tensor]:
                pairs = zip(wants, results, strict=True)
                return [part for want, got in pairs for part in held_against(want, got)]

            self.take(weft.sparse_all_reduce(mine, op, group, later), check, later)

    def dense(self) -> None:
        """An all-reduce, or a barrier."""
        (group, ranks), (op, dtype) = self.drawn.choice(self.groups), self.kind()
        count = self.drawn.choice(SIZES)
        if self.rank not in ranks:
            return
        if dtype is torch.bool or (op == "prod" and dtype in HALF):
            weft.barrier(group=group)
            return
        base = torch.arange(count) % 3 + 1
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        wide = wide if dtype.is_floating_point else torch.int64
        each = [(base + number % 2).to(wide) for number in range(len(ranks))]
        want = functools.reduce(OPS["sum" if op == "avg" else op].function, each)
        want = (want / len(ranks) if op == "avg" else want).to(dtype)
        result = weft.all_reduce(each[ranks.index(self.rank)].to(dtype), op, group)
        self.take(result, lambda got: [same(got, want) or got], False)

    def to_all(self) -> None:
        """An all-to-all of any shapes."""
        pick = self.drawn.choice
        group, ranks = pick(self.groups)
        dtype = pick((torch.uint8, torch.bool, torch.float16, torch.int64, torch.complex64))
        shapes = [[pick(((pick(SIZES),), (3, pick((0, 5)), 2), ())) for _ in ranks] for _ in ranks]
        if self.rank in ranks:
            me = ranks.index(self.rank)
            mine = [torch.full(shapes[me][to], me + to).to(dtype) for to in range(len(ranks))]
            wants = [torch.full(of[me], sender + me).to(dtype) for sender, of in enumerate(shapes)]

            def check(came: list[Tensor]) -> list[Tensor]:
                for got, want in zip(came, wants, strict=True):
                    same(got, want)
                return came

            self.take(weft.all_to_all(mine, group), check, False)

    def layer(self) -> None:
        """A layer on grids of some of the ranks, forward and backward."""
        pick, every = self.drawn.choice, range(self.size)

        def grid() -> weft.Partition:
            count = self.drawn.randint(1, self.size)
            rows = pick([each for each in range(1, count + 1) if count % each == 0])
            return weft.Partition((rows, count // rows), ranks=self.drawn.sample(every, count))

        source, target, dim = grid(), grid(), pick((0, 1))
        shape = pick((5, 64, 300)) + self.size, pick((6, 30)) + self.size
        whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        name = pick(("Repartition", "AllGather", "AllSumReduce", "HaloExchange"))
        made: dict[str, Any] = {
            "Repartition": lambda: weft.nn.Repartition(source, target),
            "AllGather": lambda: weft.nn.AllGather(source, dim),
            "AllSumReduce": lambda: weft.nn.AllSumReduce(source, dim),
            "HaloExchange": lambda: weft.nn.HaloExchange(source, 1),
        }
        layer, times = made[name](), pick((1, 4))  # the third time it is a habit
        for _ in range(times):
            mine, want = self._sides(name, source, target, dim, whole)
            x = mine.clone().requires_grad_()
            y = layer(x)
            same(y.detach(), want)
            weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) % 7
            (y * weights).sum().backward()
            dots = torch.stack([(want * weights).sum(), (mine * x.grad).sum()])
            there, back = weft.all_reduce(dots).tolist()
            assert there == back, "the layer's backward is not its adjoint"
            self.calls += 3

    def _sides(
        self, name: str, source: weft.Partition, target: weft.Partition, dim: int, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What this rank brings to a layer, and what it must get."""
        nothing = torch.empty(0, dtype=whole.dtype)
        shape = tuple(whole.shape)
        mine = whole[source.box(shape).slices] if source.active else nothing
        if name == "Repartition":
            return mine, whole[target.box(shape).slices] if target.active else nothing
        if not source.active:
            return nothing, nothing
        box = source.box(shape)
        if name == "AllGather":
            where = [slice(None) if each == dim else box.slices[each] for each in range(2)]
            return mine, whole[tuple(where)]
        if name == "AllSumReduce":  # of equal shapes: those along the other dimension
            where = [slice(0, 4) if each == dim else box.slices[each] for each in range(2)]
            return whole[tuple(where)], whole[tuple(where)] * source.shape[dim]
        padded = torch.nn.functional.pad(
            whole, [width for cells in source.shape[::-1] for width in [int(cells > 1)] * 2]
        )
        grown = [
            slice(start, stop + 2 * (cells > 1))
            for start, stop, cells in zip(box.start, box.stop, source.shape, strict=True)
        ]
        return mine, padded[tuple(grown)]

    def gradients(self) -> None:
        """Gradients of a sparse table and a dense layer."""
        model = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(50, 4, sparse=True), "dense": torch.nn.Linear(30, 40)}
        )
        model["table"](torch.tensor([self.rank, 40, 40])).sum().backward()
        model["dense"](torch.full((1, 30), self.rank + 1.0)).sum().backward()
        weft.sync_grads(model, average=False)
        self.calls += 1
        want = torch.zeros(50, 4)
        want[: self.size] = 1
        want[40] = 2 * self.size
        same(model["table"].weight.grad.to_dense(), want)
        total = self.size * (self.size + 1) / 2
        same(model["dense"].weight.grad, torch.full((40, 30), total))

    def wrong(self) -> None:
        """An argument that is wrong on one rank: all are told, and nothing else changes."""
        culprit = self.drawn.randrange(self.size)
        index = -1 if self.rank == culprit else 1
        try:
            weft.sparse_all_reduce((torch.tensor([index]), torch.ones(1, 2)))
        except weft.WeftError as error:
            assert f"rank {culprit}: index -1 is negative" in str(error)
        else:
            raise AssertionError("nothing was raised")
        self.calls += 1


STEPS: tuple[tuple[Callable[[Program], None], int], ...] = (
    (Program.sparse, 6),
    (Program.tables, 2),
    (Program.dense, 2),
    (Program.to_all, 2),
    (Program.layer, 2),
    (Program.settle, 2),
    (Program.gradients, 1),
    (Program.wrong, 1),
)
"""What a program may do, and how often."""


def formed(rows: weft.Rows, form: str) -> Any:
    if form == "coo" and rows.height is not None:
        size = (rows.height, *rows.row_shape)
        return torch.sparse_coo_tensor(rows.indices[None], rows.values, size, check_invariants=True)
    return rows if form == "rows" else (rows.indices, rows.values)


def held_against(want: weft.Rows | None, got: Any) -> list[Tensor]:
    if want is None:
        assert got is None
        return []
    if isinstance(got, Tensor):
        indices, values = got._indices()[0], got._values()
        want = weft.Rows(want.indices.long(), want.values)
    else:
        indices, values = (got.indices, got.values) if isinstance(got, weft.Rows) else got
    same(indices, want.indices)
    same(values, want.values)
    return [indices, values]


def programs(wire: weft.Wire, first: int, count: int) -> tuple[Told, list[tuple[Tensor, Tensor]]]:
    """Run programs on one rank; what the last ones kept comes along."""
    every = tuple(range(wire.size))
    chosen = [every[::-1], every[1:]] if wire.size > 2 else [every[::-1]]
    parts = [(wire.sub(ranks), ranks) for ranks in chosen]
    groups: list[Group] = [(None, every), *parts]
    start, calls, kept = State.now(), 0, []
    for number in range(count):
        program = Program(wire, groups, first + number)
        program.run()
        calls += program.calls
        kept = (kept + program.kept)[-20:]
        if number == count // 10:
            start = State.now()
    told = Told(count, calls, start, State.now())
    for part, _ in parts:
        if part is not None:
            part.close()
    return told, kept


def whole(wire: str, first: int, count: int) -> Told:
    """The program of a rank that is a process, from its start to its end."""
    if wire == "tcp":
        os.environ["WEFT_HOST"] = os.environ["RANK"]
    with weft.init(timeout=120) as group:
        told, kept = programs(group, first, count)
        elsewhere(kept)
    elsewhere(kept)
    return told


def elsewhere(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Results are used in other processes, and afterwards here."""

    def look() -> bool:
        return all(torch.equal(result, was) for result, was in kept)

    for fork in (os.fork, ctypes.PyDLL(None).fork):  # the latter without Python's knowledge
        if (child := fork()) == 0:
            os._exit(0 if look() else 1)
        assert os.waitpid(child, 0)[1] == 0
    some = [(result, was) for result, was in kept if result.dim() and len(result)][:3]
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        for back, (_, was) in zip(pool.map(copied, [each for each, _ in some]), some, strict=True):
            same(back, was)
    for result, was in some:
        loader = DataLoader(
            TensorDataset(result), batch_size=64, num_workers=1, multiprocessing_context=context
        )
        same(torch.cat([each for [each] in loader]), was)
    assert look()


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone()


def world(name: str, first: int, count: int, limit: float) -> list[Told]:
    """Run programs in a world; what each rank did."""
    wire, size = name.split("-")
    if wire == "threads":
        return [told for told, _ in run(int(size), programs, first, count, limit=limit)]
    env = {"WEFT_TRANSPORT": "torch"} if wire == "torch" else {}
    return processes(int(size), whole, wire, first, count, env=env, timeout=limit)


def large(wire: str, what: str) -> Told:
    """The program of a rank that does something large."""
    if wire == "tcp":
        os.environ["WEFT_HOST"] = os.environ["RANK"]
    with weft.init(timeout=300) as group:
        few = torch.tensor([group.rank, 7]), torch.ones(2, 8)
        for _ in range(1000):
            weft.sparse_all_reduce(few)
        start, calls = State.now(), 1
        if what == "message":
            count = (2 << 30) + 4099
            nothing = torch.empty(0, dtype=torch.uint8)
            mine = torch.arange(251, dtype=torch.uint8).repeat(count // 251 + 1)[:count]
            [came, _] = weft.all_to_all([nothing, nothing if group.rank else mine])
            assert not group.rank or torch.equal(came, mine)
        elif what == "result":
            rows, width = 33_000, 1 << 16
            indices = torch.arange(group.rank, rows, 2)
            values = indices.to(torch.int8)[:, None].expand(-1, width).contiguous()
            total = weft.sparse_all_reduce((indices, values))
            assert total[1].shape == (rows, width) and total[1].numel() > 1 << 31
            assert torch.equal(total[1].amin(1), torch.arange(rows).to(torch.int8))
            assert torch.equal(total[1].amax(1), torch.arange(rows).to(torch.int8))
        else:
            calls = 100_000
            for _ in range(calls):
                indices, values = weft.sparse_all_reduce(few)
            assert indices.tolist() == [0, 1, 7] and values.sum() == 32
        return Told(1, calls, start, State.now())


def main(
    programs: Annotated[int, typer.Option(help="How many, in all worlds together.")] = 10_000,
    first: Annotated[int, typer.Option(help="The first one's number.")] = 1000,
    only: Annotated[str, typer.Option("--world", help="Worlds, divided by commas.")] = "",
    is_large: Annotated[bool, typer.Option("--large", help="What is large, in place.")] = False,
) -> None:
    """Run random programs, and see what a process has of them afterwards."""
    torch.set_num_threads(1)
    worlds = [each for each in WORLDS if not only or each in only.split(",")]
    done: list[tuple[str, float, list[Told]]] = []
    if is_large:
        for wire, what in product(("shm", "tcp"), ("message", "result", "calls")):
            since = time.monotonic()
            ranks = processes(2, large, wire, what, timeout=1800)
            done.append((f"{wire}-2, {what}", time.monotonic() - since, ranks))
    for number, name in enumerate(() if is_large else worlds):
        count, since = len(range(number, programs, len(worlds))), time.monotonic()
        ranks = world(name, first, count, 36_000.0)
        first += count
        done.append((name, time.monotonic() - since, ranks))
        print(f"{name}: {count} programs", flush=True)
    show(done)
    grown = [
        name
        for name, _, ranks in done
        if any(told.has_grown(len(ranks) if "threads" in name else 1) for told in ranks)
    ]
    raise typer.Exit(bool(grown) and not is_large)


def show(done: Sequence[tuple[str, float, Sequence[Told]]]) -> None:
    """A line for each world, of the rank that has grown most."""
    table = Table("world", "programs", "calls", "seconds", "MiB", "descriptors", "threads")
    for name, seconds, ranks in done:
        worst = max(ranks, key=lambda told: told.end.memory - told.start.memory)
        start, end = worst.start, worst.end
        table.add_row(
            name,
            f"{worst.programs:,}",
            f"{sum(told.calls for told in ranks) // len(ranks):,}",
            f"{seconds:.0f}",
            f"{start.memory // MIB} to {end.memory // MIB}",
            f"{start.files} to {end.files}",
            f"{start.threads} to {end.threads}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
