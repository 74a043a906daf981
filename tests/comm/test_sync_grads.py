"""`sync_grads`: the sum over all ranks, by name."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

import weft
from weft.comm import buckets
from weft.testing import spmd

EVERYWHERE = ("threads", "verbs", "processes", "gloo")

LOCK = threading.Lock()


class Model(nn.Module):
    """Tables and layers; small integers, so that sums are exact in any order."""

    def __init__(self, *, sparse=True, other_order=False):
        super().__init__()
        tables = ["table", "other"]
        for name in reversed(tables) if other_order else tables:
            setattr(self, name, nn.Embedding(12, 4, sparse=sparse))
        self.first = nn.Linear(4, 300)
        self.second = nn.Linear(300, 300, bias=False)
        self.narrow = nn.Linear(300, 2).bfloat16()
        self.tied = nn.Embedding(12, 4, sparse=sparse)
        self.tied.weight = self.table.weight
        with torch.no_grad():
            for name, parameter in sorted(self.named_parameters()):
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def forward(self, words, parts="table other first second narrow"):
        hidden = torch.zeros(len(words), 4)
        for name in ("table", "other", "tied"):
            if name in parts:
                hidden = hidden + getattr(self, name)(words)
        if "first" not in parts:
            return hidden.sum()
        hidden = self.first(hidden).sign() * 0 + self.first(hidden)
        if "second" in parts:
            hidden = self.second(hidden)
        return self.narrow(hidden.bfloat16()).float().sum() if "narrow" in parts else hidden.sum()


# what each of four ranks uses of the model
USES = ["table other first second narrow", "table", "other tied first half", "table first second"]


def words(rank):
    return torch.tensor([rank % 12, 3, 3, (5 * rank) % 12])


def dense(module):
    found = {name: p.grad for name, p in module.named_parameters()}
    return {n: g.to_dense() if g.is_sparse else g for n, g in found.items() if g is not None}


def wanted(size, average, uses=USES):
    """The gradients of all ranks added up here, in rank order."""
    with LOCK:  # made once, though ranks are threads
        return _wanted(size, average, tuple(uses))


@functools.cache
def _wanted(size, average, uses):
    total = {}
    for rank in range(size):
        module = Model()
        module(words(rank), uses[rank % 4]).backward()
        for name, gradient in dense(module).items():
            total[name] = total[name] + gradient.double() if name in total else gradient.double()
    return {name: gradient / (size if average else 1) for name, gradient in total.items()}


def check(module, expected):
    found = dense(module)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        if gradient.dtype == torch.bfloat16:
            torch.testing.assert_close(gradient.double(), expected[name], rtol=0.02, atol=0.1)
        else:
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("average", [True, False])
@spmd(1, 2, 7, 20, on=("threads",))
def test_gradients_are_summed_by_name(group, average):
    module = Model(other_order=group.rank % 2 == 1)
    module(words(group.rank), USES[group.rank % 4]).backward()
    weft.sync_grads(module, average)
    check(module, wanted(group.size, average))
    assert module.table.weight.grad.is_coalesced()


OTHERWISE = {
    "missing": (lambda m: m.pop("two"), r"rank 1 has no 'two', on rank 0 it is a .*parameter"),
    "tied": (
        lambda m: m.update({"two": m["one"]}),
        r"'two' is .* on rank 0, and .*, the same as 'one' on rank 1",
    ),
    "shape": (
        lambda m: m.update({"two": nn.Parameter(torch.ones(7))}),
        r"'two' is .*\(2,\) on rank 0, and .*\(7,\) on rank 1",
    ),
}


@pytest.mark.parametrize("otherwise", OTHERWISE)
@spmd(3, on=EVERYWHERE)
def test_who_has_other_parameters_is_named_and_nothing_changes(group, otherwise):
    change, text = OTHERWISE[otherwise]
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("one", "two")})
    if group.rank == 1:
        change(module)
    module["one"].grad = torch.full((2,), 1.0 + group.rank)
    with pytest.raises(weft.WeftError, match=f"{text}.*; nothing was changed"):
        weft.sync_grads(module, average=False)
    assert module["one"].grad.eq(1 + group.rank).all()
    with pytest.raises(weft.WeftError, match="differ in average"):
        weft.sync_grads(nn.Linear(2, 2), average=group.rank == 0)
    weft.sync_grads(nn.Linear(2, 2))


@spmd(3, on=EVERYWHERE)
def test_sparse_here_and_dense_there(group):
    module = nn.Embedding(4, 1)
    if group.rank == 0:
        module.weight.grad = torch.ones(4, 1).to_sparse(1)
    elif group.rank == 1:
        module.weight.grad = torch.ones(1, 1).expand(4, 1)  # which cannot be written
    weft.sync_grads(module, average=False)
    assert module.weight.grad.layout == torch.strided
    assert module.weight.grad.tolist() == [[2.0]] * 4


def picked(*cells):
    """A gradient that is sparse in both dimensions, as that of `gather(sparse_grad=True)`."""
    return torch.sparse_coo_tensor(
        list(zip(*cells, strict=True)), torch.ones(len(cells)), (4, 3), check_invariants=True
    )


@spmd(3, on=EVERYWHERE)
def test_gradients_that_are_sparse_in_every_dimension(group):
    module = nn.ParameterDict({name: torch.zeros(4, 3) for name in ("all", "some", "mixed")})
    module["all"].grad = picked((0, 1), (3, group.rank))
    if group.rank == 1:  # the others count as zero
        module["some"].grad = picked((2, 2))
    module["mixed"].grad = picked((1, 0)) if group.rank else torch.eye(4, 3).to_sparse(1)
    weft.sync_grads(module, average=False)
    found = {name: module[name].grad for name in module}
    assert found["all"].sparse_dim() == found["some"].sparse_dim() == 2
    assert found["all"].to_dense().tolist() == [[0, 3, 0], [0] * 3, [0] * 3, [1, 1, 1]]
    assert found["some"].to_dense().equal(picked((2, 2)).to_dense())
    assert found["mixed"].equal(torch.eye(4, 3) + 2 * picked((1, 0)).to_dense())


@spmd(2, on=EVERYWHERE)
def test_gradients_that_are_not_what_their_memory_says(group):
    """An element of stride 0, and conjugations and signs that torch has not yet applied."""
    module = nn.Module()
    module.one = nn.Parameter(torch.ones(1, 1))
    module.one.grad = torch.tensor(2.0).expand(1, 1)
    weft.sync_grads(module, average=False)
    assert module.one.grad.tolist() == [[4.0]]
    module.shared = nn.Parameter(torch.ones(2, 2))
    module.shared.grad = torch.ones(2, 2) if group.rank else torch.arange(3.0).unfold(0, 2, 1)
    weft.sync_grads(module, average=False)
    assert module.shared.grad.tolist() == [[1, 2], [2, 3]]
    for number, count in enumerate((3, 40_000)):  # alone in place, and in parts
        module = nn.Module()
        module.turned = nn.Parameter(torch.ones(count, dtype=torch.complex64))
        module.sign = nn.Parameter(torch.ones(count))
        module.turned.grad = torch.full((count,), 1 + 2j * (1 + group.rank)).conj()
        module.sign.grad = module.turned.grad.imag if number else None
        weft.sync_grads(module, average=False)
        assert module.turned.grad.eq(2 - 6j).all()
        assert number == 0 or module.sign.grad.eq(-6).all()


@spmd(2, on=("threads", "verbs"))
def test_gradients_in_steps(group, monkeypatch):
    monkeypatch.setattr(buckets, "ALONE", 100)
    monkeypatch.setattr(buckets, "BUCKET", 600)
    module = Model()
    module(words(group.rank), USES[group.rank]).backward()
    turned = torch.empty(300, 300).t()
    if module.second.weight.grad is not None:
        module.second.weight.grad = turned.copy_(module.second.weight.grad)
    weft.sync_grads(module)
    check(module, wanted(2, True))


@spmd(3, on=EVERYWHERE)
def test_nothing_to_do(group):
    weft.sync_grads(nn.Linear(2, 2))
    weft.sync_grads(nn.Identity())
    module = nn.Linear(2, 2)
    weft.sync_grads(module)
    assert module.weight.grad is None


@spmd(4, on=("threads",))
def test_few_messages(group):
    module = nn.ParameterList(nn.Parameter(torch.ones(10)) for _ in range(200))
    for parameter in module:
        parameter.grad = torch.ones(10)
    before = group.traffic.messages
    weft.sync_grads(module)
    assert group.traffic.messages - before <= 3 + 3  # the statements, and one reduction


@spmd(2, on=EVERYWHERE)
def test_parameters_of_one_memory_have_gradients_of_their_own(group):
    module = nn.Module()
    module.one, module.two = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    for shared in (False, True):
        if shared:
            module.two.data = module.one.data
        module.one.grad, module.two.grad = torch.ones(3), torch.full((3,), 1.0 + group.rank)
        weft.sync_grads(module, average=False)
        assert module.one.grad.eq(2).all()
        assert module.two.grad.eq(3).all()


class Added(nn.Module):
    """A model whose gradients autograd leaves in the memory of others: of views that are added."""

    def __init__(self, rows, kind):
        super().__init__()
        self.lower = nn.Parameter(torch.zeros(rows * 4))
        self.upper = nn.Parameter(torch.zeros(rows * 4))
        self.table = nn.Embedding(10, 4, sparse=kind == "table")
        nn.init.zeros_(self.table.weight)
        self.kind = kind

    def forward(self, rows):
        added = self.upper.view(rows, 4)
        if self.kind == "table":
            return self.lower.view(rows, 4) + self.table(torch.arange(rows) % 10) + added
        return torch.tanh(self.lower.view(rows, 4) + 0.0) + added


@pytest.mark.parametrize("kind", ["table", "dense"])
@pytest.mark.parametrize("rows", [16, 1 << 18])  # sent with others, and from their own memory
@spmd(2)
def test_gradients_in_one_memory_are_summed_once(group, rows, kind):
    module = Added(rows, kind)
    (module(rows) * (1 + group.rank)).sum().backward()
    weft.sync_grads(module, average=False)
    for each in (module.lower, module.upper):
        assert each.grad.eq(3).all()
    if kind == "table":
        assert module.table.weight.grad.to_dense().sum() == 3 * 4 * rows


@spmd(2)
def test_memory_of_the_callers_own_keeps_the_gradients(group):
    """All in one buffer, as some programs have them: they are reduced there."""
    module = nn.Linear(3, 2)
    flat = torch.zeros(8)
    module.weight.grad, module.bias.grad = flat[:6].view(2, 3), flat[6:]
    (module(torch.ones(1, 3)) * (1 + group.rank)).sum().backward()
    weft.sync_grads(module, average=False)
    assert flat.eq(3).all()


@spmd(3, on=("threads", "verbs"))
def test_a_sparse_gradient_that_is_none_is_called_by_its_name(group):
    module = Model()
    module(words(group.rank)).backward()
    table = module.table.weight
    if group.rank == 1:
        values, size = table.grad._values()[:1], table.grad.shape
        table.grad = torch.sparse_coo_tensor([[-2]], values, size, check_invariants=False)
    name = next(name for name, each in module.named_parameters() if each is table)
    with pytest.raises(weft.WeftError) as caught:
        weft.sync_grads(module)
    assert f"rank 1: the gradient of {name!r}: index -2" in str(caught.value)
