"""Backwards inside of backwards, and one after the other, under `weft.ddp.register`.

Whatever plain DistributedDataParallel takes, `register` takes. All cells of the table are tried in
one group of ranks; weights, inputs and losses are integers, so that gradients must be those of one
rank to the last bit.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import in_case
from weft import ddp
from weft.base.errors import WeftError, WireError
from weft.base.pace import patient
from weft.bootstrap.init import init
from weft.bootstrap.local import launch

ONE_THREAD = {"OMP_NUM_THREADS": "1"}

PLACES = (("before",), ("inside",), ("behind",), ("before", "inside", "behind"))
KEPT = ("all", "reentrant", "not reentrant")  # how a block keeps what its backward needs
OPTIONS = {
    "none": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static unused": {"static_graph": True, "find_unused_parameters": True},
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
    def is_taken(self):
        """Whether plain DistributedDataParallel takes it (torch 2.13); the others it refuses.

        With static_graph and find_unused_parameters all outputs are one node of the graph, which
        has one backward. What is used inside of a reentrant block is unused for it.
        """
        if self.options == "static unused" and self.steps == "join":
            return False  # ranks of plain DistributedDataParallel start unlike collectives, and die
        in_turn = self.towers == "two in turn"
        if self.options == "unused" and self.kept == "reentrant":
            return False
        return not (
            in_turn and OPTIONS[self.options].keys() & {"static_graph", "find_unused_parameters"}
        )


class Tower(nn.Module):
    """Tables before, inside and behind a block; their modules are called, or their weights read."""

    def __init__(self, places, kept, sparse, calls):
        super().__init__()
        self.kept = kept
        self.calls = calls
        self.tables = nn.ModuleDict({p: nn.Embedding(20, 4, sparse=sparse) for p in places})
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.unused = ""  # the place of a table that a batch does not use

    def looked_up(self, place, words, hidden):
        if place not in self.tables or place == self.unused:
            return hidden
        table = self.tables[place]
        if self.calls:
            return hidden * table(words)
        return hidden * F.embedding(words, table.weight, sparse=table.sparse)

    def block(self, hidden, words):
        return self.looked_up("inside", words, self.first(hidden))

    def forward(self, words):
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
    def __init__(self, cell):
        super().__init__()
        sparse = cell.steps != "join"  # in which torch makes dense zeros of all gradients
        towers = 1 if cell.towers == "one" else 2
        self.towers = nn.ModuleList(
            Tower(cell.places, cell.kept, sparse, calls=number > 0) for number in range(towers)
        )
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, words):
        return tuple(tower(words + number) for number, tower in enumerate(self.towers))


def words(step, rank):
    return torch.randint(15, (3,), generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model, batch, cell, factor=1):
    losses = [output.pow(2).sum() * factor for output in model(batch)]
    if cell.towers == "two in turn":
        for loss in losses:
            loss.backward()
    else:
        sum(losses).backward()


def check_equal(found, wanted):
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        gradient = torch.zeros_like(other) if other.grad is None else other.grad.to_dense()
        assert torch.equal(mine.grad.to_dense(), gradient), name


def check(cell):
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


def all_cells():
    """With tables in every place any three of the other four axes meet; one place has fewer cells.

    Where a table is has to do with the block that it is in or not.
    """
    cells = [
        Cell(PLACES[-1], kept, options, towers, STEPS[(block + option + tower) % len(STEPS)])
        for block, kept in enumerate(KEPT)
        for option, options in enumerate(OPTIONS)
        for tower, towers in enumerate(TOWERS)
    ]
    turns = itertools.cycle(itertools.product(TOWERS[:2], STEPS))
    fewer = itertools.product(PLACES[:-1], KEPT, OPTIONS)
    cells += [Cell(*fields, *next(turns)) for fields in fewer]
    return [cell for cell in cells if cell.is_taken]


def try_cells(cells):
    with init(timeout=60):
        for cell in cells:
            with in_case(*cell):
                check(cell)


@pytest.mark.parametrize("size", [2, 3])
def test_what_plain_ddp_takes_has_the_gradients_of_one_rank(size):
    """A quarter of the cells is tried on three ranks, and the others on two."""
    cells = all_cells()
    of_three = cells[::4]
    if size == 2:
        del cells[::4]
    launch(size, try_cells, [cells if size == 2 else of_three], timeout=300, env=ONE_THREAD)


def leave_unused(model, place):
    for tower in model.towers:
        tower.unused = place


def register_by_hand(wrapped):
    """As a trainer does that takes a hook."""
    wrapped.register_comm_hook(ddp.State(), ddp.hook)
    ddp.keep_tables_used(wrapped)


def try_unused(register, some_options):
    """On one rank, on the other, on both, in turn; what plain DistributedDataParallel cannot."""
    places = PLACES[-1]
    with init(timeout=60):
        rank, size = dist.get_rank(), dist.get_world_size()
        turns = itertools.cycle(TOWERS)
        for kept, options, place in itertools.product(KEPT, some_options, places):
            cell = Cell(places, kept, options, next(turns), "each")
            if not cell.is_taken:
                continue
            with in_case(*cell, place):
                model = Model(cell)
                alone = copy.deepcopy(model)
                wrapped = DistributedDataParallel(model, **OPTIONS[options])
                register(wrapped)
                for step, without in enumerate(((0,), (1,), (0, 1))):
                    wrapped.zero_grad()
                    alone.zero_grad()
                    leave_unused(model, place if rank in without else "")
                    backward(wrapped, words(step, rank), cell, size)
                    for each in range(size):
                        leave_unused(alone, place if each in without else "")
                        backward(alone, words(step, each), cell)
                    check_equal(model, alone)


@pytest.mark.parametrize(
    ("register", "options"),
    [(ddp.register, [*OPTIONS]), (register_by_hand, ["none", "static unused"])],
)
def test_tables_around_blocks_may_be_unused(register, options):
    launch(2, try_unused, [register, options], timeout=300, env=ONE_THREAD)


class Choice(nn.Module):
    """What a forward does is for the caller to say; it may leave tables unused."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 4, sparse=True) for _ in range(3))
        self.line = nn.Linear(4, 4)
        self.other_line = nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, act, *args):
        return act(self, *args)


