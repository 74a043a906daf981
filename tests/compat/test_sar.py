"""SAR's collectives: what arrives, in place, uneven and empty, and the same error everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.compat import sar
from weft.testing import run, spmd


def sent(source, to, size, dtype=torch.float32):
    """What a rank sends to another: as many rows as their numbers say, some of them none."""
    rows = (source + 2 * to) % 4
    return (torch.arange(3 * rows).view(rows, 3) + 100 * source + 10 * to).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool])
@spmd(1, 2, 3, 4)
def test_all_to_all_fills_what_it_is_given(group, dtype):
    size = group.size
    send = [sent(group.rank, to, size, dtype) for to in range(size)]
    recv = [torch.empty_like(sent(source, group.rank, size, dtype)) for source in range(size)]
    places = [tensor.data_ptr() for tensor in recv]
    sar.comm.all_to_all(recv, send, move_to_comm_device=True)
    for source, tensor in enumerate(recv):
        assert torch.equal(tensor, sent(source, group.rank, size, dtype))
    assert [tensor.data_ptr() for tensor in recv] == places


@spmd(3, on=["threads"])
def test_a_buffer_may_be_part_of_another_tensor(group):
    whole = torch.zeros(group.size, 2, 3)
    columns = [whole[source].T for source in range(group.size)]  # not contiguous
    sar.all_to_all(columns, [torch.arange(6.0) + 10 * group.rank] * group.size)
    for source in range(group.size):
        assert torch.equal(whole[source].T.reshape(-1), torch.arange(6.0) + 10 * source)


@spmd(2, 3)
def test_all_reduce_is_in_place(group):
    numbers = torch.tensor([group.rank + 1, 7])
    whole = torch.zeros(2, 2, dtype=torch.int64)
    part = whole[:, 0]
    part.copy_(numbers)
    sar.comm.all_reduce(numbers, torch.distributed.ReduceOp.MAX, move_to_comm_device=True)
    assert numbers.tolist() == [group.size, 7]
    assert sar.comm.all_reduce(part, op=torch.distributed.ReduceOp.SUM) is None
    assert whole[:, 0].tolist() == [sum(range(1, group.size + 1)), 7 * group.size]


@spmd(2, on=["threads"])
def test_autograd_sees_nothing_of_it(group):
    parameter = nn.Parameter(torch.ones(2) * group.rank)
    sar.all_reduce(parameter, "sum")
    assert parameter.tolist() == [1.0, 1.0] and parameter.is_leaf
    places = [torch.zeros(2) for _ in range(2)]
    sar.all_to_all(places, [parameter] * 2)
    assert not any(tensor.requires_grad for tensor in places)


class Tables(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.first, self.second = nn.Embedding(1, 1), nn.Embedding(1, 1)
        self.register_buffer("kept", torch.tensor([rank]))
        nn.init.constant_(self.first.weight, rank)


@spmd(2, 3)
def test_sync_params_gives_rank_0_s_model(group):
    model = Tables(group.rank)
    sar.sync_params(model)
    assert (model.first.weight.item(), model.kept.item()) == (0.0, 0)
    assert model.second.weight.item() == of_rank_0(group, model.second.weight.item())


def of_rank_0(group, value):
    """Rank 0's value."""
    return weft.all_to_all([torch.tensor(value, dtype=torch.float64)] * group.size)[0].item()


@spmd(2)
def test_gradients_meet_by_name_and_not_by_order(group):
    """SAR pairs the n-th gradient of each rank: here that would give 44 and 44."""
    model = Tables(0)
    table, scale = (model.first, 4.0) if group.rank == 0 else (model.second, 40.0)
    (table(torch.tensor([0])) * scale).sum().backward()
    sar.gather_grads(model)
    assert (model.first.weight.grad.item(), model.second.weight.grad.item()) == (4.0, 40.0)


def recv_of(*shapes, dtype=torch.float32):
    return [torch.full(shape, -1.0).to(dtype) for shape in shapes]


def of_inference():
    with torch.inference_mode():
        return torch.ones(2)


def nested():
    return torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged)


