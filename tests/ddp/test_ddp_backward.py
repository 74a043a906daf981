"""Backwards inside of backwards, and one after the other, under `weft.ddp.register`.

Whatever plain DistributedDataParallel takes, `register` takes. All cells of the table are tried in
one group of ranks; weights, inputs and losses are integers, so that gradients must be those of one
rank to the last bit.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from weft import ddp
from weft.base.errors import WeftError
from weft.bootstrap.init import init
from weft.bootstrap.local import launch
from weft.testing.cases import in_case

ONE_THREAD = {"OMP_NUM_THREADS": "1"}

PLACES = (("before",), ("inside",), ("behind",), ("before", "inside", "behind"))
KEPT = ("all", "reentrant", "not reentrant")  # how a block keeps what its backward needs
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}
TOWERS = ("one", "two", "two in turn")  # in turn: a backward for each of two losses
STEPS = ("each", "no_sync", "join")


class Cell(NamedTuple):
    places: tuple[str, ...]
    kept: str
    options: str
    towers: str
    steps: str

    @property
    def is_taken(self) -> bool:
        """Whether plain DistributedDataParallel takes it (torch 2.13); the others it refuses.

        With static_graph and find_unused_parameters all outputs are one node of the graph, which
        has one backward. What is used inside of a reentrant block is unused for it.
        """
        in_turn = self.towers == "two in turn"
        if self.options == "unused" and self.kept == "reentrant":
            return False
        return not (
            in_turn and OPTIONS[self.options].keys() & {"static_graph", "find_unused_parameters"}
        )


class Tower(nn.Module):
    """Tables before, inside and behind a block."""

    def __init__(self, places: tuple[str, ...], kept: str, sparse: bool) -> None:
        super().__init__()
        self.kept = kept
        self.tables = nn.ModuleDict({p: nn.Embedding(20, 4, sparse=sparse) for p in places})
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.unused = ""  # the place of a table that a batch does not use

    def looked_up(self, place: str, words: Tensor, hidden: Tensor) -> Tensor:
        if place not in self.tables or place == self.unused:
            return hidden
        return hidden * self.tables[place](words)

    def block(self, hidden: Tensor, words: Tensor) -> Tensor:
        return self.looked_up("inside", words, self.first(hidden))

    def forward(self, words: Tensor) -> Tensor:
        # a reentrant block needs an input that has a gradient
        hidden = torch.ones(len(words), 4, requires_grad=True)
        hidden = self.looked_up("before", words, hidden)
        if self.kept == "all":
            hidden = self.block(hidden, words)
        else:
            reentrant = self.kept == "reentrant"
            hidden = checkpoint(self.block, hidden, words, use_reentrant=reentrant)
        return self.last(self.looked_up("behind", words, hidden))


class Model(nn.Module):
    def __init__(self, cell: Cell) -> None:
        super().__init__()
        sparse = cell.steps != "join"  # in which torch makes dense zeros of all gradients
        towers = 1 if cell.towers == "one" else 2
        self.towers = nn.ModuleList(Tower(cell.places, cell.kept, sparse) for _ in range(towers))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, words: Tensor) -> tuple[Tensor, ...]:
        return tuple(tower(words + number) for number, tower in enumerate(self.towers))


def words(step: int, rank: int) -> Tensor:
    return torch.randint(15, (3,), generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, batch: Tensor, cell: Cell, factor: int = 1) -> None:
    losses = [output.pow(2).sum() * factor for output in model(batch)]
    if cell.towers == "two in turn":
        for loss in losses:
            loss.backward()
    else:
        sum(losses).backward()


def check_equal(found: nn.Module, wanted: nn.Module) -> None:
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        gradient = torch.zeros_like(other) if other.grad is None else other.grad.to_dense()
        assert torch.equal(mine.grad.to_dense(), gradient), name


def check(cell: Cell) -> None:
    """Two steps, of which the first makes the buckets and the second has them for good."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model(cell)
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, **OPTIONS[cell.options])
    ddp.register(wrapped)
    if cell.steps == "join":
        with wrapped.join():
            for step in range(1 + (rank == 1)):
                wrapped.zero_grad()
                backward(wrapped, words(step, rank), cell, size)
        for each in range(size):
            backward(alone, words(0, each), cell)
        if rank == 1:  # all others have run out of data
            alone.zero_grad()
            backward(alone, words(1, 1), cell)
        check_equal(model, alone)
        return
    for step in range(2):
        wrapped.zero_grad()
        alone.zero_grad()
        accumulates = cell.steps == "no_sync" and step  # static_graph wants its first step whole
        if accumulates:
            with wrapped.no_sync():
                backward(wrapped, words(2, rank), cell, size)
        backward(wrapped, words(step, rank), cell, size)  # times size: so no mean is rounded
        for each in range(size):
            if accumulates:
                backward(alone, words(2, each), cell)
            backward(alone, words(step, each), cell)
        check_equal(model, alone)