def in_block(model, batch):
    def block(hidden):
        return hidden * F.embedding(batch, model.tables[0].weight, sparse=True)

    return checkpoint(block, torch.ones(3, 4, requires_grad=True), use_reentrant=True)


def lines(model):
    return model.other_line(model.line(torch.ones(3, 4)))


def outside(model, batch):
    return lines(model) * model.tables[1](batch)


def block_first(model, batch, factor):
    output = model(in_block, batch) + model(outside, batch)
    (output.sum() * factor).backward()


def block_last(model, batch, factor):
    other = model(outside, batch)
    ((model(in_block, batch) + other).sum() * factor).backward()


def block_on_some_ranks(model, batch, factor):
    other = model(outside, batch)
    if batch.sum() % 2:
        other = model(in_block, batch) + other
    (other.sum() * factor).backward()


def a_backward_for_each_forward(model, batch, factor):
    """Each has parameters of its own."""
    block = model(lambda it: it.line(in_block(it, batch)))
    other = model(lambda it: it.other_line(it.tables[1](batch)))
    (block.sum() * factor).backward()
    (other.sum() * factor).backward()


def a_backward_for_a_block_alone(model, batch, factor):
    block, other = model(lambda it: (in_block(it, batch), outside(it, batch)))
    (other.sum() * factor).backward()
    (block.sum() * factor).backward()


def an_output_without_a_backward(model, batch, factor):
    """It begins behind two blocks, which the other output has come to."""

    def forward(it):
        hidden = outside(it, batch)
        for _ in range(2):
            hidden = checkpoint(torch.neg, hidden, use_reentrant=True)
        return hidden, hidden.softmax(1)

    output, _left = model(forward)
    (output.sum() * factor).backward()


def a_lookup_without_gradients(model, batch, factor):
    def forward(it):
        with torch.no_grad():
            scale = it.tables[0](batch)
        return scale * outside(it, batch)

    (model(forward).sum() * factor).backward()


def gradients_of_the_output_before(model, batch, factor):
    """`torch.autograd.grad` is no step."""
    scale = torch.ones(4, requires_grad=True)
    output = model(lambda it: scale * outside(it, batch)).pow(2)
    (gradient,) = torch.autograd.grad(output.sum(), scale, create_graph=True)
    ((output.sum() + gradient.sum()) * factor).backward()


def a_backward_around_before(model, batch, factor):
    """It comes to an output that is not the model's own, and to no parameter."""
    given = torch.ones(3, 4, requires_grad=True) * 2
    same, output = model(lambda it: (given, given * outside(it, batch)))
    same.sum().backward(retain_graph=True)
    (output.sum() * factor).backward()


def kept_and_changed(model, batch, factor):
    """The caller changes an output in place, which others still have."""
    kept = []

    def forward(it):
        kept.append(outside(it, batch))
        return kept[0]

    model(forward).mul_(2)
    (kept[0].pow(2).sum() * factor).backward()


def a_view_is_changed(model, batch, factor):
    kept = []

    def forward(it):
        kept.append(outside(it, batch))
        return kept[0][0]

    output = model(forward)
    output.mul_(3)
    ((output.sum() + kept[0].pow(2).sum()) * factor).backward()


