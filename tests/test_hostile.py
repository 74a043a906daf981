"""Values that no argument expects, one at a time, on one rank.

All ranks raise the same error, which names the rank, or none does; and the next call works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from cases import in_case
from weft.group import default
from weft.testing import run, spmd

RANKS, CULPRIT = 2, 1


class Raises:
    """Whatever is asked of it raises."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("no")

    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = _raise
    __repr__ = __str__ = __format__ = __bool__ = __len__ = __iter__ = __getitem__ = _raise
    __index__ = __int__ = __float__ = __call__ = _raise
    __hash__ = _raise  # type: ignore[assignment]


class NoClass(Raises):
    """Not even `isinstance` works on it."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, _: object) -> None:
        raise RuntimeError("no class")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise self


class RaisesUnspeakable(Raises):
    """What it raises cannot be told, either."""

    def _raise(self, *_: object) -> Any:
        raise Unspeakable

    __eq__ = __ne__ = __repr__ = __str__ = __bool__ = __iter__ = __index__ = __call__ = _raise
    __hash__ = _raise  # type: ignore[assignment]


class Op(str, Enum):  # noqa: UP042  # whose `str` is another text
    """An op as some programs name it."""

    SUM = "sum"


class EqualToAll:
    """Takes itself for whatever it is compared with."""

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("sum")


class Text(str):
    """A text that says it is another, or nothing at all."""

    def __str__(self) -> str:
        return "median"

    def encode(self, *_: object) -> Any:
        raise RuntimeError("no bytes")

    def __format__(self, _: str) -> Any:
        raise RuntimeError("no format")

    def __hash__(self) -> int:
        return super().__hash__()


class Number(int):
    """A number that cannot be told."""

    def __repr__(self) -> str:
        raise RuntimeError("no digits")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class Mute(torch.Tensor):
    """A tensor of which torch can ask nothing."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise RuntimeError("no function of torch's")


class Items(list):  # type: ignore[type-arg]
    """A list that has no items when it is looked into."""

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


class Named(Mapping):  # type: ignore[type-arg]
    """A tensor of any name, also of one that no dict takes."""

    def __init__(self, name: object) -> None:
        self._name = name

    def __iter__(self) -> Any:
        return iter([self._name])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: object) -> torch.Tensor:
        return torch.ones(4)


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "an object": object,
    "what raises": Raises,
    "what has no class": NoClass,
    "what raises what cannot be told": RaisesUnspeakable,
    "what is equal to all": EqualToAll,
    "a class": lambda: int,
    "a class of weft's": lambda: weft.Rows,
    "a module": lambda: nn.Linear(2, 1),
    "a function": lambda: lambda *_: 1 // 0,
    "a generator": lambda: (1 // 0 for _ in range(2)),
    "True": lambda: True,
    "-1": lambda: -1,
    "7": lambda: 7,
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "-2**70": lambda: -(2**70),
    "10**5000": lambda: 10**5000,
    "a number that cannot be told": lambda: Number(1),
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e300": lambda: 1e300,
    "1j": lambda: 1j,
    "numpy's 0": lambda: np.int64(0),
    "numpy's True": lambda: np.True_,
    "numpy's nan": lambda: np.float32("nan"),
    "an array": lambda: np.ones(3),
    "''": str,
    "'sum'": lambda: "sum",
    "an enum's": lambda: Op.SUM,
    "a text that says another": lambda: Text("sum"),
    "4,000 letters": lambda: "é" * 4000,
    "a surrogate": lambda: "\ud800",
    "separators": lambda: "a\x1d\x1eb\x1f\0\n",
    "bytes": lambda: b"sum",
    "a set": lambda: {1, 2},
    "a dict": lambda: {"a": 1},
    "a list": lambda: [0, 1],
    "a list of itself": lambda: (x := [], x.append(x))[0],  # type: ignore[func-returns-value]
    "a list without items": lambda: Items([1, 2]),
    "a tuple of what raises": lambda: (Raises(), NoClass()),
    "a tensor": lambda: torch.ones(2),
    "a tensor of one": lambda: torch.tensor(1),
    "a tensor that says nothing": lambda: torch.ones(2).as_subclass(Mute),
    "a dtype": lambda: torch.int8,
    "a device": lambda: torch.device("meta"),
    "NotImplemented": lambda: NotImplemented,
    "Ellipsis": lambda: ...,
}


