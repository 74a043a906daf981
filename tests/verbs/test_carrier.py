"""Who carries tensors of a device, and what every rank is told where nobody does, or none can."""

import functools
import threading
from contextvars import ContextVar

import pytest
import torch
import torch.distributed as dist

import weft
from weft.base.devices import is_capturing
from weft.bootstrap.outcome import results
from weft.group.session import Session
from weft.testing import run, threads
from weft.testing.threads import on_groups
from weft.verbs import carrier
from weft.verbs.carrier import backend_for, verbs_of

CARRIED = [("cpu:gloo,cuda:nccl", "cuda", "nccl"), ("cuda:nccl", "cuda", "nccl")]
CARRIED += [("cpu:gloo,xpu:xccl", "xpu", "xccl"), ("cpu:gloo", "cpu", "gloo")]
CARRIED += [("cpu:gloo", "cuda", None), ("cpu:gloo,cuda:gloo", "cuda", "gloo")]
CARRIED += [("cpu:gloo,cuda:nccl", "xpu", None), ("cpu:weft", "cpu", None)]


@pytest.mark.parametrize(("config", "kind", "name"), CARRIED)
def test_the_backend_of_a_group_that_takes_tensors_of_the_device(monkeypatch, config, kind, name):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_for(threading.Thread(), torch.device(kind)) == name


NOBODY = [
    ("cpu:gloo", "cuda", "gloo takes no cuda tensors: `cpu:gloo,cuda:nccl`, or `.cpu()`"),
    ("cpu:weft", "xpu", "weft takes no xpu tensors: `cpu:gloo,xpu:xccl`, or `.cpu()`"),
    (
        "cpu:gloo,cuda:nccl",
        "meta",
        "cpu:gloo,cuda:nccl takes no meta tensors: `a backend for meta`, or `.cpu()`",
    ),
]


@pytest.mark.parametrize(("config", "kind", "text"), NOBODY)
def test_else_nobody_carries_them(monkeypatch, config, kind, text):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group, others = threads.group(2)
    there = threading.Thread()
    group.session.process_group = lambda: there
    with pytest.raises(weft.WeftError) as caught:
        group.worker.call("ask", lambda: verbs_of(group, torch.device(kind)))
    assert str(caught.value) == f"this group's {text}"
    for each in (group, others):
        each.close()


def with_gradient(x):
    """A module of one parameter, which has a gradient."""
    module = torch.nn.ParameterList([x])
    module[0].grad = torch.ones_like(x)
    return module


CALLS = [
    lambda x, group: weft.sparse_all_reduce((torch.arange(3), x), group=group),
    lambda x, group: weft.sparse_all_reduce([(torch.arange(3), x)] * 2, group=group),
    lambda x, group: weft.sparse_all_reduce(
        (torch.arange(3), x), group=group, async_op=True
    ).wait(),
    lambda x, group: weft.sparse_reduce_scatter((torch.arange(3), x), group=group),
    lambda x, group: weft.sparse_reduce((torch.arange(3), x), group_dst=1, group=group),
    lambda x, group: weft.sparse_all_gather((torch.arange(3), x), group=group),
]


broken: ContextVar[bool] = ContextVar("broken", default=False)


def refused(group):
    """Every call says so on all ranks, and the next one works."""
    x = torch.ones(3, 2)
    told = []
    for call in CALLS:
        group.state.clear()  # of verbs, which are asked for once
        broken.set(group.rank == 1)
        with pytest.raises(weft.WeftError) as caught:
            call(x, group)
        told.append(str(caught.value))
        broken.set(False)
        call(x, group)
    return told


def check_refused(groups, text):
    first, *others = results(on_groups(groups, refused), "threads")
    assert others == [first] * 2
    for said in first:
        assert said.startswith(f"rank 1: {text}"), said


def test_a_tensor_that_nobody_carries_is_an_error_on_every_rank(monkeypatch):
    there = threading.Thread()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    monkeypatch.setattr(carrier, "backend_for", lambda *_: None if broken.get() else "gloo")
    posted = functools.partial(carrier.PostedVerbs, name="cpu (gloo)")
    monkeypatch.setattr(carrier, "GroupVerbs", lambda group, *_, **__: posted(group))
    monkeypatch.setattr(Session, "carry", lambda *_: None)
    groups = threads.group(3, 60.0, wire="group")
    for group in groups:
        group.session.process_group = lambda: there
    check_refused(groups, "this group's gloo takes no cpu tensors")


def test_a_graph_that_is_recorded_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setattr(carrier, "is_capturing", lambda device: broken.get())
    check_refused(threads.group(3, 60.0, wire="group"), "the stream records a CUDA graph")


def test_a_graph_is_recorded_on_a_device_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing(torch.device("cuda")) and not is_capturing(torch.device("cpu"))


def apart(group):
    """Tensors of one rank go by verbs, and those of the others by the wire."""
    group.session.is_by_group = group.rank == 2
    with pytest.raises(weft.WeftError) as caught:
        weft.sparse_all_reduce((torch.arange(3), torch.ones(3)))
    group.session.is_by_group = False
    weft.sparse_all_reduce((torch.arange(3), torch.ones(3)))
    return str(caught.value)


def test_ranks_whose_tensors_go_different_ways_are_told_alike():
    first, *others = run(3, apart)
    assert others == [first] * 2
    assert "differ in device: ranks 0, 1 have cpu, rank 2 has cpu (posts)" in first
