"""Arguments that are no such thing at all, on one rank: all are told, and the next call works."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import weft
from weft.testing import spmd


def model():
    made = nn.Linear(2, 1)
    made(torch.ones(1, 2)).sum().backward()
    return made


def one():
    return torch.ones(2)


def rows():
    return torch.tensor([1]), torch.ones(1, 2)


def send(**options):
    return weft.exchange(one(), [torch.tensor([0])] * 3, **options)


WRONG = [
    "abc",
    3.5,
    iter(()),
    [1, 2],
    {"a": 1},
    nn.Linear,
    torch.ones(2),
    torch.ones(2).numpy(),
]

CALLS = {
    "sync_params module": (weft.sync_params, model, "module is a"),
    "sync_params src": (lambda x: weft.sync_params(model(), x), 0, "group_src is"),
    "sync_grads module": (weft.sync_grads, model, "module is a"),
    "sync_grads average": (lambda x: weft.sync_grads(model(), x), True, "average is"),
    "sync_grads dtype": (lambda x: weft.sync_grads(model(), wire_dtype=x), None, "wire_dtype is"),
    "all_reduce op": (lambda x: weft.all_reduce(one(), x), "sum", "op .* is unknown"),
    "all_reduce dtype": (lambda x: weft.all_reduce(one(), wire_dtype=x), None, "wire_dtype is"),
    "all_to_all": (weft.all_to_all, lambda: [one()] * 3, "inputs"),
    "exchange dtype": (lambda x: send(wire_dtype=x), None, "wire_dtype is"),
    "remote_rows": (lambda x: weft.remote_rows(x, 1), lambda: torch.tensor([2]), "indices is"),
    "remote_rows count": (lambda x: weft.remote_rows(torch.tensor([2]), x), 1, "count is"),
    "barrier": (weft.barrier, 9.0, "timeout is"),
    "sparse op": (lambda x: weft.sparse_all_reduce(rows(), x), "sum", "op|TypeError"),
    "sparse dtype": (lambda x: weft.sparse_all_reduce(rows(), wire_dtype=x), None, "wire_dtype"),
    "sparse_broadcast src": (lambda x: weft.sparse_broadcast(rows(), x), 0, "group_src is"),
    "sparse_reduce dst": (lambda x: weft.sparse_reduce(rows(), group_dst=x), 0, "group_dst is"),
}


@pytest.mark.parametrize("name", CALLS)
@spmd(3)
def test_what_is_no_such_argument_is_an_error_on_every_rank(group, name):
    call, good, text = CALLS[name]
    for wrong in WRONG:
        fine = {"barrier": float, "sparse op": type}.get(name, ())
        if isinstance(wrong, fine):
            continue  # seconds, and a function that ranks may have
        right = good() if callable(good) else good
        with pytest.raises(weft.WeftError, match=text) as caught:
            call(wrong if group.rank == 1 else right)
        said = str(caught.value).encode()[:999].ljust(999)
        said = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        assert weft.all_reduce(said, "min").equal(weft.all_reduce(said, "max")), wrong


TOO_LARGE = {
    "all_reduce": weft.all_reduce,
    "all_to_all": lambda x: weft.all_to_all([x] * 2),
    "exchange": lambda x: weft.exchange(x, [torch.tensor([0])] * 2),
    "exchange later": lambda x: weft.exchange(x, [torch.tensor([0])] * 2, async_op=True).wait(),
    "remote_rows": lambda x: weft.remote_rows(x[0], 2),
    "fetch": lambda x: weft.remote_rows(torch.tensor([0, 3]), 2).fetch(x),
}


@pytest.mark.parametrize("name", TOO_LARGE)
@spmd(2)
def test_what_does_not_fit_in_memory_is_an_error_on_every_rank(group, name):
    indices = torch.tensor([[0]] * 2)
    if group.rank:
        indices = indices[:1, :1].expand(2, 1 << 50)
    with pytest.raises(weft.WeftError, match=r"^rank 1: .* memory"):
        TOO_LARGE[name](indices)
    assert weft.all_reduce(torch.ones(1)).item() == group.size


def fake():
    with FakeTensorMode():
        return torch.ones(2)


SENDS = {
    "all_reduce": weft.all_reduce,
    "max": lambda x: weft.all_reduce(x, "max"),
    "all_to_all": lambda x: weft.all_to_all([x] * 2)[0],
    "exchange": lambda x: weft.exchange(x, [torch.tensor([0])] * 2)[0],
    "fetch": lambda x: weft.remote_rows(torch.tensor([0, 3]), 2).fetch(x),
}

MANY = (32, 33, 300)  # dimensions: of the first, tensors are sent

DIMS = {
    **{name: SENDS[name] for name in ("all_to_all", "exchange", "fetch")},
    "AllGather": lambda x: weft.nn.AllGather(weft.Partition(2), 0)(x),
}


@pytest.mark.parametrize("name", DIMS)
@spmd(2)
def test_more_dimensions_than_are_sent_are_an_error_on_every_rank(group, name):
    for dims in MANY:
        sent = torch.ones(2, *[1] * (dims - 1))
        if dims == MANY[0]:
            assert DIMS[name](sent).shape[1:] == sent.shape[1:]
            continue
        with pytest.raises(weft.WeftError, match=f"^rank 1: .* has {dims} dimensions: pass a view"):
            DIMS[name](sent if group.rank else torch.ones(2))
        assert weft.all_reduce(torch.ones(1)).item() == group.size


WRAPPED = {
    "a FakeTensor": lambda send: send(fake()),
    "in a transform": lambda send: torch.func.grad(lambda x: send(x).sum())(torch.ones(2)),
    "in a transform such": lambda send: torch.vmap(send)(torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", SENDS)
@spmd(2)
def test_what_only_stands_for_values_is_an_error_on_every_rank(group, name):
    """Which it has not where the call is made; the group goes on."""
    send = SENDS[name]
    for text, wrapped in WRAPPED.items():
        with pytest.raises(weft.WeftError, match=f"^rank 1: .* is {text}"):
            wrapped(send) if group.rank else send(torch.ones(2))
        weft.barrier()


@pytest.mark.parametrize("name", SENDS)
@spmd(2)
def test_batches_of_gradients_are_an_error_on_every_rank(group, name):
    rows = torch.ones(2, requires_grad=True)
    result = SENDS[name](rows)
    with pytest.raises(weft.WeftError, match=r"^rank 1: \w+: a gradient is in a transform"):
        if group.rank:
            seeds = torch.ones(3, *result.shape)
            torch.autograd.grad(result, rows, seeds, is_grads_batched=True)
        else:
            result.sum().backward()
    weft.barrier()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
@pytest.mark.parametrize("name", SENDS)
@spmd(2, on=("threads",))
def test_derivatives_of_forward_mode_are_not_lost_in_silence(group, name):
    with pytest.raises(weft.WeftError, match=r"^rank 1: .* has a tangent of forward-mode"):
        if group.rank:
            with forward_ad.dual_level():
                SENDS[name](forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        else:
            SENDS[name](torch.ones(2))
    weft.barrier()


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])  # its layout is strided

GOOD = {
    "all_to_all": ([torch.ones(2, 2)] * 3,),
    "exchange": (torch.ones(4, 2), [torch.tensor([0, 3])] * 3),
    "all_reduce": (torch.ones(2),),
}

TOLD = {
    "all_to_all": {
        "inputs is a Tensor: pass a list of 3 tensors": lambda x: (x[0],),
        "inputs has 2 tensors for 3 ranks": lambda x: (x[:2],),
        r"inputs\[1\] is a NoneType": lambda x: ([x[0], None, x[1]],),
        r"inputs\[2\] has dtype torch.float64": lambda x: ([*x[:2], x[2].double()],),
        r"dtype: .*float32, rank 1 has torch.float64": lambda x: ([t.double() for t in x],),
        r"inputs\[0\] is of layout torch.sparse_coo": lambda x: ([t.to_sparse() for t in x],),
        r"inputs\[0\] is nested, which to_padded_tensor\(\) makes plain": lambda x: ([NESTED] * 3,),
        r"inputs\[0\] is on the meta device": lambda x: ([t.to("meta") for t in x],),
    },
    "exchange": {
        r"to\[1\] has index 9, rows": lambda r, to: (r, [to[0], torch.tensor([9]), None]),
        r"to\[2\] has index -1": lambda r, to: (r, [None, None, torch.tensor([-1])]),
        r"to\[0\] is torch.float32": lambda r, to: (r, [torch.ones(1), None, None]),
        "to is 2 entries for 3 ranks": lambda r, to: (r, to[:2]),
        r"to\[0\] has shape \(1, 1\)": lambda r, to: (r, [to[0][None, :1], None, None]),
        r"to\[0\] is on the meta device": lambda r, to: (r, [to[0].to("meta"), None, None]),
        r"row shape: .* \(2,\), rank 1 has \(1,\)": lambda r, to: (r[:, :1], to),
        "rows has no dimension": lambda r, to: (r[0, 0], to),
        r"rows is nested, which to_padded_tensor\(\) makes plain: pass": lambda r, to: (NESTED, to),
        "rows is on the meta device": lambda r, to: (r.to("meta"), to),
    },
    "all_reduce": {
        r"shape: .*\(2,\), rank 1 has \(1,\)": lambda x: (x[:1],),
        "dtype: .*rank 1 has torch.float64": lambda x: (x.double(),),
        "op: .*rank 1 has max": lambda x: (x, "max"),
        "op 'median' is unknown: use one of sum": lambda x: (x, "median"),
        "op bor does not apply to torch.float32": lambda x: (x, "bor"),
        "op avg is for floating point": lambda x: (x.long(), "avg"),
        "op avg does not apply to torch.complex32": lambda x: (x.to(torch.complex32), "avg"),
        "weft.sparse_all_reduce": lambda x: (x.to_sparse(),),
        "tensor is on the meta device": lambda x: (x.to("meta"),),
        "tensor is a NoneType": lambda x: (None,),
        "prod has no gradient here": lambda x: (x.clone().requires_grad_(), "prod"),
    },
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("name", "text"), [(name, text) for name in TOLD for text in TOLD[name]])
@spmd(3, on=("threads",))
def test_one_rank_errs_and_all_are_told(group, name, text):
    call, change, good = getattr(weft, name), TOLD[name][text], GOOD[name]
    with pytest.raises(weft.WeftError, match=text) as caught:
        call(*(change(*good) if group.rank == 1 else good))
    assert "rank 1" in str(caught.value)
    call(*good)
