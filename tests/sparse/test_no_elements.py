"""Tensors without elements of their own, on one rank: all are told, and the next call works."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import UninitializedBuffer

import weft
from cases import alike, in_case
from weft.testing import spmd

# torch's own, where jvp takes an operation apart
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


class Wrapper(Tensor):
    """A tensor made of another."""

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of a Wrapper")


def fake(tensor):
    return FakeTensorMode().from_tensor(tensor)


def distributed(tensor):
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)  # of nobody else
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def lazy(tensor):
    return UninitializedBuffer(requires_grad=False, dtype=tensor.dtype)


def nested(tensor):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return torch.nested.nested_tensor([tensor[0], tensor[1]])  # its layout is strided


def jagged(tensor):
    return torch.nested.nested_tensor([tensor.reshape(-1)] * 2, layout=torch.jagged)


def freed(tensor, left=0):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(left)
    return tensor


def shrunk(tensor):
    return freed(tensor, tensor.nbytes - 1)


def escaped(transform):
    def make(tensor):
        found = []
        transform(lambda x: found.append(with_dtype(x, tensor)))(torch.ones(tensor.shape))
        return found[0]

    return make


def with_dtype(x, tensor):
    """`tensor` as if it were made of x."""
    return (0 * x + tensor).to(tensor.dtype)


def inside(transform):
    """Calls `use` with a tensor that a transform has made something else of."""

    def call(use, tensor):
        transform(lambda x: use(with_dtype(x, tensor)))(torch.ones(tensor.shape))

    return call


def passed(make):
    return lambda use, tensor: use(make(tensor))


def grad(function):
    return torch.func.grad(lambda x: (function(x), x.sum())[1])


def batched(function):
    return lambda x: torch.vmap(lambda x: (function(x), x)[1])(torch.stack([x, x]))


def forward(function):
    return lambda x: torch.func.jvp(lambda x: (function(x), x)[1], (x,), (x,))


# how a tensor is made one, and what everybody must be told of it
KINDS = {
    "fake": (passed(fake), "a FakeTensor"),
    "DTensor": (passed(distributed), r"a DTensor, which to_local\(\) makes plain"),
    "subclass": (passed(Wrapper), "a Wrapper"),
    "lazy": (passed(lazy), "of no shape yet"),
    "nested": (passed(nested), "nested"),
    "jagged": (passed(jagged), "nested"),
    "meta": (passed(lambda x: x.to("meta")), "on the meta device"),
    "sparse": (passed(lambda x: x.to_sparse()), "of layout torch.sparse_coo"),
    "freed": (passed(freed), "without memory"),
    "shrunk": (passed(shrunk), "larger than its memory"),
    "zeros": (passed(lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)), "without mem"),
    "grad": (inside(grad), "in a transform"),
    "vmap": (inside(batched), "in a transform"),
    "jvp": (inside(forward), "in a transform"),
    "after grad": (passed(escaped(grad)), "in a transform"),
    "after vmap": (passed(escaped(batched)), "in a transform"),
}


def root(group):
    """Who errs, and the root of the calls that have one: the others' arguments may be anything."""
    return group.size - 1


CALLS = {
    "all_reduce": lambda group, rows: weft.sparse_all_reduce(rows),
    "max": lambda group, rows: weft.sparse_all_reduce(rows, "max"),
    "work": lambda group, rows: weft.sparse_all_reduce(rows, async_op=True).wait(),
    "list": lambda group, rows: weft.sparse_all_reduce([ROWS, rows, ROWS]),
    "reduce_scatter": lambda group, rows: weft.sparse_reduce_scatter(rows),
    "ranges": lambda group, rows: weft.sparse_reduce_scatter(rows, ranges=[0, *group.size * [9]]),
    "reduce": lambda group, rows: weft.sparse_reduce(rows, group_dst=root(group)),
    "all_gather": lambda group, rows: weft.sparse_all_gather(rows),
    "broadcast": lambda group, rows: weft.sparse_broadcast(rows, group_src=root(group)),
    "explain": lambda group, rows: weft.explain(rows),
}


def good():
    return torch.tensor([1, 5, 2]), torch.ones(3, 4)


ROWS = good()


def coo(indices, values):
    return torch.sparse_coo_tensor(indices[None], values, (9, 4), check_invariants=False)


# what is made something else: its number, and how both are given
PARTS = {
    "indices": (0, lambda x, other: (x, other)),
    "values": (1, lambda x, other: (other, x)),
    "values of Rows": (1, lambda x, other: weft.Rows(other, x)),
}


