"""Tables that a batch does not use: what `weft.ddp.keep_tables_used` does in backward.

In one process and without DistributedDataParallel; with it, see test_ddp.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from weft import ddp


class Pair(NamedTuple):
    one: Tensor
    other: Any


@dataclasses.dataclass(frozen=True)
class Record:
    one: Tensor
    other: Any


class Own:
    """Of a class that is registered with torch's pytree."""

    def __init__(self, one):
        self.one = one


register_pytree_node(Own, lambda own: ([own.one], None), lambda parts, _: Own(*parts))


class Echo(nn.Module):
    """Looks its input up in one of two tables, and wraps the result as it is told."""

    def __init__(self, wrap):
        super().__init__()
        self.used, self.unused = (nn.Embedding(9, 2, sparse=True) for _ in range(2))
        self.wrap = wrap

    def forward(self, index):
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
        (lambda x: [Own(x), object()], lambda x: x[0].one),
    ],
)
def test_a_backward_of_outputs_of_any_form_comes_to_all_tables(wrap, unwrap):
    model = Echo(wrap)
    ddp.keep_tables_used(model)
    index = torch.tensor([4, 4])
    output = model(index)
    unwrap(output).sum().backward()
    assert model.used.weight.grad.coalesce().indices().tolist() == [[4]]
    assert model.unused.weight.grad._nnz() == 0
    assert model.unused.weight.grad.shape == (9, 2)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 2 * x)])
def test_a_table_that_is_looked_up_in_vain_takes_part(wrap):
    class InVain(Echo):
        def forward(self, index):
            self.unused(index)
            return super().forward(index)

    model = InVain(wrap)
    ddp.keep_tables_used(model)
    output = model(torch.tensor([4]))
    sum(output).sum().backward()
    assert model.used.weight.grad._nnz() > 0
    assert model.unused.weight.grad._nnz() == 0


def test_an_output_does_not_reach_what_another_reaches():
    """So backward may be called for each, and each table is ready once."""
    model = nn.ModuleDict({name: nn.Embedding(9, 2, sparse=True) for name in "ab"})
    model.forward = lambda index: (model["a"](index), model["b"](index))
    ddp.keep_tables_used(model)
    ready = []
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


def test_outputs_stay_as_they_are():
    outputs = []

    def remember(x):
        outputs.append([x, x[0]])
        return outputs[0]

    model = Echo(remember)
    ddp.keep_tables_used(model)
    output = model(torch.tensor([4]))
    assert output is outputs[0] and output[1]._base is output[0]


class Held:
    """What a graph holds."""


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, held):
        ctx.held = held
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x + 1, lambda x: (x[0], x)])
def test_a_graph_lives_no_longer_than_its_outputs(wrap):
    """With a backward or without; no cycle waits for the garbage collector."""
    held = []

    def hold(x):
        each = Held()
        held.append(weakref.ref(each))
        return wrap(Holds.apply(x, each))

    model = Echo(hold)
    ddp.keep_tables_used(model)
    gc.collect()
    gc.disable()
    try:
        model(torch.tensor([4]))
        torch.stack([tensor.sum() for tensor in model(torch.tensor([4]))]).sum().backward()
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_outputs_may_be_leaves():
    """A parameter, which outlives the step, gets no hook."""
    model = Echo(lambda x: (torch.zeros(2, requires_grad=True), model.scale, model.scale[0]))
    model.scale = nn.Parameter(torch.ones(2))
    ddp.keep_tables_used(model)
    sum(output.sum() for output in model(torch.tensor([4]))).backward()
    assert model.scale.grad.tolist() == [2.0, 1.0]
    assert not model.scale._backward_hooks
    assert [table.weight.grad._nnz() for table in (model.used, model.unused)] == [0, 0]


def test_a_leaf_that_is_an_output_of_each_step_has_one_hook():
    prompt = torch.zeros(2, requires_grad=True)
    model = Echo(lambda x: prompt)
    ddp.keep_tables_used(model)
    for _ in range(3):
        model(torch.tensor([4])).sum().backward()
    assert len(prompt._backward_hooks) == 1


def test_a_leaf_may_be_the_only_output():
    model = Echo(lambda x: torch.zeros(2, requires_grad=True))
    ddp.keep_tables_used(model)
    model(torch.tensor([4])).sum().backward()
    assert [table.weight.grad._nnz() for table in (model.used, model.unused)] == [0, 0]


def test_an_output_that_is_held_for_long_is_not_waited_for():
    model = nn.ModuleDict({name: nn.Embedding(9, 2, sparse=True) for name in "ab"})
    model.forward = lambda name: model[name](torch.tensor([4]))
    ddp.keep_tables_used(model)
    held = model("b")
    for filled in (False, True):
        model("a").sum().backward()
        assert (model["b"].weight.grad is not None) == filled
    assert held.requires_grad


def test_gradients_that_are_asked_for_are_no_step():
    model = Echo(lambda x: x)
    ddp.keep_tables_used(model)
    output = model(torch.tensor([4])).sum()
    torch.autograd.grad(output, model.used.weight, retain_graph=True)
    assert model.unused.weight.grad is None
    torch.autograd.grad(model.unused(torch.tensor([4])).sum(), model.unused.weight)
    output.backward()
    assert model.unused.weight.grad._nnz() == 0


def test_a_table_may_be_frozen_between_forward_and_backward():
    model = Echo(lambda x: x)
    ddp.keep_tables_used(model)
    output = model(torch.tensor([4])).sum()
    model.used.weight.requires_grad_(False)
    output.backward()


def test_a_table_that_is_used_costs_no_copy():
    model = Echo(lambda x: x)
    ddp.keep_tables_used(model)
    output, arrived = model(torch.tensor([4, 5])), []
    output.register_hook(lambda grad: arrived.append(grad.data_ptr()))
    output.pow(2).sum().backward()
    assert [model.used.weight.grad._values().data_ptr()] == arrived


def test_without_gradients_an_output_is_left_alone():
    outputs = []

    def remember(x):
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


def test_a_hooked_model_can_be_copied_and_pickled():
    model = nn.Sequential(nn.EmbeddingBag(9, 2, sparse=True), nn.Linear(2, 1))
    ddp.keep_tables_used(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.tensor([[1, 2]])).sum().backward()
        assert twin[0].weight.grad.coalesce().indices().tolist() == [[1, 2]]
        assert model[0].weight.grad is None


def test_a_copy_of_a_state_knows_nothing_of_the_steps_of_a_model():
    state = ddp.State()
    state.is_checked = True
    state.unlike = "a gradient is dense"
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert not twin.is_checked and twin.unlike is None


def test_a_hook_that_is_removed_does_nothing():
    model = Echo(lambda x: x)
    ddp.keep_tables_used(model).remove()
    model(torch.tensor([4])).sum().backward()
    assert model.unused.weight.grad is None


def test_torch_compile_sees_one_graph():
    model = Echo(lambda x: x + 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ddp.keep_tables_used(compiled)
    for _ in range(2):
        model.zero_grad()
        compiled(torch.tensor([4, 4])).sum().backward()
        assert model.used.weight.grad.to_dense()[4].tolist() == [2.0, 2.0]
        assert model.unused.weight.grad._nnz() == 0
