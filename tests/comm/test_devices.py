"""Tensors that weft's wire does not carry, as those of an accelerator: they go by verbs alone."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import chain

import pytest
import torch

import weft
from weft.base.tensors import as_bytes
from weft.comm.named import description
from weft.testing import run, spmd
from weft.verbs import carrier
from weft.verbs import group as of_groups
from weft.verbs.carrier import verbs_of

CPU = torch.device("cpu")
MARK = b"\xa5" * 8  # the bytes of each value
VALUE = struct.unpack("d", MARK)[0]


def marked(*shape):
    return torch.full(shape, VALUE, dtype=torch.float64, requires_grad=True)


def back(results):
    torch.autograd.backward(results, [torch.full_like(each, VALUE) for each in results])


def module(rows):
    found = torch.nn.Module()
    found.few = torch.nn.Parameter(marked(3).detach())
    found.dense = torch.nn.Parameter(marked(rows).detach())
    return found


def gradients(rows):
    model = module(rows)
    (model.few.sum() * VALUE + model.dense.sum() * VALUE).backward()
    weft.sync_grads(model)
    weft.clip_grad_norm_(model, 1e-3)


def tables(rows):
    """Sparse gradients, whose sums go by verbs as those of `sparse_all_reduce`."""
    model = torch.nn.Embedding(4 * rows, 2, sparse=True, dtype=torch.float64)
    (model(torch.arange(rows)).sum() * VALUE).backward()
    weft.sync_grads(model)


def fetched(group, rows):
    indices = torch.arange(group.size * rows)
    plan = weft.remote_rows(indices, rows)
    back([plan.fetch(marked(rows, 1))])


CALLS = {
    "all_to_all": lambda group, rows: back(weft.all_to_all([marked(rows)] * group.size)),
    "all_reduce": lambda group, rows: back([weft.all_reduce(marked(rows))]),
    "largest": lambda group, rows: back([weft.all_reduce(marked(rows), "max")]),
    "exchange": lambda group, rows: back(
        weft.exchange(marked(rows, 1), [torch.arange(2)] * group.size)
    ),
    "remote_rows": fetched,
    "sync_params": lambda group, rows: weft.sync_params(module(rows)),
    "sync_grads": lambda group, rows: gradients(rows),
    "tables": lambda group, rows: tables(rows),
}

VERBS = {  # backward too
    "all_to_all": {"exchange": 2},
    "all_reduce": {"all_reduce": 2},
    "largest": {"all_reduce": 3},
    "exchange": {"exchange": 2},
    "remote_rows": {"exchange": 4},
    "sync_params": {"broadcast": 1},
    "sync_grads": {"all_reduce": 1},
    "tables": {"all_gather": 1},
}


def counted(group):
    """How often each verb is called from here on; of which `read` does not talk."""
    verbs = group.worker.call("count", lambda: verbs_of(group, CPU))
    counts = Counter()

    def counting(name):
        verb = getattr(verbs, name)

        def called(*args):
            counts[name] += 1
            return verb(*args)

        return called

    for name in ("all_gather", "exchange", "all_reduce", "broadcast"):
        setattr(verbs, name, counting(name))
    return counts


@pytest.mark.parametrize("rows", [2, 30_000])
@pytest.mark.parametrize("name", CALLS)
@spmd(1, 2, 4, on=("gloo",))
def test_no_value_goes_over_the_cpu_wire_and_each_call_is_one_verb(group, name, rows):
    seen, post = [], group.wire.post

    def watched(sends=(), recvs=(), channel=0):
        seen.extend(MARK in as_bytes(tensor.detach()).numpy().tobytes() for _, tensor in sends)
        return post(sends, recvs, channel)

    counts = counted(group)
    group.wire.post = watched
    CALLS[name](group, rows)
    assert not any(seen)
    if group.size > 1:
        assert dict(counts) == VERBS[name]


def sums(group):
    draw = torch.Generator().manual_seed(group.rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for count in (5, 50_000):
            x = torch.randn(count, generator=draw).to(dtype)
            found.append(weft.all_reduce(x, "avg"))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sums_by_posts_have_the_bits_of_the_wire(size):
    same(run(size, sums, on="verbs"), run(size, sums, on="threads"))


def same(found, wanted):
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_a_process_group_are_the_same_on_all_ranks(size):
    first, *others = run(size, sums, on="gloo")
    for other in others:
        same([other], [first])
    for one, other in zip(first, run(size, sums, on="threads")[0], strict=True):
        torch.testing.assert_close(one, other)


@spmd(3, on=("verbs", "gloo"))
def test_one_rank_has_its_tensors_elsewhere(group):
    if group.rank == 1:
        group.worker.call("verbs", lambda: verbs_of(group, CPU)).name = "xpu (xccl)"
    for name in CALLS:
        if name != "remote_rows":  # whose counts are of the host
            with pytest.raises(weft.WeftError, match=r"device: .*cpu \(.* rank 1 has xpu \(xccl"):
                CALLS[name](group, 4)


def test_a_manifest_says_what_is_on_an_accelerator():
    said = description("parameter", torch.empty(2, device="meta"))
    assert said == "a meta parameter of torch.float32 of shape (2,)"


@spmd(2, on=("verbs",))
def test_the_capture_of_a_graph_is_refused(group, monkeypatch):
    monkeypatch.setattr(carrier, "is_capturing", lambda device: True)
    for name in CALLS:
        with pytest.raises(weft.WeftError, match="CUDA graph"):
            CALLS[name](group, 4)


@spmd(2, on=("threads",))
def test_nothing_is_read_while_a_graph_is_recorded(group, monkeypatch):
    """Which is an error of the arguments, and leaves the group as it is."""
    monkeypatch.setattr(of_groups, "is_capturing", lambda device: group.rank >= 0)
    with pytest.raises(weft.WeftError, match="rank 0: the stream records a CUDA graph"):
        weft.exchange(torch.ones(1, 2), [torch.tensor([0])] * 2)
    monkeypatch.undo()
    weft.barrier()