def a_view_is_changed_and_its_base_used(model, batch, factor):
    def forward(it):
        output = outside(it, batch)
        return output, output[0]

    output, view = model(forward)
    view.mul_(2)
    (output.pow(2).sum() * factor).backward()


def the_base_of_views_is_changed(model, batch, factor):
    kept = []

    def forward(it):
        kept.append(outside(it, batch))
        return kept[0].view(-1)

    output = model(forward)
    kept[0].mul_(2)
    (output.pow(2).sum() * factor).backward()


STEPS_OF_CHOICE = (
    block_first,
    block_last,
    block_on_some_ranks,
    a_backward_for_each_forward,
    a_backward_for_a_block_alone,
    an_output_without_a_backward,
    a_lookup_without_gradients,
    gradients_of_the_output_before,
    a_backward_around_before,
    kept_and_changed,
    a_view_is_changed,
    a_view_is_changed_and_its_base_used,
    the_base_of_views_is_changed,
)


def try_choices():
    """None of these uses all tables."""
    with init(timeout=60):
        rank, size = dist.get_rank(), dist.get_world_size()
        for take_step in STEPS_OF_CHOICE:
            with in_case(take_step.__name__):
                model = Choice()
                alone = copy.deepcopy(model)
                wrapped = DistributedDataParallel(model)
                ddp.register(wrapped)
                for step in range(3):
                    wrapped.zero_grad()
                    alone.zero_grad()
                    take_step(wrapped, words(step, rank), size)
                    for each in range(size):
                        take_step(alone, words(step, each), 1)
                    check_equal(model, alone)


@pytest.mark.parametrize("size", [2, 3])
def test_a_backward_need_not_begin_at_one_output_of_one_forward(size):
    launch(size, try_choices, timeout=patient(100.0), env=ONE_THREAD)


class Block(nn.Module):
    """All that it has is inside of a reentrant block."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)
        self.line = nn.Linear(4, 4)
        self.gives_up = False

    def inside(self, hidden, words):
        return self.line(hidden) * self.table(words)

    def forward(self, hidden, words):
        output = checkpoint(self.inside, hidden, words, use_reentrant=True)
        return GiveUp.apply(output) if self.gives_up else output


class GiveUp(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("given up")


def block():
    wrapped = DistributedDataParallel(Block())
    return wrapped, ddp.register(wrapped)


def errors_in_blocks():
    with init(timeout=60):
        (first, _), (second, state) = block(), block()
        batch = words(0, dist.get_rank())

        inputs = []

        def step():
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


def errors_with_an_unused_table():
    with init(timeout=60):
        wrapped = DistributedDataParallel(Choice())
        state = ddp.register(wrapped)
        batch = words(0, dist.get_rank())
        for algorithms in (("auto", "auto"), ("gather", "split"), ("auto", "auto")):
            wrapped.zero_grad()
            state.algorithm = algorithms[dist.get_rank()]
            loss = wrapped(outside, batch).sum()
            if algorithms[0] == algorithms[1]:
                loss.backward()
                continue
            with pytest.raises(WeftError, match=r"algorithm: .*gather.*split"):
                loss.backward()
            assert [table.weight.grad._nnz() for table in wrapped.module.tables] == [0, 3, 0]
        assert wrapped.module.tables[0].weight.grad._nnz() == 0


def test_an_error_is_raised_where_a_table_is_unused_and_the_next_step_works():
    launch(2, errors_with_an_unused_table, timeout=patient(60.0), env=ONE_THREAD)


def test_an_error_inside_of_a_block_is_raised_at_the_end_of_the_outermost_backward():
    launch(2, errors_in_blocks, timeout=patient(60.0), env=ONE_THREAD)


def left_alone(sparsified):
    """Train until the other rank has left; whether the model is still there, and shared memory."""
    models = []

    def train():
        model = nn.Linear(300, 300)
        models.append(weakref.ref(model))
        wrapped = DistributedDataParallel(model)
        if sparsified:
            wrapped.register_comm_hook(ddp.TopK(), ddp.topk_hook)
        else:
            ddp.register(wrapped)
        for step in itertools.count():
            if step == 2 and group.rank == 1:
                return
            wrapped(torch.ones(8, 300)).sum().backward()

    dist.init_process_group("gloo")
    with init() as group:
        try:
            train()
        except WireError:
            assert group.rank == 0
    dist.destroy_process_group()
    gc.collect()
    memory = Path("/proc/self/maps").read_text().count("/memfd:weft")
    return models[0]() is not None, memory


@pytest.mark.parametrize("sparsified", [False, True], ids=["register", "topk"])
def test_a_lost_backward_keeps_neither_the_model_nor_memory(sparsified):
    assert (
        launch(2, left_alone, [sparsified], timeout=patient(60.0), env=ONE_THREAD)
        == [(False, 0)] * 2
    )
