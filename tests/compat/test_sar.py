"""SAR's collectives: what arrives, in place, uneven and empty, and the same error everywhere."""

from __future__ import annotations

import functools
import os
import queue

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.compat import sar
from weft.testing import run, spmd


@pytest.fixture(autouse=True)
def one_round():
    before = sar.Config.max_collective_size
    yield
    sar.Config.max_collective_size = before


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@spmd(3, on=["threads"])
def test_buffers_may_be_the_columns_of_a_matrix(group, dtype):
    whole = torch.zeros(2, group.size, dtype=dtype)
    sar.all_to_all(list(whole.T), [torch.full((2,), group.rank, dtype=dtype)] * group.size)
    assert whole.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("largest", [1, 7, 10**6])
@spmd(3, on=["threads"])
def test_rounds_are_of_bounded_size(group, largest):
    elements, width = 40_000, 8  # more than travels in the opening
    sar.Config.max_collective_size = largest * 1000
    send = [torch.arange(elements) * 10 + group.rank + to for to in range(3)]
    recv = [torch.empty(elements, dtype=torch.int64) for _ in range(3)]
    before = group.traffic.messages
    sar.comm.all_to_all_rounds(recv, send)
    for source, tensor in enumerate(recv):
        assert torch.equal(tensor, torch.arange(elements) * 10 + source + group.rank)
    rounds = -(-2 * 2 * elements * width // (largest * 1000 * width))  # two peers, both ways
    assert group.traffic.messages - before >= 2 * rounds
    assert (group.traffic.messages - before >= 2 * 100) == (largest == 1)


@spmd(2, on=["processes"])  # whose default group their threads have, too
def test_the_communication_thread_runs_tasks_in_order(group):
    """As SAR's layers prefetch; each in one round, whatever Config says."""
    assert (sar.Config.disable_sr, sar.Config.pipeline_depth) == (False, 1)
    sar.Config.max_collective_size = 1
    thread, kept = sar.comm.CommThread(), []

    def exchange(number):
        recv = [torch.empty(5000) for _ in range(2)]
        before = group.traffic.messages
        sar.comm.all_to_all_gloo_support(
            recv, [torch.full((5000,), 10.0 * number + group.rank)] * 2
        )
        assert group.traffic.messages - before < 20
        return number, recv[1 - group.rank][0].item()

    for number in range(4):
        thread.submit_task(f"fetch {number}", functools.partial(exchange, number))
        thread.submit_task("no result", lambda: kept.append(len(kept)))
    thread.submit_task("fails", lambda: kept[9])
    thread.submit_task("finds nothing", queue.SimpleQueue().get_nowait)
    assert [thread.get_result() for _ in range(4)] == [
        (number, 10.0 * number + 1 - group.rank) for number in range(4)
    ]
    for raised in (IndexError, queue.Empty):
        with pytest.raises(raised):
            thread.get_result()
    assert kept == [0, 1, 2, 3]
    with pytest.raises(queue.Empty):
        sar.comm.comm_thread.get_result(block=False)


SUBMITS = """
import threading, time, torch
from weft.compat import sar

begun = threading.Event()

def runs():
    begun.set()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        torch.ones(100_000).sum()
    print("ran")

sar.comm.comm_thread.submit_task("runs", runs)
begun.wait()
"""


def test_a_program_may_end_while_a_task_runs(programs):
    """C++ cannot take the GIL once the interpreter ends: it would abort the process."""
    program = programs(SUBMITS, env={**os.environ, "OMP_NUM_THREADS": "1"}, whole=True)
    assert program.communicate() == ("ran\n", "")
    assert program.returncode == 0


@spmd(1, 2, 3, 4)
def test_exchange_tensors_needs_no_sizes_and_takes_them(group):
    send = [sent(group.rank, to, group.size) for to in range(group.size)]
    want = [sent(source, group.rank, group.size) for source in range(group.size)]
    for sizes in (None, [len(tensor) for tensor in want]):
        found = sar.comm.exchange_tensors(send, sizes)
        assert len(found) == group.size
        for tensor, right in zip(found, want, strict=True):
            assert tensor.shape == right.shape and torch.equal(tensor, right)


@spmd(1, 2, 4)
def test_exchange_single_tensor_goes_round(group):
    for shift in range(group.size):  # with 0 each sends to itself
        to, source = (group.rank + shift) % group.size, (group.rank - shift) % group.size
        recv = torch.empty_like(sent(source, group.rank, group.size))
        sar.comm.exchange_single_tensor(source, to, recv, sent(group.rank, to, group.size))
        assert torch.equal(recv, sent(source, group.rank, group.size))


@spmd(2, on=["threads"])
def test_whole_numbers_of_any_kind_are_ranks(group):
    for kind in (np.int64, torch.tensor):
        recv, other = torch.empty(1), kind(1 - group.rank)
        sar.exchange_single_tensor(other, other, recv, torch.tensor([float(group.rank)]))
        assert recv.item() == 1 - group.rank


@spmd(3, on=["threads"])
def test_a_rank_may_exchange_with_itself_while_others_do_with_each_other(group):
    other = [1, 0, 2][group.rank]
    recv = torch.empty(())
    sar.exchange_single_tensor(other, other, recv, torch.tensor(float(group.rank)))
    assert recv.item() == other


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
    found = sar.exchange_tensors([parameter] * 2)
    assert not any(tensor.requires_grad for tensor in found)


class Tables(nn.Module):
    def __init__(self, rank: int) -> None:
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
    "exchange_tensors, which needs no sizes": lambda rank, send: sar.all_to_all(
        recv_of((3 if rank == 1 else 2,), (2,), (2,)), send
    ),
    "rank 2: recv_tensors[0] has torch.int64, and rank 0 sends torch.float32: pass one dtype": (
        lambda rank, send: sar.all_to_all(
            recv_of((2,), (2,), (2,), dtype=torch.int64 if rank == 2 else torch.float32), send
        )
    ),
    "rank 0: recv_tensors must be a list of 3 tensors, one for each rank": lambda rank, send: (
        sar.all_to_all(recv_of(*[(2,)] * (3 if rank else 2)), send)
    ),
    "rank 1: recv_sizes is [2, 2, 1], and the ranks send [2, 2, 2]: leave it out": (
        lambda rank, send: sar.exchange_tensors(send, [2, 2, 1] if rank == 1 else None)
    ),
    "rank 2: recv_sizes is 2: pass a length for each rank, or leave it out": (
        lambda rank, send: sar.exchange_tensors(send, 2 if rank == 2 else None)
    ),
    "rank 1: recv_tensors[2] is one whose elements share memory: pass one that can be "
    "written": lambda rank, send: sar.all_to_all(
        [*recv_of((2,), (2,)), torch.ones(1).expand(2) if rank == 1 else torch.ones(2)], send
    ),
    "rank 1: recv_tensors[2] is on the meta device, where nothing is held: pass a strided tensor "
    "with data": lambda rank, send: sar.all_to_all(
        [*recv_of((2,), (2,)), torch.ones(2, device="meta" if rank == 1 else "cpu")], send
    ),
    "rank 2: recv_tensor is nested: pass a strided tensor with data": lambda rank, send: (
        sar.exchange_single_tensor(rank, rank, nested() if rank == 2 else torch.ones(2), send[0])
    ),
    "rank 0: red_tensor is of no shape yet: pass a strided tensor with data": lambda rank, send: (
        sar.all_reduce(send[0] if rank else torch.nn.UninitializedParameter(), "sum")
    ),
    "rank 0: red_tensor is a list: pass a tensor to be filled": lambda rank, send: sar.all_reduce(
        send[0] if rank else [1.0], torch.distributed.ReduceOp.SUM
    ),
    "rank 1: red_tensor is a NoneType: pass a tensor to be filled": lambda rank, send: (
        sar.all_reduce(None if rank == 1 else send[0], "sum")
    ),
    "rank 1: recv_sizes is [2.7, 2.2, 2.0]: pass a length for each rank, or leave it out": (
        lambda rank, send: sar.exchange_tensors(send, [2.7, 2.2, 2.0] if rank == 1 else [2, 2, 2])
    ),
    "rank 2: recv_tensors[0] and recv_tensors[2] share memory: pass tensors of their own": (
        lambda rank, send: sar.all_to_all(sharing() if rank == 2 else recv_of(*[(2,)] * 3), send)
    ),
    "rank 0: send_idx is 3: pass a rank of the group, 0 to 2": lambda rank, send: (
        sar.exchange_single_tensor(rank, 3 if rank == 0 else rank, *recv_of((2,)), send[0])
    ),
    "rank 1: inputs[0] is a str: pass a tensor, empty if need be": lambda rank, send: (
        sar.all_to_all(recv_of((2,), (2,), (2,)), ["x"] * 3 if rank == 1 else send)
    ),
    "rank 1: send_tensor is a str: pass a tensor": lambda rank, send: sar.exchange_single_tensor(
        rank, rank, *recv_of((2,)), "x" if rank == 1 else send[0]
    ),
    "rank 2: inputs has 2 tensors for 3 ranks: pass one for each": lambda rank, send: (
        sar.exchange_tensors(send[:2] if rank == 2 else send)
    ),
    "rank 1: red_tensor is one whose elements share memory: pass one that can be written": (
        lambda rank, send: sar.all_reduce(
            torch.ones(3).unfold(0, 2, 1) if rank == 1 else torch.ones(2, 2), "sum"
        )
    ),
    "rank 1: red_tensor is of inference mode: pass one that can be written, or a clone of it": (
        lambda rank, send: sar.all_reduce(of_inference() if rank == 1 else send[0], "sum")
    ),
    "rank 2: recv_tensor has shape (2,), and rank 1 sends (0,): make it as large, or use "
    "exchange_tensors, which needs no sizes": lambda rank, send: sar.exchange_single_tensor(
        1 if rank == 2 else rank, rank, *recv_of((2,)), send[0]
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


@pytest.mark.parametrize("most", [-3, True, 2.5, "8"])
def test_a_collective_size_that_is_none_is_named_as_the_user_does(most):
    def program(group):
        with pytest.raises(weft.WeftError) as raised:
            sar.exchange_tensors([torch.ones(2)] * group.size)
        return str(raised.value)

    sar.Config.max_collective_size = most  # of all ranks, which are threads of this process
    said = run(2, program, on="threads")
    sar.Config.max_collective_size = 0
    expected = f"Config.max_collective_size is {most!r}: set a number of elements, or 0 for all"
    assert all(expected in each and "rank 0" in each for each in said) and said[0] == said[1]


def test_nothing_is_written_where_another_rank_s_buffer_is_wrong():
    def program(group):
        recv = recv_of((2,), (1 if group.rank else 2,))
        with pytest.raises(weft.WeftError, match=r"rank 1: recv_tensors\[1\] has shape"):
            sar.all_to_all(recv, [torch.ones(2)] * 2)
        return [tensor.tolist() for tensor in recv]

    assert run(2, program) == [[[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0]]]


def test_what_the_group_is(monkeypatch):
    def program(group):
        assert sar.is_initialized()
        with pytest.raises(weft.WeftError, match=f"rank {group.rank}: .* initialize_comms"):
            sar.comm.backend()
        return sar.rank(), sar.world_size(), sar.comm_device()

    assert run(2, program) == [(rank, 2, torch.device("cpu")) for rank in range(2)]
    assert not sar.is_initialized()
    with pytest.raises(weft.WeftError, match="no group of ranks"):
        sar.rank()


def test_the_socket_is_the_one_that_is_named(monkeypatch):
    monkeypatch.delenv("WEFT_INTERFACE", raising=False)
    monkeypatch.setenv("SAR_SOCKET_NAME", "lo")
    assert sar.comm.get_socket() == ("lo", "127.0.0.1")
    monkeypatch.setenv("SAR_SOCKET_NAME", "nosuch7")
    with pytest.raises(weft.WeftError, match="SAR_SOCKET_NAME=nosuch7 names no interface"):
        sar.comm.get_socket()
    monkeypatch.delenv("SAR_SOCKET_NAME")
    name, address = sar.comm.get_socket()
    assert name and address
