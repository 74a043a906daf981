"""`clip_grad_norm_`: what torch's gives for the same gradients, dense."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import weft


def model(sparse):
    torch.manual_seed(3)
    parts = nn.ModuleDict({"table": nn.Embedding(6, 3, sparse=sparse), "head": nn.Linear(3, 2)})
    parts["unused"] = nn.Linear(3, 2)
    loss = parts["head"](parts["table"](torch.tensor([1, 4, 1, 1]))).pow(2).sum()
    loss.backward()
    return parts


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("most", [0.0, 0.1, 1e6])
def test_as_torch_does(p, most, foreach):
    ours, plain = model(sparse=True), model(sparse=False)
    for parts in (ours, plain):  # dtypes that cannot go together
        parts["head"].bias.data = parts["head"].bias.data.double()
        parts["head"].bias.grad = torch.full((2,), 0.25).double()
    before = ours["table"].weight.grad
    assert not before.is_coalesced()  # index 1 is in it three times
    norm = weft.clip_grad_norm_(ours, most, p, False, foreach)
    right = nn.utils.clip_grad_norm_(plain.parameters(), most, p, False, foreach)
    torch.testing.assert_close(norm, right, check_dtype=False)
    have_the_same_gradients(ours, plain)


def have_the_same_gradients(ours, plain):
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad)


def test_the_largest_may_be_named():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -4.0, 2.0])
    assert weft.clip_grad_norm_(parameter, 2.0, "inf").item() == 4.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.5, -2.0, 1.0]))


def test_half_precision_does_not_overflow_and_dtypes_mix():
    half, full = nn.Parameter(torch.ones(4).half()), nn.Parameter(torch.ones(1).double())
    half.grad, full.grad = torch.full((4,), 3e4).half(), torch.full((1,), 8e4).double()
    norm = weft.clip_grad_norm_([half, full, half], 1.0)
    torch.testing.assert_close(norm.item(), 1e5)
    torch.testing.assert_close(half.grad, torch.full((4,), 0.3).half())


class Hostile:
    """Whatever is asked of it raises."""

    def __float__(self):
        raise RuntimeError("no number")

    __repr__ = __str__ = __float__


def test_nothing_and_what_is_wrong():
    parameter = nn.Parameter(torch.ones(2))
    assert weft.clip_grad_norm_(parameter, 1.0).item() == 0
    parameter.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(weft.WeftError, match="the norm of the gradients is inf"):
        weft.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert parameter.grad.tolist() == [1.0, math.inf]
    for wrong in (10**400, Hostile()):
        with pytest.raises(weft.WeftError, match="max_norm is"):
            weft.clip_grad_norm_(parameter, wrong)
    for most, p in ((-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, "two"), (None, 2.0)):
        with pytest.raises(weft.WeftError, match="max_norm is"):
            weft.clip_grad_norm_(parameter, most, p)


def test_what_are_no_parameters():
    empty = nn.ReLU().parameters()
    assert weft.clip_grad_norm_(empty, 1.0).item() == 0
    named = model(sparse=True).named_parameters()
    for wrong, text in (
        (None, "parameters is a NoneType: pass a module"),
        (3, "parameters is a int"),
        (nn.Linear, "parameters is a type"),
        ("abc", "parameters is a str, its item 0 a str: pass a module"),
        ([nn.Parameter(torch.ones(2)), None], "parameters is a list, its item 1 a NoneType"),
        (named, "parameters is a generator, its item 0 a tuple"),
        (empty, "parameters is a generator that is used up: make another"),
    ):
        with pytest.raises(weft.WeftError, match=text):
            weft.clip_grad_norm_(wrong, 1.0)
    with pytest.raises(weft.WeftError, match="parameters is a int: pass a module"):
        weft.clip_grad_norm_(3, 1.0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # torch's, that it is new
def test_a_gradient_of_another_layout():
    parameter = nn.Parameter(torch.ones(2, 2).to_sparse_csr())
    parameter.grad = parameter.detach().clone()
    with pytest.raises(weft.WeftError, match=r"^a gradient has layout torch\.sparse_csr: use"):
        weft.clip_grad_norm_([parameter], 1.0)


def test_a_gradient_that_only_stands_for_values():
    for where, text in ((torch.device("meta"), "on the meta device"), (FakeTensorMode(), "a Fake")):
        with where:
            parameter = nn.Parameter(torch.ones(2))
            parameter.grad = torch.ones(2)
            with pytest.raises(weft.WeftError, match=f"^a gradient is {text}"):
                weft.clip_grad_norm_(parameter, 1.0)