def told(group, case, text, wrong, right):
    """What is wrong on one rank is raised, the same on every rank; the next call works."""
    with in_case(*case):
        with pytest.raises(weft.WeftError, match=rf"^rank {root(group)}: .*{text}") as caught:
            (wrong if group.rank == root(group) else right)()
        alike(group, str(caught.value))
        for _ in range(2):
            indices, values = weft.sparse_all_reduce(good())
            assert indices.tolist() == [1, 2, 5] and values.eq(group.size).all()


# three ranks, as one of two sees no third that is told; two for the buffers below, which are
# refused by the same checks


@pytest.mark.parametrize("kind", KINDS)
@spmd(3, on=("threads",))
def test_rows_that_only_stand_for_some(group, kind):
    """In each call, in each part of the rows in turn; of the next kind it begins with the next."""
    made, text = KINDS[kind]
    for turn, (name, call) in enumerate(CALLS.items(), [*KINDS].index(kind)):
        call(group, good())  # so that what came of the checks is known
        part, (number, of) = [*PARTS.items()][turn % len(PARTS)]
        pair = good()  # made here: in a transform it would be of that, too

        def use(tensor, call=call, of=of, other=pair[1 - number]):
            return call(group, of(tensor, other))

        wrong, right = partial(made, use, pair[number]), partial(call, group, good())
        told(group, (name, part), f"the tensor of {part.split()[0]} is {text}", wrong, right)


def without(part, left):
    """A sparse tensor of whose part so many bytes are left."""
    tensor = coo(*good())
    getattr(tensor, f"_{part}")().untyped_storage().resize_(left)
    return tensor


COO = {
    "fake": (lambda use: use(fake(coo(*ROWS))), "rows is a FakeTensor"),
    "meta": (lambda use: use(coo(*good()).to("meta")), "the tensor of indices is on the meta"),
    "freed": (lambda use: use(without("indices", 0)), "the tensor of indices is without memory"),
    "shrunk": (lambda use: use(without("indices", 8)), "the tensor of indices is larger than its"),
    "shrunk values": (lambda use: use(without("values", 8)), "the tensor of values is larger than"),
    "grad": (lambda use: grad(lambda x: use(coo(ROWS[0], x)))(ROWS[1]), "rows is in a tra"),
    "vmap": (lambda use: torch.vmap(lambda x: (use(x), 1)[1:])(coo(*good())), "rows is in a tra"),
    "dense": (lambda use: use(fake(torch.ones(9, 4))), "rows is a FakeTensor"),
    "dense in a grad": (lambda use: grad(use)(torch.ones(9, 4)), "rows is in a transform"),
}


@pytest.mark.parametrize("kind", COO)
@spmd(3, on=("threads",))
def test_sparse_tensors_that_only_stand_for_some(group, kind):
    made, text = COO[kind]
    for name, call in CALLS.items():
        if "list" not in name:
            call(group, coo(*good()))
            use = partial(call, group)
            told(group, (name,), text, partial(made, use), partial(use, coo(*good())))


@pytest.mark.parametrize("kind", KINDS)
@spmd(3, on=("threads",))
def test_functions_that_return_what_only_stands_for_some(group, kind):
    made, text = KINDS[kind]

    def add(left, right):
        found = [left + right]
        if group.rank == root(group):
            made(found.append, left + right)
        return found[-1]

    duplicates = torch.tensor([1, 1, 2, 2]), torch.ones(4, 4)

    def call():
        return weft.sparse_all_reduce(duplicates, add)

    told(group, ("an operation",), text, call, call)


WHERE = torch.tensor([[1, 5, 2], [1, 8, 0]])
TWO_DIMS = torch.sparse_coo_tensor(WHERE, torch.ones(3, 4), (9, 9, 4), check_invariants=True)
RIGHT = {**CALLS, "two dims": lambda group, rows: weft.sparse_all_reduce(TWO_DIMS)}


def shown(found):
    """In words; while some thread is in a jvp, torch cannot print a sparse tensor in any."""
    if isinstance(found, torch.Tensor) and found.is_sparse:
        found = found.shape, found.indices(), found.values()
    return str(found)


@pytest.mark.parametrize("name", RIGHT)
@spmd(3, on=("threads",))
def test_plain_rows_are_reduced_inside_of_a_transform_too(group, name):
    """What is from outside of it is what it is."""
    want = shown(RIGHT[name](group, good()))
    for transform in (grad, batched, forward):
        found = []

        def use(x, found=found):
            found.append(RIGHT[name](group, ROWS))

        if group.rank == root(group):
            transform(use)(torch.ones(2))
        else:
            use(None)
        if "explain" in name:  # with the time that it has measured
            assert found
        else:
            assert shown(found[0]) == want
