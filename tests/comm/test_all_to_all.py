"""`all_to_all` and `exchange`: what is sent comes where it belongs, and gradients come back."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import weft
from cases import in_case
from weft.base.memory import fresh
from weft.base.tensors import as_bytes
from weft.comm.staging import move
from weft.testing import spmd

EVERYWHERE = ("threads", "verbs", "processes", "gloo")

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def sent(source, to, dtype=torch.float32, size=None):
    """What `source` sends to `to`: uneven, two-dimensional, sometimes of no elements."""
    count = (3 * source + 5 * to) % 7 if size is None else size
    return (torch.arange(count * 2) + 10 * source + to).remainder(50).reshape(count, 2).to(dtype)


def same(found, wanted):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert torch.equal(as_bytes(found.contiguous()), as_bytes(wanted.contiguous()))


@spmd(1, 2, 5, on=EVERYWHERE)
def test_uneven_tensors_of_every_dtype(group):
    """Inputs may be written at once, and results are the caller's own."""
    kept = []
    cases = [*((dtype, None) for dtype in DTYPES), (torch.float32, 20_000), (torch.float32, 70_000)]
    for dtype, rows in cases:  # in the opening, and on their own
        with in_case(dtype, rows):
            inputs = [sent(group.rank, to, dtype, rows) for to in range(group.size)]
            results = weft.all_to_all(inputs)
            for to, tensor in enumerate(inputs):
                same(tensor, sent(group.rank, to, dtype, rows))
                tensor.zero_()
            wanted = [sent(source, group.rank, dtype, rows) for source in range(group.size)]
            kept += zip(results, wanted, strict=True)
    for result, wanted in kept:
        same(result, wanted)


@spmd(7, 8, 20, on=("threads",))
def test_more_ranks_than_state_directly(group):
    inputs = [sent(group.rank, to) for to in range(group.size)]
    for source, result in enumerate(weft.all_to_all(inputs)):
        same(result, sent(source, group.rank))


@spmd(2)
def test_dtypes_that_torch_does_not_copy_are_refused(group):
    """Its shells of dtypes, whose tensors only other libraries fill."""
    shell = torch.zeros(3, dtype=torch.uint8).view(torch.uint4)
    module = torch.nn.Module()
    module.register_buffer("shell", shell if group.rank else torch.zeros(3))
    calls = [
        lambda given: weft.all_to_all([given] * 2),
        lambda given: weft.exchange(given, [torch.tensor([0])] * 2),
        lambda given: weft.sync_params(module),
    ]
    for call in calls:
        for wrong in (shell, shell.view(torch.int2)):
            with pytest.raises(weft.WeftError, match=r"rank 1: .*, which torch does not copy"):
                call(wrong if group.rank else torch.zeros(3))
    assert len(weft.all_to_all([shell.view(torch.uint8)] * 2)) == 2


@spmd(3, on=EVERYWHERE)
def test_shapes_need_not_agree(group):
    shapes = [(), (0, 5), (40_000, 2)]  # one goes on its own, the others in the opening
    order = [shapes[(group.rank + to) % 3] for to in range(3)]
    results = weft.all_to_all([torch.full(shape, group.rank) for shape in order])
    for source, result in enumerate(results):
        same(result, torch.full(shapes[(source + group.rank) % 3], source))


@spmd(1, 2, 3, on=EVERYWHERE)
def test_gradients_of_gradients(group):
    inputs = [
        sent(group.rank, to, torch.float64, (group.rank + 2 * to) % 4).requires_grad_()
        for to in range(group.size)
    ]
    # what the receiver multiplies by; cubed, so that there is a second derivative
    weights = [1 + source + 10 * group.rank for source in range(group.size)]
    results = weft.all_to_all(inputs)
    loss = sum((w * r.pow(3)).sum() for w, r in zip(weights, results, strict=True))
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    for to, (tensor, grad) in enumerate(zip(inputs, grads, strict=True)):
        torch.testing.assert_close(grad, 3 * (1 + group.rank + 10 * to) * tensor.pow(2))
    second = torch.autograd.grad(sum(grad.sum() for grad in grads), inputs)
    for to, (tensor, grad) in enumerate(zip(inputs, second, strict=True)):
        torch.testing.assert_close(grad, 6 * (1 + group.rank + 10 * to) * tensor)