def one() -> torch.Tensor:
    return torch.ones(2)


def rows() -> Any:
    return torch.tensor([1, 0]), torch.ones(2, 2)


def indices() -> torch.Tensor:
    return torch.tensor([1, 0])


def pair(count: int = 9) -> Any:
    return torch.empty(count, dtype=torch.int64), torch.empty(count, 2)


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 1), nn.Embedding(2, 2, sparse=True))
    made[0](torch.ones(1, 2)).sum().backward()
    made[1](torch.tensor([1])).sum().backward()
    return made


def send(**options: Any) -> Any:
    return weft.exchange(one(), [torch.tensor([0])] * RANKS, **options)


def fetch(rows: Any, *arguments: Any, **options: Any) -> Any:
    return weft.remote_rows(torch.tensor([0, 3]), 2).fetch(rows, *arguments, **options)


def here() -> weft.Group:
    return default.current()


def topk(**settings: Any) -> Any:
    return weft.ddp.TopK(**({"density": 0.5, "min_numel": 1, "group": here()} | settings))


def grid() -> weft.Partition:
    return weft.Partition(here().size)


def table(kind: Any) -> Any:
    return kind.from_pretrained(torch.ones(5, 2))


def waited(work: Any) -> Any:
    return work.wait() if hasattr(work, "wait") else work


