"""Tables that a batch does not use: what `weft.ddp.keep_tables_used` does to outputs.

In one process and without DistributedDataParallel; with it, see test_ddp.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from weft import ddp


class Pair(NamedTuple):
    one: Tensor
    other: Any


@dataclasses.dataclass(frozen=True)
class Record:
    one: Tensor
    other: Any


class Echo(nn.Module):
    """Looks its input up in one of two tables, and wraps the result as it is told."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.used, self.unused = (nn.Embedding(9, 2, sparse=True) for _ in range(2))
        self.wrap = wrap

    def forward(self, index: Tensor) -> Any:
        return self.wrap(self.used(index))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda x: x),
        (lambda x: (x, 3), lambda x: x[0]),
        (lambda x: [None, x], lambda x: x[1]),
        (lambda x: {"a": {"b": x}}, lambda x: x["a"]["b"]),
        (lambda x: collections.OrderedDict(a=x), lambda x: x["a"]),
        (lambda x: Pair(x, "other"), lambda x: x.one),
        (lambda x: Record(x, [x]), lambda x: x.other[0]),
    ],
)
def test_outputs_of_any_form_depend_on_all_tables(
    wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]
) -> None:
    model = Echo(wrap)
    ddp.keep_tables_used(model)
    index = torch.tensor([4, 4])
    output = model(index)
    assert type(output) is type(wrap(torch.ones(1)))
    unwrap(output).sum().backward()
    assert model.used.weight.grad.coalesce().indices().tolist() == [[4]]
    assert model.unused.weight.grad._nnz() == 0
    assert model.unused.weight.grad.shape == (9, 2)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 2 * x)])
def test_a_table_that_is_looked_up_in_vain_takes_part(wrap: Callable[[Tensor], Any]) -> None:
    class InVain(Echo):
        def forward(self, index: Tensor) -> Any:
            self.unused(index)
            return super().forward(index)

    model = InVain(wrap)
    ddp.keep_tables_used(model)
    output = model(torch.tensor([4]))
    sum(output).sum().backward()
    assert model.used.weight.grad._nnz() > 0
    assert model.unused.weight.grad._nnz() == 0


def test_an_output_does_not_reach_what_another_reaches() -> None:
    """So backward may be called for each, and each table is ready once."""
    model = nn.ModuleDict({name: nn.Embedding(9, 2, sparse=True) for name in "ab"})
    model.forward = lambda index: (model["a"](index), model["b"](index))
    ddp.keep_tables_used(model)
    ready: list[str] = []
    accumulators = []  # DistributedDataParallel keeps them, too
    for name, table in model.items():
        accumulator = table.weight.view_as(table.weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_, name=name: ready.append(name))
        accumulators.append(accumulator)
    first, second = model(torch.tensor([4]))
    first.sum().backward()
    assert ready == ["a"]
    second.sum().backward()
    assert ready == ["a", "b"]


def test_an_output_may_be_changed_in_place() -> None:
    model = Echo(lambda x: x + 1)
    ddp.keep_tables_used(model)
    output = model(torch.tensor([4]))
    output.mul_(3)
    output.sum().backward()
    assert model.used.weight.grad.to_dense()[4].tolist() == [3.0, 3.0]


def test_a_table_that_is_used_costs_no_copy() -> None:
    model = Echo(lambda x: x)
    ddp.keep_tables_used(model)
    output, arrived = model(torch.tensor([4, 5])), []
    output.register_hook(lambda grad: arrived.append(grad.data_ptr()))
    output.pow(2).sum().backward()
    assert [model.used.weight.grad._values().data_ptr()] == arrived


def test_without_gradients_an_output_is_left_alone() -> None:
    outputs = []

    def remember(x: Tensor) -> Tensor:
        outputs.append(x)
        return x

    model = Echo(remember)
    ddp.keep_tables_used(model)
    with torch.no_grad():
        assert model(torch.tensor([4])) is outputs[0]
    model.unused.weight.requires_grad_(False)
    model.zero_grad()
    model(torch.tensor([4])).sum().backward()
    assert model.unused.weight.grad is None


def test_a_hooked_model_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 2, sparse=True), nn.Linear(2, 1))
    ddp.keep_tables_used(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.tensor([[1, 2]])).sum().backward()
        assert twin[0].weight.grad.coalesce().indices().tolist() == [[1, 2]]
        assert model[0].weight.grad is None


def test_a_hook_that_is_removed_does_nothing() -> None:
    model = Echo(lambda x: x)
    ddp.keep_tables_used(model).remove()
    model(torch.tensor([4])).sum().backward()
    assert model.unused.weight.grad is None


def test_torch_compile_sees_one_graph() -> None:
    model = Echo(lambda x: x + 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ddp.keep_tables_used(compiled)
    for _ in range(2):
        model.zero_grad()
        compiled(torch.tensor([4, 4])).sum().backward()
        assert model.used.weight.grad.to_dense()[4].tolist() == [2.0, 2.0]
        assert model.unused.weight.grad._nnz() == 0
