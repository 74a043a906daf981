"""Arguments that are no such thing at all, on one rank: all are told, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import weft
from weft.testing import spmd


def model() -> nn.Module:
    made = nn.Linear(2, 1)
    made(torch.ones(1, 2)).sum().backward()
    return made


def one() -> torch.Tensor:
    return torch.ones(2)


def rows() -> Any:
    return torch.tensor([1]), torch.ones(1, 2)


def finish_otherwise(average: Any) -> None:
    made = nn.Linear(2, 1)
    overlap = weft.overlap_grads(made)
    try:
        made(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(made, average)
    finally:
        overlap.remove()


WRONG: list[Any] = [
    "abc",
    3.5,
    iter(()),
    [1, 2],
    {"a": 1},
    nn.Linear,
    torch.ones(2),
    torch.ones(2).numpy(),
]

CALLS: dict[str, tuple[Callable[[Any], object], Any, str]] = {
    "sync_params module": (weft.sync_params, model, "module is a"),
    "sync_params src": (lambda x: weft.sync_params(model(), x), 0, "group_src is"),
    "sync_grads module": (weft.sync_grads, model, "module is a"),
    "sync_grads average": (lambda x: weft.sync_grads(model(), x), True, "average is"),
    "sync_grads dtype": (lambda x: weft.sync_grads(model(), wire_dtype=x), None, "wire_dtype is"),
    "overlap_grads module": (weft.overlap_grads, model, "module is a"),
    "overlap_grads average": (lambda x: weft.overlap_grads(model(), x), True, "average is"),
    "overlap_grads bytes": (
        lambda x: weft.overlap_grads(model(), bucket_bytes=x),
        99,
        "bucket_bytes is",
    ),
    "overlapped average": (finish_otherwise, True, "sync_grads has another group, average or"),
    "all_reduce op": (lambda x: weft.all_reduce(one(), x), "sum", "op .* is unknown"),
    "all_reduce dtype": (lambda x: weft.all_reduce(one(), wire_dtype=x), None, "wire_dtype is"),
    "all_to_all": (weft.all_to_all, lambda: [one()] * 3, "inputs"),
    "barrier": (weft.barrier, 9.0, "timeout is"),
    "sparse op": (lambda x: weft.sparse_all_reduce(rows(), x), "sum", "op|TypeError"),
    "sparse dtype": (
        lambda x: weft.sparse_all_reduce(rows(), wire_dtype=x),
        None,
        "wire_dtype is",
    ),
    "sparse_broadcast src": (lambda x: weft.sparse_broadcast(rows(), x), 0, "group_src is"),
    "sparse_reduce dst": (lambda x: weft.sparse_reduce(rows(), group_dst=x), 0, "group_dst is"),
}


@pytest.mark.parametrize("name", CALLS)
@spmd(3)
def test_what_is_no_such_argument_is_an_error_on_every_rank(wire, name):
    call, good, text = CALLS[name]
    for wrong in WRONG:
        fine = {"barrier": float, "sparse op": type}.get(name, ())
        if isinstance(wrong, fine):
            continue  # seconds, and a function that ranks may have
        right = good() if callable(good) else good
        with pytest.raises(weft.WeftError, match=text) as caught:
            call(wrong if wire.rank == 1 else right)
        said = str(caught.value).encode()[:999].ljust(999)
        said = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        assert weft.all_reduce(said, "min").equal(weft.all_reduce(said, "max")), wrong


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


SENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": weft.all_reduce,
    "max": lambda x: weft.all_reduce(x, "max"),
    "all_to_all": lambda x: weft.all_to_all([x] * 2)[0],
    "exchange": lambda x: weft.exchange(x, [torch.tensor([0])] * 2)[0],
}

WRAPPED: dict[str, Callable[[Callable[[torch.Tensor], Any]], object]] = {
    "a FakeTensor": lambda send: send(fake()),
    "in a transform": lambda send: torch.func.grad(lambda x: send(x).sum())(torch.ones(2)),
    "in a transform such": lambda send: torch.vmap(send)(torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", SENDS)
@spmd(2)
def test_what_only_stands_for_values_is_an_error_on_every_rank(wire, name):
    """Which it has not where the call is made; the group goes on."""
    send = SENDS[name]
    for text, wrapped in WRAPPED.items():
        with pytest.raises(weft.WeftError, match=f"^rank 1: .* is {text}"):
            wrapped(send) if wire.rank else send(torch.ones(2))
        weft.barrier()


@pytest.mark.parametrize("name", SENDS)
@spmd(2)
def test_batches_of_gradients_are_an_error_on_every_rank(wire, name):
    rows = torch.ones(2, requires_grad=True)
    result = SENDS[name](rows)
    with pytest.raises(weft.WeftError, match=r"^rank 1: a gradient is in a transform"):
        if wire.rank:
            seeds = torch.ones(3, *result.shape)
            torch.autograd.grad(result, rows, seeds, is_grads_batched=True)
        else:
            result.sum().backward()
    weft.barrier()