@spmd(3, on=EVERYWHERE)
def test_a_rank_without_gradients_takes_part_in_backward(group):
    inputs = [torch.ones(2) for _ in range(3)]
    if group.rank == 1:
        inputs[2].requires_grad_()
    results = weft.all_to_all(inputs)
    assert all(result.requires_grad for result in results)
    # an expanded gradient, and results that no loss uses
    results[1].sum().backward()
    for rank, tensor in enumerate(inputs):
        assert (tensor.grad is None) == ((group.rank, rank) != (1, 2))
    if group.rank == 1:
        assert inputs[2].grad.eq(1).all()
    with torch.no_grad():
        assert not any(result.requires_grad for result in weft.all_to_all(inputs))
    assert not any(r.requires_grad for r in weft.all_to_all([torch.ones(2)] * 3))


@spmd(2, on=EVERYWHERE)
def test_ranks_that_differ_in_gradient_mode_are_told(group):
    inputs = [torch.ones(2, requires_grad=True)] * 2
    with (
        torch.set_grad_enabled(group.rank == 0),
        pytest.raises(weft.WeftError, match=r"rank 0 records gradients .* rank 1 is under"),
    ):
        weft.all_to_all(inputs)


@spmd(2, on=EVERYWHERE)
def test_backward_in_another_order_is_told(group):
    calls = [weft.all_to_all([torch.ones(2, requires_grad=True)] * 2) for _ in "ab"]
    first = group.worker.calls - 1
    with pytest.raises(weft.WeftError, match=rf"backward of call {first} .* of call {first + 1} "):
        calls[group.rank][0].sum().backward()


def choice(source, to, count):
    """Indices with repeats, some none."""
    length = (1 + 2 * source + 3 * to) % 5
    return (torch.arange(length) * (source + to + 1)).remainder(count)


@spmd(1, 2, on=EVERYWHERE)
def test_exchange_takes_rows_of_every_dtype_that_torch_picks(group):
    bits = torch.arange(48, dtype=torch.uint8).reshape(3, 16) + group.rank
    for dtype in DTYPES:
        if dtype in (torch.bool, torch.uint16):
            continue
        for rows in (bits, bits[:, : dtype.itemsize].contiguous()):
            typed = rows.view(dtype) if rows is bits else rows.view(dtype).view(3)
            results = weft.exchange(typed, [torch.tensor([2, 0])] * group.size)
            for source, result in enumerate(results):
                assert result.dtype == dtype and result.shape[1:] == typed.shape[1:]
                found = result.contiguous().view(torch.uint8).view(2, -1)
                assert torch.equal(found, (rows - group.rank + source)[[2, 0]])
    wrong = torch.ones(2, dtype=torch.int16)
    if group.rank == group.size - 1:
        wrong = wrong.view(torch.bits16)
    with pytest.raises(weft.WeftError, match=r"rank \d: rows is torch.bits16, .*: view integers"):
        weft.exchange(wrong, [None] * group.size)


@spmd(1, 2, 4, on=EVERYWHERE)
def test_exchange_picks_rows_and_adds_up_gradients(group):
    counts = [4 + rank for rank in range(group.size)]
    tables = [torch.arange(c * 3.0).reshape(c, 3).double() + 100 * r for r, c in enumerate(counts)]
    rows = tables[group.rank].clone().requires_grad_()
    to = [choice(group.rank, rank, counts[group.rank]) for rank in range(group.size)]
    if not to[0].numel():
        to[0] = None
    results = weft.exchange(rows, to)
    for source, result in enumerate(results):
        picked = choice(source, group.rank, counts[source])
        assert torch.equal(result.detach(), tables[source][picked])
    loss = sum((result * (group.rank + 1)).pow(2).sum() for result in results)
    (grad,) = torch.autograd.grad(loss, rows, create_graph=True)
    wanted = torch.zeros_like(rows)
    for rank, some in enumerate(to):
        if some is not None:
            wanted.index_add_(0, some, 2 * rows[some] * (rank + 1) ** 2)
    torch.testing.assert_close(grad, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(grad.sum(), rows)[0], torch.autograd.grad(wanted.sum(), rows)[0]
    )


@spmd(3, on=EVERYWHERE)
def test_exchange_rounds_rows_and_each_gradient_but_no_sum(group):
    """So a gradient of half precision that went to several ranks is added up in float32."""
    rows = torch.full((2, 3), 1 + 2**-12, requires_grad=True)
    to = [torch.tensor([0, 0, 1], dtype=torch.int32)] * 3
    for sent, dtype in ((1, torch.bfloat16), (1 + 2**-12, torch.float32)):
        results = weft.exchange(rows, to, wire_dtype=dtype)
        assert all(result.dtype == torch.float32 and result.eq(sent).all() for result in results)
        weights = [256.0, 1.0, 1.0]
        (gradient,) = torch.autograd.grad(
            sum(weights[group.rank] * result.sum() for result in results), rows
        )
        assert gradient[0].eq(516).all() and gradient[1].eq(258).all()  # bfloat16 has no 258
    half = weft.exchange(rows.detach().half(), to, wire_dtype=torch.float32)
    assert all(result.dtype == torch.float16 for result in half)
    double = torch.full((2,), 1 + 2**-8 + 2**-20, dtype=torch.float64)
    (rounded, *_) = weft.exchange(double, to, wire_dtype=torch.bfloat16)
    assert rounded.eq(1 + 2**-7).all() and rounded.dtype == torch.float64
    wide = torch.ones(50_000)
    before = sum(group.traffic.to.values())
    weft.exchange(wide, [torch.arange(50_000)] * 3, wire_dtype=torch.bfloat16)
    assert sum(group.traffic.to.values()) - before < 2 * 2 * 50_000 + 10_000


