"""Tensors of an accelerator: values stay away from the host, and sums are those of the CPU."""

from __future__ import annotations

import struct
from itertools import chain

import pytest
import torch
import torch.distributed as dist

import weft
from cases import in_default_group
from checked_rounds import CheckedRounds
from gloo_rounds import as_device
from weft import nn
from weft.base.tensors import as_bytes
from weft.comm import staging
from weft.comm.named import of_module
from weft.group import default
from weft.schedules import dense
from weft.testing import run, spmd
from weft.wire.torch_rounds import TorchRounds

CPU = torch.device("cpu")
MARK = b"\xa5" * 8  # the bytes of each value
VALUE = struct.unpack("d", MARK)[0]


def marked(*shape):
    return torch.full(shape, VALUE, dtype=torch.float64, requires_grad=True)


def back(results):
    torch.autograd.backward(results, [torch.full_like(each, VALUE) for each in results])


def module(rows):
    found = torch.nn.Module()
    found.table = torch.nn.Embedding(9, 2, sparse=True, _weight=marked(9, 2).detach())
    found.dense = torch.nn.Parameter(marked(rows).detach())
    return found


def synchronised(rows):
    model = module(rows)
    weft.sync_params(model)
    (model.table(torch.arange(9)).sum() * VALUE + model.dense.sum() * VALUE).backward()
    weft.sync_grads(model)
    weft.clip_grad_norm_(model, 1e-3)


def layers(rows):
    """On all ranks, and on half of them, twice as many times: the others know nothing of it."""
    size = default.resolve(None).size
    every, half = weft.Partition(size), weft.Partition(-(-size // 2))
    for grid in (every, half, half):
        for kind in (nn.AllGather, nn.AllSumReduce, nn.ReduceScatter, nn.SumReduce, nn.Broadcast):
            has = grid.active and (kind is not nn.Broadcast or not grid.rank)
            back([kind(grid, 0)(marked(rows) if has else marked(0))])


CALLS = {
    "all_to_all": lambda size, rows: back(weft.all_to_all([marked(rows)] * size)),
    "all_reduce": lambda size, rows: back([weft.all_reduce(marked(rows))]),
    "largest": lambda size, rows: back([weft.all_reduce(marked(rows), "max")]),
    "exchange": lambda size, rows: back(weft.exchange(marked(rows, 1), [torch.arange(2)] * size)),
    "sync": lambda size, rows: synchronised(rows),
    "nn": lambda size, rows: layers(rows),
}


@pytest.mark.parametrize("rows", [2, 30_000])
@pytest.mark.parametrize("name", CALLS)
@spmd(1, 2, 4, on=("device",))
def test_no_value_goes_over_the_cpu_wire(group, name, rows):
    seen, post = [], group.wire.post

    def watched(sends=(), recvs=(), channel=0):
        seen.extend(MARK in as_bytes(tensor.detach()).numpy().tobytes() for _, tensor in sends)
        return post(sends, recvs, channel)

    apart = group.split(range(group.size))  # which values go over
    group.session.carry_device(CheckedRounds(apart.wire), "apart")
    group.wire.post = watched
    CALLS[name](group.size, rows)
    assert bool(seen) == (group.size > 1) and not any(seen)


def sums(group):
    draw = torch.Generator().manual_seed(group.rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for count in (5, 50_000):
            x = torch.randn(count, generator=draw).to(dtype)
            found += [weft.all_reduce(x, "avg"), nn.AllSumReduce(weft.Partition(group.size), 0)(x)]
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sums_have_the_bits_of_the_cpu_way(size, monkeypatch):
    """Also in chunks, of which two are under way."""
    monkeypatch.setattr(dense, "LARGE", 16_384)
    same(run(size, sums, on="threads"), run(size, sums, on="device"))


def same(found, wanted):
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))


@spmd(3, on=("device",))
def test_one_rank_has_its_tensors_elsewhere(group):
    if group.rank == 1:
        group.session.devices[CPU].name = "xpu (xccl)"
    for name in ("all_to_all", "all_reduce", "exchange", "nn"):
        with pytest.raises(weft.WeftError, match=r"device: .*checked.* rank 1 has xpu \(xccl\)"):
            CALLS[name](3, 4)


def test_a_manifest_says_what_is_on_an_accelerator():
    before = of_module(module(1), buffers=True)[1]["dense"]
    with as_device():
        assert of_module(module(1), buffers=True)[1]["dense"] == before.replace("a ", "a cpu ", 1)


@spmd(2, on=("threads",))
def test_the_capture_of_a_graph_is_refused(group, monkeypatch):
    monkeypatch.setattr(staging, "is_capturing", lambda device: True)
    for name in ("all_to_all", "all_reduce", "exchange", "sync", "nn"):
        with pytest.raises(weft.WeftError, match="CUDA graph"):
            CALLS[name](2, 4)


def over_gloo(group, folder):
    with in_default_group(group, folder), weft.init(), as_device():
        over = default.resolve(None).on(CPU)
        assert isinstance(over.wire, TorchRounds) and "gloo" in over.route
        for name in CALLS:
            CALLS[name](group.size, 30_000)
        # as if its communicator had been made with it
        dist.group.WORLD.bound_device_id = torch.device("cpu:0")
        layers(2)
        return sums(group)


def test_over_a_group_of_gloo(tmp_path):
    found = run(4, over_gloo, tmp_path, on="processes")
    same(found, run(4, sums, on="threads"))