S = weft.sparse_all_reduce
CALLS: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {
    "sparse rows": (S, rows),
    "sparse indices": (lambda x: S((x, rows()[1])), lambda: rows()[0]),
    "sparse values": (lambda x: S((rows()[0], x)), lambda: rows()[1]),
    "sparse height": (lambda x: S(weft.Rows(*rows(), x)), lambda: 9),
    "sparse op": (lambda x: S(rows(), x), lambda: "sum"),
    "sparse async": (lambda x: waited(S(rows(), async_op=x)), lambda: False),
    "sparse algorithm": (lambda x: S(rows(), algorithm=x), lambda: "auto"),
    "sparse dtype": (lambda x: S(rows(), wire_dtype=x), lambda: None),
    "list rows": (lambda x: S([rows(), x]), rows),
    "list op": (lambda x: S([rows()], x), lambda: "sum"),
    "list async": (lambda x: waited(S([rows()], async_op=x)), lambda: False),
    "list algorithm": (lambda x: S([rows()], algorithm=x), lambda: "auto"),
    "list dtype": (lambda x: S([rows()], wire_dtype=x), lambda: None),
    "explain rows": (weft.explain, rows),
    "explain op": (lambda x: weft.explain(rows(), x), lambda: "sum"),
    "explain algorithm": (lambda x: weft.explain(rows(), algorithm=x), lambda: "auto"),
    "explain dtype": (lambda x: weft.explain(rows(), wire_dtype=x), lambda: None),
    "all_gather rows": (weft.sparse_all_gather, rows),
    "all_gather async": (
        lambda x: waited(weft.sparse_all_gather(rows(), async_op=x)),
        lambda: False,
    ),
    "all_gather counts": (
        lambda x: weft.sparse_all_gather(rows(), return_counts=x),
        lambda: False,
    ),
    "all_gather dtype": (lambda x: weft.sparse_all_gather(rows(), wire_dtype=x), lambda: None),
    "broadcast rows": (
        lambda x: weft.sparse_broadcast(x, group_src=CULPRIT),
        rows,
    ),
    "broadcast src": (lambda x: weft.sparse_broadcast(rows(), x), lambda: 0),
    "broadcast async": (
        lambda x: waited(weft.sparse_broadcast(rows(), async_op=x)),
        lambda: False,
    ),
    "broadcast dtype": (lambda x: weft.sparse_broadcast(rows(), wire_dtype=x), lambda: None),
    "reduce rows": (weft.sparse_reduce, rows),
    "reduce op": (lambda x: weft.sparse_reduce(rows(), x), lambda: "sum"),
    "reduce dst": (lambda x: weft.sparse_reduce(rows(), group_dst=x), lambda: 0),
    "reduce async": (lambda x: waited(weft.sparse_reduce(rows(), async_op=x)), lambda: False),
    "reduce dtype": (lambda x: weft.sparse_reduce(rows(), wire_dtype=x), lambda: None),
    "reduce_scatter rows": (weft.sparse_reduce_scatter, rows),
    "reduce_scatter op": (lambda x: weft.sparse_reduce_scatter(rows(), x), lambda: "sum"),
    "reduce_scatter async": (
        lambda x: waited(weft.sparse_reduce_scatter(rows(), async_op=x)),
        lambda: False,
    ),
    "reduce_scatter ranges": (
        lambda x: weft.sparse_reduce_scatter(rows(), ranges=x),
        lambda: [0, 1, 2],
    ),
    "reduce_scatter bound": (
        lambda x: weft.sparse_reduce_scatter(rows(), ranges=[0, 1, x]),
        lambda: 2,
    ),
    "reduce_scatter dtype": (
        lambda x: weft.sparse_reduce_scatter(rows(), wire_dtype=x),
        lambda: None,
    ),
    "all_reduce tensor": (weft.all_reduce, one),
    "all_reduce op": (lambda x: weft.all_reduce(one(), x), lambda: "sum"),
    "all_reduce dtype": (lambda x: weft.all_reduce(one(), wire_dtype=x), lambda: None),
    "all_to_all inputs": (weft.all_to_all, lambda: [one()] * RANKS),
    "all_to_all input": (lambda x: weft.all_to_all([one(), x]), one),
    "exchange rows": (lambda x: weft.exchange(x, [torch.tensor([0])] * RANKS), one),
    "exchange to": (
        lambda x: weft.exchange(one(), x),
        lambda: [torch.tensor([0])] * RANKS,
    ),
    "exchange to one": (lambda x: weft.exchange(one(), [None, x]), lambda: None),
    "exchange async": (lambda x: waited(send(async_op=x)), lambda: False),
    "exchange dtype": (lambda x: send(wire_dtype=x), lambda: None),
    "remote_rows indices": (lambda x: weft.remote_rows(x, 1), lambda: torch.tensor([1])),
    "remote_rows count": (lambda x: weft.remote_rows(torch.tensor([0]), x), lambda: 1),
    "fetch rows": (fetch, one),
    "fetch async": (lambda x: waited(fetch(one(), x)), lambda: False),
    "fetch dtype": (lambda x: fetch(one(), wire_dtype=x), lambda: None),
    "barrier timeout": (weft.barrier, lambda: None),
    "attempt function": (weft.attempt, lambda: lambda: 1),
    "attempt name": (lambda x: weft.attempt(lambda: 1, name=x), lambda: "attempt"),
    "sync_params module": (weft.sync_params, model),
    "sync_params src": (lambda x: weft.sync_params(model(), x), lambda: 0),
    "sync_grads module": (weft.sync_grads, model),
    "sync_grads average": (lambda x: weft.sync_grads(model(), x), lambda: True),
    "sync_grads dtype": (lambda x: weft.sync_grads(model(), wire_dtype=x), lambda: None),
    "sparsified tensors": (
        lambda x: weft.sync_sparsified(x, topk()),
        lambda: [torch.ones(4)],
    ),
    "sparsified tensor": (lambda x: weft.sync_sparsified([x], topk()), lambda: torch.ones(4)),
    "sparsified name": (
        lambda x: weft.sync_sparsified(Named(x), topk()),
        lambda: "a",
    ),
    "sparsified state": (
        lambda x: weft.sync_sparsified([torch.ones(4)], x),
        topk,
    ),
    **{
        f"TopK {name}": (
            lambda x, name=name: weft.sync_sparsified([torch.ones(4)], topk(**{name: x})),
            lambda right=right: right,
        )
        for name, right in {
            "density": 0.5,
            "error_feedback": True,
            "min_numel": 1,
            "wire_dtype": None,
        }.items()
    },
    "State dtype": (
        lambda x: weft.ddp.State(here(), wire_dtype=x).group,
        lambda: None,
    ),
    "AllGather": (lambda x: weft.nn.AllGather(grid(), 0)(x), one),
    "AllSumReduce": (lambda x: weft.nn.AllSumReduce(grid(), 0)(x), one),
    "HaloExchange": (lambda x: weft.nn.HaloExchange(grid(), 1)(x), one),
    "ShardedEmbedding": (lambda x: table(weft.nn.ShardedEmbedding)(x), indices),
    "ShardedEmbeddingBag": (
        lambda x: table(weft.nn.ShardedEmbeddingBag)(x),
        lambda: indices()[None],
    ),
    "bag's offsets": (
        lambda x: table(weft.nn.ShardedEmbeddingBag)(indices(), x),
        lambda: torch.tensor([0]),
    ),
    "lookup's inputs": (
        lambda x: weft.nn.sharded_lookup([table(weft.nn.ShardedEmbedding)], x),
        lambda: [indices()],
    ),
}