def sharing():
    """Buffers of which the first and the last have one element in common."""
    memory = torch.zeros(3)
    return [memory[:2], torch.zeros(2), memory[1:]]


WRONG = {
    "rank 1: recv_tensors[0] has shape (3,), and rank 0 sends (2,): make it as large, or use "
    "weft.all_to_all, which needs no sizes": lambda rank, send: sar.all_to_all(
        recv_of((3 if rank == 1 else 2,), (2,), (2,)), send
    ),
    "rank 2: recv_tensors[1] has shape (2,), and rank 1 sends (0,): make it as large, or use "
    "weft.all_to_all, which needs no sizes": lambda rank, send: sar.all_to_all(
        recv_of((2,), (2 if rank == 2 else 0,), (2,)),
        [torch.empty(0)] * 3 if rank == 1 else send,
    ),
    "rank 2: recv_tensors[0] has torch.int64, and rank 0 sends torch.float32: pass one dtype": (
        lambda rank, send: sar.all_to_all(
            recv_of((2,), (2,), (2,), dtype=torch.int64 if rank == 2 else torch.float32), send
        )
    ),
    "rank 0: recv_tensors must be a list of 3 tensors, one for each rank": lambda rank, send: (
        sar.all_to_all(recv_of(*[(2,)] * (3 if rank else 2)), send)
    ),
    "rank 2: recv_tensors must be a list of 3 tensors, one for each rank": lambda rank, send: (
        sar.all_to_all(recv_of(*[(2,)] * 3) if rank < 2 else torch.zeros(3, 2), send)
    ),
    "rank 1: recv_tensors[2] is a str: pass a tensor to be filled": lambda rank, send: (
        sar.all_to_all([*recv_of((2,), (2,)), "x" if rank == 1 else torch.ones(2)], send)
    ),
    "rank 1: recv_tensors[2] is one whose elements share memory: pass a clone of "
    "it": lambda rank, send: sar.all_to_all(
        [*recv_of((2,), (2,)), torch.ones(1).expand(2) if rank == 1 else torch.ones(2)], send
    ),
    "rank 1: recv_tensors[2] is on the meta device, where nothing is held: pass a strided tensor "
    "with data": lambda rank, send: sar.all_to_all(
        [*recv_of((2,), (2,)), torch.ones(2, device="meta" if rank == 1 else "cpu")], send
    ),
    "rank 2: recv_tensors[0] is nested, which to_padded_tensor() makes plain: pass a strided "
    "tensor with data": lambda rank, send: sar.all_to_all(
        [nested() if rank == 2 else torch.ones(2), *recv_of((2,), (2,))], send
    ),
    "rank 0: red_tensor is of no shape yet: pass a strided tensor with data": lambda rank, send: (
        sar.all_reduce(send[0] if rank else torch.nn.UninitializedParameter(), "sum")
    ),
    "rank 0: red_tensor is a list: pass a tensor to be filled": lambda rank, send: sar.all_reduce(
        send[0] if rank else [1.0], torch.distributed.ReduceOp.SUM
    ),
    "rank 2: some of recv_tensors lie in the same memory: pass tensors of their own": (
        lambda rank, send: sar.all_to_all(sharing() if rank == 2 else recv_of(*[(2,)] * 3), send)
    ),
    "rank 1: inputs[0] is a str: pass a tensor, empty if need be": lambda rank, send: (
        sar.all_to_all(recv_of((2,), (2,), (2,)), ["x"] * 3 if rank == 1 else send)
    ),
    "rank 1: TypeError: 'int' object is not iterable": lambda rank, send: sar.all_to_all(
        recv_of((2,), (2,), (2,)), 3 if rank == 1 else send
    ),
    "rank 2: inputs has 2 tensors for 3 ranks: pass one for each": lambda rank, send: (
        sar.all_to_all(recv_of((2,), (2,), (2,)), send[:2] if rank == 2 else send)
    ),
    "rank 1: red_tensor is one whose elements share memory: pass a clone of it": (
        lambda rank, send: sar.all_reduce(
            torch.ones(3).unfold(0, 2, 1) if rank == 1 else torch.ones(2, 2), "sum"
        )
    ),
    "rank 1: red_tensor is of inference mode: pass a clone of it": (
        lambda rank, send: sar.all_reduce(of_inference() if rank == 1 else send[0], "sum")
    ),
    "rank 2: module is a int: pass a torch.nn.Module": lambda rank, send: sar.sync_params(
        3 if rank == 2 else nn.Linear(1, 1)
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_every_rank_raises_the_same_and_nothing_was_written(text):
    def program(group):
        send = [torch.ones(2)] * group.size
        with pytest.raises(weft.WeftError) as raised:
            WRONG[text](group.rank, send)
        found = recv_of(*[(2,)] * group.size)
        sar.all_to_all(found, send)  # the next call works
        assert all(tensor.tolist() == [1.0, 1.0] for tensor in found)
        return str(raised.value)

    assert run(3, program) == [text] * 3


def test_nothing_is_written_where_another_rank_s_buffer_is_wrong():
    def program(group):
        recv = recv_of((2,), (1 if group.rank else 2,))
        with pytest.raises(weft.WeftError, match=r"rank 1: recv_tensors\[1\] has shape"):
            sar.all_to_all(recv, [torch.ones(2)] * 2)
        return [tensor.tolist() for tensor in recv]

    assert run(2, program) == [[[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0]]]


def test_without_a_group_there_are_no_ranks():
    with pytest.raises(weft.WeftError, match="no group of ranks"):
        sar.rank()


DEVICE = torch.device("cuda")


class There(torch.Tensor):
    """Memory of an accelerator's, as if there were one: it is read and written by copies alone."""

    @property
    def device(self):
        return DEVICE

    def to(self, device):
        assert device == torch.device("cpu")
        return self.as_subclass(torch.Tensor).clone()


class ThereParameter(There, nn.Parameter):
    """A parameter there, with a gradient there."""


def there(tensor):
    return tensor.as_subclass(There)


@pytest.fixture
def accelerator(monkeypatch):
    """A program of GPUs that communicates on the CPU."""
    to = torch.Tensor.to

    def moved(tensor, where, *rest, **named):
        if where != DEVICE:
            return to(tensor, where, *rest, **named)
        return there(tensor.clone())

    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(sar.comm, "_comm_device", lambda: torch.device("cpu"))


@spmd(3, on=["threads"])
def test_tensors_are_moved_to_the_device_of_communication_and_back(group, accelerator):
    """weft's own calls see none of the accelerator's."""
    send = [there(torch.tensor([group.rank, to])) for to in range(3)]
    recv = [there(torch.zeros(2, dtype=torch.int64)) for _ in range(3)]
    sar.all_to_all(recv, send)
    assert [each.tolist() for each in recv] == [[source, group.rank] for source in range(3)]
    total = there(torch.tensor([group.rank + 1.0]))
    sar.all_reduce(total, "sum", move_to_comm_device=True)
    assert total.tolist() == [6.0] and total.device == DEVICE


@spmd(2, on=["threads"])
def test_models_are_moved_to_the_device_of_communication_and_back(group, accelerator, monkeypatch):
    seen = []
    for name in ("sync_params", "sync_grads"):
        call = getattr(weft, name)

        def watched(module, call=call, **options):
            seen.append({each for each, _ in module.named_parameters()})
            assert all(each.device.type == "cpu" for each in module.parameters())
            return call(module, **options)

        monkeypatch.setattr(weft, name, watched)
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    weight = model[0].weight = torch.full((1, 2), group.rank + 3.0).as_subclass(ThereParameter)
    model[1].running_mean.fill_(group.rank)
    sar.sync_params(model)
    assert weight.tolist() == [[3.0, 3.0]] and model[1].running_mean.item() == 0
    assert model[0].weight is weight
    weight.grad = there(torch.full((1, 2), group.rank + 1.0))
    sar.gather_grads(model)
    assert weight.grad.tolist() == [[3.0, 3.0]] and weight.grad.device == DEVICE
    assert {"0.weight"} in seen
