"""`sync_params`: every dtype, shared tensors and layouts, and nothing overwritten on a mismatch."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import weft
from weft.base.tensors import as_bytes
from weft.comm.named import local, of_module
from weft.schedules import chain
from weft.testing import spmd

EVERYWHERE = ("threads", "verbs", "processes", "gloo")

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.float8_e5m2,
)


class Model(nn.Module):
    """All kinds: tied, of no elements, in steps, larger than a chunk, in half precision."""

    def __init__(self, rank, *, other_order=False):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        first, second = nn.Parameter(draw(5, 3)), nn.Parameter(draw(5, 3))
        if other_order:
            self.second, self.first = second, first
        else:
            self.first, self.second = first, second
        self.table = nn.Embedding(700, 100, _weight=draw(700, 100))
        self.head = nn.Linear(100, 700)
        self.head.weight = self.table.weight
        self.head.bias = nn.Parameter(draw(700).bfloat16())
        self.turned = nn.Parameter(draw(40, 600).t())
        self.register_buffer("hidden", draw(4), persistent=False)
        self.register_buffer("scalar", draw(1)[0])
        self.register_buffer("nothing", draw(0, 4))
        self.register_buffer("absent", None)
        for dtype in DTYPES:
            self.register_buffer(f"of_{dtype}".replace(".", "_"), (draw(9) * 3).abs().to(dtype))


def values(module):
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in found}


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape)
        mine, theirs = (as_bytes(each.contiguous()) for each in (tensor, wanted[name]))
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("chunk", [1 << 17, 1000])
@spmd(1, 4, on=EVERYWHERE)
def test_everything_becomes_what_it_is_on_one_rank(group, chunk, monkeypatch):
    monkeypatch.setattr(chain, "CHUNKS", (chunk, chunk))
    try:
        becomes_what_it_is(group)
    finally:
        if "threads" not in group.hosts:  # a process has a copy of the fixture, which nobody undoes
            monkeypatch.undo()


def becomes_what_it_is(group):
    for source in {0, group.size - 1}:
        module = Model(group.rank, other_order=group.rank == 1)
        places = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
        version = module.first._version
        weft.sync_params(module, source)
        check_equal(values(module), values(Model(source)))
        assert module.head.weight is module.table.weight
        assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == places
        assert module.first.requires_grad
        assert (module.first._version > version) == (group.rank != source)


@spmd(2, on=EVERYWHERE)
def test_buffers_that_are_not_what_their_memory_says(group):
    """Tensors without memory, which are not one another, and a conjugation not yet applied."""
    module = nn.Module()
    for name, shape in {"a": (0, 3), "b": (2,), "c": (0, 5), "d": (0, 3)}.items():
        module.register_buffer(name, torch.full(shape, 1.0 + group.rank))
    module.register_buffer("turned", torch.full((3,), 1 + 2j * (1 + group.rank)).conj())
    _, manifest = of_module(module, buffers=True)
    assert not any("the same as" in said for said in manifest.values())
    weft.sync_params(module)
    assert module.b.eq(1).all() and module.turned.eq(1 - 2j).all()


@spmd(20, on=("threads",))
def test_many_ranks(group):
    with pytest.raises(weft.WeftError, match=r"differ in group_src: .* rank 3 has 1"):
        weft.sync_params(nn.Linear(1, 1), int(group.rank == 3))
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, group.rank)
    weft.sync_params(module, 19)
    assert module.weight.eq(19).all()
    if group.rank == 7:
        module.weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(weft.WeftError, match=r"'weight' is .*\(3, 3\) on rank 0, .* on rank 7"):
        weft.sync_params(module)


@spmd(4, on=("threads",))
def test_few_messages(group):
    module = nn.ParameterList(nn.Parameter(torch.ones(10)) for _ in range(200))
    before = group.traffic.messages
    weft.sync_params(module)
    assert group.traffic.messages - before <= 3 + 1  # the statements, and one message of all


def untied(module):
    module.head.weight = nn.Parameter(module.table.weight.detach().clone())


WRONG = {
    "shape": (
        lambda m: setattr(m, "first", nn.Parameter(torch.ones(3, 5))),
        r"'first' is a parameter of torch.float32 of shape \(5, 3\) on rank 0, and a parameter of "
        r"torch.float32 of shape \(3, 5\) on rank 1",
    ),
    "dtype": (lambda m: m.double(), "torch.float64"),
    "missing": (lambda m: delattr(m, "second"), "rank 1 has no 'second', on rank 0 it is"),
    "more": (lambda m: m.register_buffer("more", torch.ones(1)), "rank 0 has no 'more'"),
    "untied": (untied, "the same as 'head.weight' on rank 0, and a parameter"),
    "kind": (
        lambda m: (delattr(m, "hidden"), setattr(m, "hidden", nn.Parameter(torch.ones(4)))),
        "'hidden' is a buffer of .* on rank 0, and a parameter",
    ),
    "lazy": (lambda m: setattr(m, "lazy", nn.LazyLinear(3)), "'lazy.bias' has no shape yet"),
    "meta": (lambda m: m.to("meta"), "is on the meta device"),
    "expanded": (
        lambda m: setattr(m, "hidden", torch.ones(1).expand(4)),
        r"elements of buffer 'hidden' share memory: make it contiguous",
    ),
    "view": (
        lambda m: setattr(m, "hidden", m.first.detach().view(-1)[1:5]),
        r"'hidden' and 'first' lie in the same memory: clone",
    ),
    "sparse": (lambda m: m.register_buffer("s", torch.eye(2).to_sparse()), "sparse_coo"),
}


@pytest.mark.parametrize("what", WRONG)
@spmd(3, on=("threads",))
def test_what_differs_is_named_and_nothing_overwritten(group, what):
    change, text = WRONG[what]
    module = Model(group.rank)
    if group.rank == 1:
        change(module)
    before = {} if what == "meta" else values(module) if what != "lazy" else {}
    with pytest.raises(weft.WeftError, match=text) as caught:
        weft.sync_params(module)
    assert "rank 1" in str(caught.value)
    if before and what != "sparse":
        check_equal(values(module), before)
    fine = Model(group.rank)
    weft.sync_params(fine, 2)
    check_equal(values(fine), values(Model(2)))


def test_dtensors_may_be_imported_by_another_thread_meanwhile(monkeypatch):
    name = "torch.distributed.tensor"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert local(torch.ones(3)).tolist() == [1, 1, 1]