def all_cells() -> list[Cell]:
    """All with tables in every place; the other places with each block and options, steps in turn.

    Where a table is has to do with the block that it is in or not.
    """
    cells = [
        Cell(*fields) for fields in itertools.product(PLACES[-1:], KEPT, OPTIONS, TOWERS, STEPS)
    ]
    turns = itertools.cycle(itertools.product(TOWERS[:2], STEPS))
    fewer = itertools.product(PLACES[:-1], KEPT, OPTIONS)
    cells += [Cell(*fields, *next(turns)) for fields in fewer]
    return [cell for cell in cells if cell.is_taken]


def try_cells(cells: list[Cell]) -> None:
    with init(timeout=20):
        for cell in cells:
            with in_case(*cell):
                check(cell)


@pytest.mark.parametrize("size", [2, 3])
def test_what_plain_ddp_takes_has_the_gradients_of_one_rank(size: int) -> None:
    """A quarter of the cells is tried on three ranks, and the others on two."""
    cells = all_cells()
    of_three = cells[::4]
    if size == 2:
        del cells[::4]
    launch(size, try_cells, [cells if size == 2 else of_three], timeout=300, env=ONE_THREAD)


def leave_unused(model: Model, place: str) -> None:
    for tower in model.towers:
        tower.unused = place


def try_unused() -> None:
    """On one rank, on the other, on both, in turn; what plain DistributedDataParallel cannot."""
    places = PLACES[-1]
    with init(timeout=20):
        rank, size = dist.get_rank(), dist.get_world_size()
        turns = itertools.cycle(TOWERS[:2])
        for kept, options, place in itertools.product(KEPT, OPTIONS, places):
            cell = Cell(places, kept, options, next(turns), "each")
            if not cell.is_taken:
                continue
            with in_case(*cell, place):
                model = Model(cell)
                alone = copy.deepcopy(model)
                wrapped = DistributedDataParallel(model, **OPTIONS[options])
                ddp.register(wrapped)
                for step, without in enumerate(((0,), (1,), (0, 1))):
                    wrapped.zero_grad()
                    alone.zero_grad()
                    leave_unused(model, place if rank in without else "")
                    backward(wrapped, words(step, rank), cell, size)
                    for each in range(size):
                        leave_unused(alone, place if each in without else "")
                        backward(alone, words(step, each), cell)
                    check_equal(model, alone)


def test_tables_around_blocks_may_be_unused() -> None:
    launch(2, try_unused, timeout=300, env=ONE_THREAD)


class Block(nn.Module):
    """All that it has is inside of a reentrant block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)
        self.line = nn.Linear(4, 4)
        self.gives_up = False

    def inside(self, hidden: Tensor, words: Tensor) -> Tensor:
        return self.line(hidden) * self.table(words)

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        output = checkpoint(self.inside, hidden, words, use_reentrant=True)
        return GiveUp.apply(output) if self.gives_up else output


class GiveUp(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise LookupError("given up")


def block() -> tuple[DistributedDataParallel, ddp.State]:
    wrapped = DistributedDataParallel(Block())
    return wrapped, ddp.register(wrapped)


def errors_in_blocks() -> None:
    with init(timeout=20):
        (first, _), (second, state) = block(), block()
        batch = words(0, dist.get_rank())

        inputs: list[Tensor] = []

        def step() -> None:
            hidden = torch.ones(3, 4, requires_grad=True)
            inputs.append(hidden)
            second(first(hidden, batch), batch).sum().backward()

        second.module.gives_up = True
        with pytest.raises(LookupError):
            step()
        second.module.gives_up = False
        state.algorithm = ["gather", "split"][dist.get_rank()]
        for _ in range(2):
            with pytest.raises(WeftError, match=r"algorithm: .*gather.*split"):
                step()
            assert inputs[-1].grad is not None  # the outermost backward has done all it had to
        state.algorithm = "auto"
        for model in (first, second):
            model.zero_grad()
        step()
        found = [parameter.grad.to_dense() for parameter in first.parameters()]
        mean = [gradient.clone() for gradient in found]
        for gradient in mean:
            dist.all_reduce(gradient)
        for gradient, total in zip(found, mean, strict=True):
            assert torch.equal(gradient, total / 2) and gradient.any()


def test_an_error_inside_of_a_block_is_raised_at_the_end_of_the_outermost_backward() -> None:
    launch(2, errors_in_blocks, timeout=60, env=ONE_THREAD)