@spmd(2, on=EVERYWHERE)
def test_exchange_in_the_background(group):
    """Rows may be written at once; backward is that of a call that is waited for at once."""
    rows = torch.tensor([1.0, 2.0]) + 10 * group.rank
    to = [torch.tensor([1, 1]), torch.tensor([0])]
    leaf = rows.clone().requires_grad_()
    works = [weft.exchange(rows, to, async_op=True), weft.exchange(leaf * 1, to, None, True)]
    rows.zero_()
    found = [[part.tolist() for part in work.wait()] for work in works]
    assert found == [[[2, 2], [12, 12]], [[1], [11]]][group.rank : group.rank + 1] * 2
    assert not works[0].wait()[0].requires_grad
    sum((1 + group.rank) * part.sum() for part in works[1].wait()).backward()
    assert leaf.grad.tolist() == [2, 2]
    wrong = weft.exchange(leaf, to[: 2 - group.rank], async_op=True)
    with pytest.raises(weft.WeftError, match="rank 1: to is 1 entries for 2 ranks"):
        wrong.wait()
    with (
        torch.set_grad_enabled(group.rank == 0),
        pytest.raises(weft.WeftError, match=r"rank 0 records gradients .* rank 1 is under"),
    ):
        weft.exchange(leaf, to, async_op=True).wait()


@spmd(2, on=EVERYWHERE)
def test_tensors_that_are_not_what_their_memory_says(group):
    """An element of stride 0 (the gradient of a sum), a conjugation and a sign not yet applied."""
    parameter = torch.ones(2, requires_grad=True)
    results = weft.all_to_all([parameter[:1] * 2, parameter[1:] * 3])
    ((1 + group.rank) * sum(result.sum() for result in results)).backward()
    assert parameter.grad.tolist() == [2, 6]
    for count in (3, 40_000):  # with the statement, and in a round of their own
        turned = torch.full((count,), 1 + 2j * (1 + group.rank)).conj()
        for tensor in (turned, turned.imag):
            for source, result in enumerate(weft.all_to_all([tensor] * 2)):
                wanted = 1 - 2j * (1 + source)
                assert result.eq(wanted if tensor.is_complex() else wanted.imag).all()
            one = tensor[:1].expand(count)
            weft.all_to_all([one, one])
    assert weft.all_reduce(torch.full((3,), 1 + 2j).conj()).eq(2 - 4j).all()
    assert weft.all_reduce(torch.tensor(2.0).expand(1, 1)).tolist() == [[4.0]]


class Posting:
    """A group that keeps what is sent."""

    peers = (1, 2)

    def post(self, sends, recvs, channel):
        self.sends = sends
        return types.SimpleNamespace(wait=list)


def test_what_goes_to_several_peers_is_one_tensor_for_the_wire():
    """Which then copies it once."""
    group, given = Posting(), torch.ones(9)
    move(group, {1: given, 2: given}, {})
    (_, first), (_, second) = group.sends
    assert first is second is given


@spmd(2, on=("processes",))
def test_who_has_no_memory_for_what_others_send_is_named(group):
    def made(shape, *others):
        if shape == (50_000,) and group.rank == 0:
            raise MemoryError("not today")
        return fresh(shape, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["weft.comm.all_to_all"], "fresh", made)
        with pytest.raises((weft.WireError, MemoryError)) as caught:
            weft.all_to_all([torch.ones(50_000), torch.ones(2)][:: 1 if group.rank else -1])
    assert group.rank == 0 or caught.value.culprit == 0


@spmd(2, on=EVERYWHERE)
def test_rows_may_become_of_another_dtype_while_they_are_exchanged(group):
    rows = torch.ones(2, 2)
    work = weft.exchange(rows, [torch.tensor([0])] * 2, async_op=True)
    rows.data = rows.data.half()  # as `module.half()` does
    assert [part.dtype for part in work.wait()] == [torch.float32] * 2