def told(call: Callable[[Any], object], given: Any) -> str:
    """The error that a call raises, in words; empty: none."""
    try:
        call(given)
    except weft.WeftError as error:
        return str(error)
    return ""


def programmed(group: weft.Group, name: str, values: Iterable[str]) -> dict[str, str]:
    """What this rank is told for each of the values."""
    call, right = CALLS[name]
    found = {}
    for value in values:
        with in_case(value):
            found[value] = told(call, VALUES[value]() if group.rank == CULPRIT else right())
            assert weft.all_reduce(torch.ones(1)).item() == group.size
    return found


ALIKE = ("rows", "op", "async", "algorithm", "dtype")  # arguments that many calls have


def values_for(name: str) -> list[str]:
    """All values; a quarter of them, another for each call, of what is an argument of many calls.

    The first call that has it gets all: what is wrong with a value is found out in one place, and
    here each call shows that it asks there.
    """
    argument = name.split()[-1]
    calls = [each for each in CALLS if each.split()[-1] == argument]
    turn = calls.index(name)
    if argument not in ALIKE or name in ("exchange rows", "fetch rows") or turn == 0:
        return [*VALUES]
    return [*VALUES][turn % 4 :: 4]


@pytest.mark.parametrize("name", CALLS)
def test_one_rank_passes_what_nobody_expects(name):
    values = values_for(name)
    of_ranks = run(RANKS, programmed, name, values)
    for value in values:
        texts = {found[value] for found in of_ranks}
        assert len(texts) == 1, value
        assert texts == {""} or f"rank {CULPRIT}" in texts.pop(), value


@pytest.mark.parametrize("name", ["attempt name", "all_reduce op", "sparse dtype", "AllGather"])
def test_among_many_ranks(name):
    """Whose statements others pass on."""
    values = ["what raises", "10**5000", "4,000 letters", "a surrogate", "separators"]
    of_ranks = run(18, programmed, name, values)
    assert all(found == of_ranks[0] for found in of_ranks)


GROUPS: dict[str, Callable[[Any], object]] = {
    "sparse_all_reduce": lambda x: S(rows(), group=x),
    "sparse_all_gather": lambda x: weft.sparse_all_gather(rows(), x),
    "sparse_broadcast": lambda x: weft.sparse_broadcast(rows(), group=x),
    "all_reduce": lambda x: weft.all_reduce(one(), group=x),
    "all_to_all": lambda x: weft.all_to_all([one()] * RANKS, x),
    "attempt": lambda x: weft.attempt(list, x),
    "barrier": lambda x: weft.barrier(group=x),
    "sync_grads": lambda x: weft.sync_grads(model(), group=x),
    "Partition": lambda x: weft.Partition(RANKS, group=x).group,
    "last_call": weft.sparse.last_call,
}


@spmd(RANKS, on=("threads",))
def test_what_are_no_ranks_is_told_to_its_rank_alone(group):
    for value, make in VALUES.items():
        if group.rank == CULPRIT and value != "a list":  # which has all ranks
            with in_case(value), pytest.raises(weft.WeftError, match=r"are not distinct|no part"):
                group.subset(make())
    assert weft.all_reduce(torch.ones(1)).item() == group.size


@pytest.mark.parametrize("name", GROUPS)
@spmd(RANKS, on=("threads",))
def test_what_is_no_group_is_told_to_its_rank_alone(group, name):
    for value, make in VALUES.items():
        if group.rank == CULPRIT and value != "None":
            with in_case(value), pytest.raises(weft.WeftError, match="is no group"):
                GROUPS[name](make())
    assert weft.all_reduce(torch.ones(1)).item() == group.size
