"""Run random programs, calls of all kinds one after the other; compare them with one process.

    python benchmarks/soak.py                          # 10,000 programs; `make soak` does the same
    python benchmarks/soak.py --programs 500 --first 20000 --world shm-4,tcp-3
    python benchmarks/soak.py --world shm-4 --program "..."     # one that failed: its error has it
    python benchmarks/soak.py --large                           # large calls; needs 12 GiB

A program is some ten steps, which `drawn_step` draws: from a seed here, by hypothesis in
tests/test_mixture.py. The steps are sparse collectives of every kind, op, dtype and form, lists of
tables, dense collectives, layers on grids of some of the ranks, gradients, and arguments that are
wrong on one rank. They run on the whole group and on parts of it. Each rank waits for asynchronous
calls in another order. Values are small integers, so sums are exact in any order. Results are kept
and compared again later, written to, pickled, saved and loaded. If the ranks are processes, results
also go through multiprocessing, a DataLoader's worker and forked children, and are used after
shutdown.

A world is a wire and a number of ranks: `threads`, `shm` (processes of one host) or `tcp` (each
rank as if on a host of its own). A line has the memory, descriptors
and threads of the rank whose memory grew most: after a quarter of the programs, and before the last
three. At these moments no results are held, workspaces are freed, and WEFT_KEEP=0 keeps no past
results. The exit status is 1 if descriptors or threads of a rank have increased, or its memory by
more than 32 MiB.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import functools
import gc
import io
import math
import multiprocessing
import os
import pickle
import random
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.base.pace import patient
from weft.kernels.ops import DTYPES, OPS
from weft.sparse import ALGORITHMS
from weft.testing import expected, processes, run

WORLDS = ("threads-2", "threads-3", "threads-4", "threads-7", "shm-2", "shm-3", "shm-4")
WORLDS += ("tcp-3", "tcp-4")
SIZES = (0, 1, 100, 5000, 20_000, 40_000, 70_000, 140_000, 300_000)  # both sides of thresholds
HALF = (torch.float16, torch.bfloat16)
MIB = 1 << 20
SPARE_MIB = 32
M_ARENA_MAX = -8  # of mallopt(3)
SOON = 3.0  # seconds that a wait may last where ranks call in crossed orders
HELD = 10  # programs whose results live on while others run
LOOKING = threading.Lock()  # to look opens files

Step = tuple[str, dict[str, Any]]
"""What a step is called in `Program`, and what it is given: plain data."""
Drawn = tuple[int, list[Step]]
"""A program: a seed of what each rank decides for itself, then its steps."""
Check = Callable[[Any], list[Tensor]]
"""Holds a result against what it must be; its tensors."""


@dataclass(frozen=True, slots=True)
class State:
    """What a process has: bytes of memory, descriptors, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls, groups: Sequence[weft.Group]) -> State:
        """While nobody has results, and these groups are at rest."""
        weft.barrier(group=groups[0])
        for group in groups:
            group.memory.drain()
            if segment := getattr(group.wire, "segment", None):
                segment.drain()
        gc.collect()  # it returns at once where another thread collects
        weft.barrier(group=groups[0])  # ranks may be threads of one process
        ctypes.CDLL(None).malloc_trim(0)
        with LOOKING:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            counts = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
        state = cls(pages * os.sysconf("SC_PAGE_SIZE"), *counts)
        weft.barrier(group=groups[0])
        return state


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank has done, and what its process had, first after a quarter of it."""

    programs: int
    calls: int
    start: State
    end: State

    @property
    def has_grown(self) -> bool:
        start, end = self.start, self.end
        more = end.files > start.files or end.threads > start.threads
        return more or end.memory > start.memory + SPARE_MIB * MIB


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
    """One rank's side of one program.

    Attributes:
        group: of all ranks.
        groups: what a call is given as its group, by the ranks that are in it, but for subsets.
        kept: results, and what they were.
    """

    def __init__(self, group: weft.Group, groups: Mapping[tuple[int, ...], Any], seed: int) -> None:
        self.group, self.rank, self.size, self.groups = group, group.rank, group.size, groups
        self.own = random.Random(f"{seed}, rank {group.rank}")
        self.later: list[tuple[Any, Check]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.calls = 0

    def run(self, steps: Sequence[Step]) -> None:
        for number, (name, given) in enumerate(steps):
            try:
                getattr(self, name)(**given)
            except Exception as error:
                error.add_note(f"step {number} on rank {self.rank}: {name}")
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

    def among(self, ranks: tuple[int, ...]) -> Any:
        """What a call of these ranks is given as its group.

        Of a subset it is whatever this rank thinks of: the subset, or a subset of another one.
        """
        if ranks in self.groups:
            return self.groups[ranks]
        backwards = self.group.subset(ranks[::-1])
        again = backwards.subset(range(len(ranks))[::-1])
        return self.own.choice((self.group.subset(ranks), again))

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

    def sparse(
        self,
        name: str,
        group: tuple[int, ...],
        table: dict[str, Any],
        op: str,
        wire_dtype: str | None,
        root: int,
        form: str,
        algorithm: str,
        bounds: list[int],
        later: bool,
    ) -> None:
        """One of the sparse collectives."""
        if self.rank not in group:
            return
        parts, me = rows_of(**table), group.index(self.rank)
        narrow = None if wire_dtype is None else getattr(torch, wire_dtype)
        options = {"group": self.among(group), "async_op": later, "wire_dtype": narrow}
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

    def tables(
        self, group: tuple[int, ...], several: list[dict[str, Any]], op: str, later: bool
    ) -> None:
        """A list of tables, of several dtypes."""
        if self.rank in group:
            parts = [rows_of(**table) for table in several]
            mine = [each[group.index(self.rank)] for each in parts]
            wants = [oracle(each, op, None) for each in parts]

            def check(results: list[weft.Rows]) -> list[Tensor]:
                pairs = zip(wants, results, strict=True)
                return [part for want, got in pairs for part in held_against(want, got)]

            result = weft.sparse_all_reduce(mine, op, self.among(group), later)
            self.take(result, check, later)

    def dense(self, group: tuple[int, ...], op: str, dtype: str, count: int) -> None:
        """An all-reduce, or a barrier."""
        if self.rank not in group:
            return
        kind = getattr(torch, dtype)
        if kind is torch.bool or (op == "prod" and kind in HALF):
            weft.barrier(group=self.among(group))
            return
        base = torch.arange(count) % 3 + 1
        wide = torch.float64 if kind is torch.float64 else torch.float32
        wide = wide if kind.is_floating_point else torch.int64
        each = [(base + number % 2).to(wide) for number in range(len(group))]
        want = functools.reduce(OPS["sum" if op == "avg" else op].function, each)
        want = (want / len(group) if op == "avg" else want).to(kind)
        result = weft.all_reduce(each[group.index(self.rank)].to(kind), op, self.among(group))
        self.take(result, lambda got: [same(got, want) or got], False)

    def to_all(self, group: tuple[int, ...], shapes: list[list[Any]], dtype: str) -> None:
        """An all-to-all of any shapes."""
        if self.rank in group:
            me, kind = group.index(self.rank), getattr(torch, dtype)
            mine = [torch.full(shape, me + to).to(kind) for to, shape in enumerate(shapes[me])]
            wants = [torch.full(of[me], sender + me).to(kind) for sender, of in enumerate(shapes)]

            def check(came: list[Tensor]) -> list[Tensor]:
                for got, want in zip(came, wants, strict=True):
                    same(got, want)
                return came

            self.take(weft.all_to_all(mine, self.among(group)), check, False)

    def layer(
        self, name: str, grids: list[Any], dim: int, shape: tuple[int, int], times: int
    ) -> None:
        """A layer on grids of some of the ranks, forward and backward."""
        group = self.groups[tuple(range(self.size))]
        source, target = (weft.Partition(each, ranks=ranks, group=group) for each, ranks in grids)
        whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        made: dict[str, Any] = {
            "Repartition": lambda: weft.nn.Repartition(source, target),
            "AllGather": lambda: weft.nn.AllGather(source, dim),
            "AllSumReduce": lambda: weft.nn.AllSumReduce(source, dim),
            "HaloExchange": lambda: weft.nn.HaloExchange(source, 1),
        }
        layer = made[name]()
        for _ in range(times):
            mine, want = self._sides(name, source, target, dim, whole)
            x = mine.clone().requires_grad_()
            y = layer(x)
            same(y.detach(), want)
            weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) % 7
            (y * weights).sum().backward()
            dots = torch.stack([(want * weights).sum(), (mine * x.grad).sum()])
            there, back = weft.all_reduce(dots, group=group).tolist()
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
        weft.sync_grads(model, average=False, group=self.groups[tuple(range(self.size))])
        self.calls += 1
        want = torch.zeros(50, 4)
        want[: self.size] = 1
        want[40] = 2 * self.size
        same(model["table"].weight.grad.to_dense(), want)
        total = self.size * (self.size + 1) / 2
        same(model["dense"].weight.grad, torch.full((40, 30), total))

    def wrong(self, culprit: int) -> None:
        """An argument that is wrong on one rank: all are told, and nothing else changes."""
        rows = torch.tensor([-1 if self.rank == culprit else 1]), torch.ones(1, 2)
        try:
            weft.sparse_all_reduce(rows, group=self.groups[tuple(range(self.size))])
        except weft.WeftError as error:
            assert f"rank {culprit}: index -1 is negative" in str(error)
        else:
            raise AssertionError("nothing was raised")
        self.calls += 1

    def crossed(self, verbs: tuple[str, str], first: list[int], subset: tuple[int, ...]) -> None:
        """A call on a group and one on its subset, which some ranks make first."""
        group = self.group.split(range(self.size))
        assert group is not None
        group.set_timeout(patient(SOON))
        calls = [(verbs[0], group)]
        if self.rank in subset:
            calls.insert(self.rank not in first, (verbs[1], group.subset(subset)))
        text = ""
        with group:
            try:
                weft.barrier(group=group)  # else one that is slow to join is told of it there
                for verb, of in calls:
                    VERBS[verb](of)
            except weft.WireError as error:
                text = str(error)
        if len({rank in first for rank in subset}) == 1:
            assert not text, text
        else:
            told = [f"of all {self.size} ranks", f"of {listed(subset)}", "in the same order"]
            assert all(each in text for each in told), text or "nothing was raised"
        self.calls += 2


def listed(ranks: Sequence[int]) -> str:
    """The ranks as errors have them."""
    return f"ranks {', '.join(map(str, ranks))}"


def summed(group: weft.Group, count: int) -> None:
    """A sparse sum in which each rank has a row of its own, and others that all have."""
    indices = torch.cat([torch.arange(count), torch.tensor([count + group.rank])])
    rows = weft.Rows(indices, torch.ones(len(indices), 4))
    total = weft.sparse_all_reduce(rows, group=group)
    assert total.values.sum() == 4 * group.size * (count + 1)


def reduced(group: weft.Group) -> None:
    total = weft.all_reduce(torch.tensor([10.0**group.rank]), group=group)
    assert total == (10**group.size - 1) // 9


VERBS: dict[str, Callable[[weft.Group], object]] = {
    "barrier": lambda group: weft.barrier(group=group),
    "all_reduce": reduced,
    "all_to_all": lambda group: weft.all_to_all([torch.ones(2)] * group.size, group),
    "broadcast": lambda group: weft.sparse_broadcast(
        weft.Rows(torch.ones(1).int(), torch.ones(1)), 0, group
    ),
    "few rows": functools.partial(summed, count=3),
    "many rows": functools.partial(summed, count=9000),
}
"""Calls that a group and its subset make in crossed orders."""


def drawn(seed: int, size: int) -> Drawn:
    """The program of that seed, for so many ranks."""
    source = random.Random(seed)
    return seed, [drawn_step(source, size) for _ in range(source.randint(4, 12))]


def drawn_step(source: random.Random, size: int) -> Step:
    """A step; hypothesis shrinks it towards what stands first here."""
    name = source.choice([name for name, weight in STEPS.items() for _ in range(weight)])
    return name, getattr(Draw(source, size), name)()


STEPS = {
    "wrong": 1,
    "settle": 2,
    "dense": 2,
    "to_all": 2,
    "sparse": 6,
    "tables": 2,
    "gradients": 1,
    "layer": 2,
    "crossed": 1,
}
"""What a program may do, and how often."""


class Draw:
    """Draws what the steps of a program are given; of each name there is one in `Program`."""

    def __init__(self, source: random.Random, size: int) -> None:
        self.source, self.pick, self.size = source, source.choice, size

    def settle(self) -> dict[str, Any]:
        return {}

    gradients = settle

    def wrong(self) -> dict[str, Any]:
        return {"culprit": self.source.randrange(self.size)}

    def kind(self) -> tuple[str, torch.dtype]:
        """An op, and a dtype that it takes."""
        dtype = self.pick(DTYPES)
        return self.pick([name for name, op in OPS.items() if not op.refuses(dtype)]), dtype

    def table(
        self, ranks: int, op: str, dtype: torch.dtype, narrow: bool = False
    ) -> dict[str, Any]:
        """The rows of each rank: few where a sum of many could not be exact, seldom megabytes."""
        pick = self.pick
        few = narrow or dtype in HALF or op not in ("sum", "avg")
        most = pick((0, 1, 7, 30)) if few else pick((0, 1, 30, 400, 3000, 12_000))
        shape = pick(((), (1,), (3,), (2, 2), (16,), (0,)) + (((64,),) if most < 3000 else ()))
        if not few and self.source.randrange(30) == 29:
            most, shape = 20_000, (64,)
        low, high = (-1, 2) if few else (-4, 5)
        if dtype in (torch.uint8, torch.bool) or op == "prod":
            low, high = (1, 3) if op == "prod" else (0, 2)
        return {
            "counts": [pick((0, most // 2, most, most)) for _ in range(ranks)],
            "shape": shape,
            "dtype": str(dtype)[6:],
            "index": pick(("int32", "int64")),
            "height": pick((None, 50, 2000, 10**6, 2**31 - 1)),
            "between": (low, high),
            "seed": self.source.randrange(1000),
        }

    def sparse(self) -> dict[str, Any]:
        pick, group, (op, dtype) = self.pick, self.pick(called(self.size)), self.kind()
        wide = dtype in (torch.float32, torch.float64)
        narrow = pick((None, None, "float16", "bfloat16")) if wide else None
        table = self.table(len(group), op, dtype, narrow is not None)
        form = pick(("pair", "rows", "coo"))
        names = ("all_reduce",) * 3 + ("all_gather", "broadcast", "reduce", "reduce_scatter")
        return {
            "name": pick(names),
            "group": group,
            "table": table,
            "op": op,
            "wire_dtype": narrow,
            "root": pick(range(len(group))),
            "form": form,
            "algorithm": pick(["auto", "auto", "auto", *sorted(ALGORITHMS)]),
            "bounds": [0, *sorted(self.source.sample(range(1, 5000), len(group) - 1)), 2**31],
            "later": pick((False, True)),
        }

    def tables(self) -> dict[str, Any]:
        group, op, count = self.pick(called(self.size)), self.pick(("sum", "max")), (1, 2, 5)
        dtypes = [self.pick(DTYPES[:-1]) for _ in range(self.pick(count))]
        several = [self.table(len(group), op, dtype) for dtype in dtypes]
        return {"group": group, "several": several, "op": op, "later": self.pick((False, True))}

    def dense(self) -> dict[str, Any]:
        group, (op, dtype) = self.pick(called(self.size)), self.kind()
        return {"group": group, "op": op, "dtype": str(dtype)[6:], "count": self.pick(SIZES)}

    def to_all(self) -> dict[str, Any]:
        group = self.pick(called(self.size))
        shapes = [
            [self.pick(((self.pick(SIZES),), (3, self.pick((0, 5)), 2), ())) for _ in group]
            for _ in group
        ]
        dtype = self.pick(("uint8", "bool", "float16", "int64", "complex64"))
        return {"group": group, "shapes": shapes, "dtype": dtype}

    def crossed(self) -> dict[str, Any]:
        members = self.source.sample(range(self.size), self.source.randint(2, self.size))
        if members == sorted(members) and len(members) == self.size:
            members.reverse()  # else it is the group itself
        return {
            "verbs": (self.pick([*VERBS]), self.pick([*VERBS])),
            "first": [rank for rank in members if self.pick((True, False))],
            "subset": tuple(members),
        }

    def layer(self) -> dict[str, Any]:
        return {
            "name": self.pick(("Repartition", "AllGather", "AllSumReduce", "HaloExchange")),
            "grids": [self.grid(), self.grid()],
            "dim": self.pick((0, 1)),
            "shape": (self.pick((5, 64, 300)) + self.size, self.pick((6, 30)) + self.size),
            "times": self.pick((1, 4)),  # the third time it is a habit
        }

    def grid(self) -> tuple[tuple[int, int], list[int]]:
        count = self.source.randint(1, self.size)
        rows = self.pick([each for each in range(1, count + 1) if count % each == 0])
        return (rows, count // rows), self.source.sample(range(self.size), count)


def groups_of(size: int) -> list[tuple[int, ...]]:
    """The ranks of each group that programs call, but for subsets."""
    every = tuple(range(size))
    return [every, every[::-1], every[1:]] if size > 2 else [every, every[::-1]]


def called(size: int) -> list[tuple[int, ...]]:
    """The ranks of each group that programs call."""
    every = tuple(range(size))
    return [*groups_of(size), every[:-1], (*every[1:], 0)]


def rows_of(
    counts: Sequence[int],
    shape: Sequence[int],
    dtype: str,
    index: str,
    height: int | None,
    between: tuple[int, int],
    seed: int,
) -> list[weft.Rows]:
    """The rows of each rank."""
    draw, parts = torch.Generator().manual_seed(seed), []
    for count in counts:
        indices = torch.randint(height or 5000, (count,), generator=draw)
        values = torch.randint(*between, (count, *shape), generator=draw)
        rows = indices.to(getattr(torch, index)), values.to(getattr(torch, dtype))
        parts.append(weft.Rows(*rows, height))
    return parts


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


Kept = list[tuple[Tensor, Tensor]]


@contextlib.contextmanager
def groups_on(
    whole: weft.Group, default: weft.Group | None = None
) -> Iterator[dict[tuple[int, ...], Any]]:
    """What calls are given as their groups; the whole is the default group, or is given as one."""
    first, *others = groups_of(whole.size)
    with contextlib.ExitStack() as after:
        groups: dict[tuple[int, ...], Any] = {first: default}
        for ranks in others:
            groups[ranks] = whole.split(ranks)
            if groups[ranks] is not None:
                after.callback(groups[ranks].close)
        yield groups


def ran(
    group: weft.Group, groups: Mapping[tuple[int, ...], Any], name: str, drawn: Drawn
) -> Program:
    """A program that has run, as of a world."""
    program = Program(group, groups, drawn[0])
    try:
        program.run(drawn[1])
    except Exception as error:
        again = shlex.quote(repr(drawn).replace("'", '"'))
        error.add_note(f"again: python benchmarks/soak.py --world {name} --program {again}")
        raise
    return program


def programs(group: weft.Group, name: str, several: Sequence[Drawn]) -> tuple[Told, Kept]:
    """Run programs on one rank; what the last three kept comes along."""
    calls, states = 0, []
    held: deque[Program] = deque()  # the last ones, oldest first; no variable has what they kept
    with groups_on(group) as groups:
        for number, each in enumerate(several):
            if number in (len(several) // 4, len(several) - 3):
                held.clear()
                states.append(State.now([group, *filter(None, groups.values())]))
            held.append(ran(group, groups, name, each))
            calls += held[-1].calls
            if len(held) > HELD:
                held.popleft().look()
    kept = [pair for program in held for pair in program.kept]
    return Told(len(several), calls, states[0], states[-1]), kept


def whole(name: str, several: Sequence[Drawn]) -> Told:
    """The program of a rank that is a process, from its start to its end."""
    if name.startswith("tcp"):
        os.environ["WEFT_HOST"] = os.environ["RANK"]
    with weft.init(timeout=120) as group:
        told, kept = programs(group, name, several)
        elsewhere(kept)
    elsewhere(kept)
    return told


def alone(group: weft.Group, name: str, program: Drawn) -> None:
    """Run one program on a group that is kept for others; results outlive its groups."""
    with contextlib.ExitStack() as after:
        own = None
        if name.startswith("tcp"):
            os.environ["WEFT_HOST"] = str(group.rank)
            own = after.enter_context(cast(weft.Group, group.split(range(group.size))))
        with groups_on(own or group, own) as groups:
            kept = ran(own or group, groups, name, program).kept
    for result, was in kept:
        same(result, was)


def tried(name: str, program: Drawn) -> None:
    """Run one program in a world, on ranks that are kept for the next."""
    wire, size = name.split("-")
    run(int(size), alone, name, program, on="threads" if wire == "threads" else "processes")


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
    """Run random programs in a world; what each rank did."""
    wire, size = name.split("-")
    several = [drawn(first + number, int(size)) for number in range(count)]
    os.environ["WEFT_KEEP"] = "0"
    if wire == "threads":
        # One heap: else each thread has its own, and keeps its gaps when their results are gone.
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        return [told for told, _ in run(int(size), programs, name, several, limit=limit)]
    return processes(int(size), whole, name, several, timeout=limit)


def large(wire: str) -> None:
    """The program of a rank that sends a message of more than 2 GiB, and gets a result of more than
    2**31 elements."""
    if wire == "tcp":
        os.environ["WEFT_HOST"] = os.environ["RANK"]
    with weft.init(timeout=300) as group:
        count = (2 << 30) + 4099
        nothing = torch.empty(0, dtype=torch.uint8)
        mine = torch.arange(251, dtype=torch.uint8).repeat(count // 251 + 1)[:count]
        [came, _] = weft.all_to_all([nothing, nothing if group.rank else mine])
        assert not group.rank or torch.equal(came, mine)
        del mine, came
        rows, width = 33_000, 1 << 16
        indices = torch.arange(group.rank, rows, 2)
        values = indices.to(torch.int8)[:, None].expand(-1, width).contiguous()
        total = weft.sparse_all_reduce((indices, values))
        assert total[1].shape == (rows, width) and total[1].numel() > 1 << 31
        for each in (total[1].amin(1), total[1].amax(1)):
            assert torch.equal(each, torch.arange(rows).to(torch.int8))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=10_000, help="in all worlds together")
    parser.add_argument("--first", type=int, default=1000, help="the first one's number")
    parser.add_argument("--world", default=",".join(WORLDS), help="worlds, divided by commas")
    parser.add_argument("--program", help="one, in each world, as an error has it")
    parser.add_argument("--large", action="store_true", help="large calls, in place; needs 12 GiB")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.large:
        for wire in ("shm", "tcp"):
            processes(2, large, wire, timeout=1800)
            print(f"{wire}-2: large calls are right", flush=True)
        return 0
    worlds, first, has_grown = given.world.split(","), given.first, False
    if given.program:
        for name in worlds:
            tried(name, ast.literal_eval(given.program))
        return 0
    for number, name in enumerate(worlds):
        count, since = len(range(number, given.programs, len(worlds))), time.monotonic()
        ranks = world(name, first, count, 36_000.0)
        first += count
        print(line_of(name, time.monotonic() - since, ranks), flush=True)
        has_grown = has_grown or any(told.has_grown for told in ranks)
    return int(has_grown)


def line_of(name: str, seconds: float, ranks: Sequence[Told]) -> str:
    """What a world's ranks had, of the one that has grown most."""
    worst = max(ranks, key=lambda told: told.end.memory - told.start.memory)
    start, end = worst.start, worst.end
    calls = sum(told.calls for told in ranks) // len(ranks)
    return (
        f"{name}: {worst.programs:,} programs, {calls:,} calls, {seconds:.0f} s; "
        f"{start.memory // MIB} to {end.memory // MIB} MiB, "
        f"{start.files} to {end.files} descriptors, {start.threads} to {end.threads} threads"
    )


if __name__ == "__main__":
    import soak  # the name by which other processes find it

    raise SystemExit(soak.main())
