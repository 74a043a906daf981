"""weft's use of torch's private names: each piece, and the same piece without the name."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import weft
from weft.base import _torch
from weft.base._torch import (
    at_end_of_backward,
    backend_of,
    backward_id,
    gloo_group,
    group_named,
    is_wrapped,
    store_of,
    timeout_of,
    uncompiled,
    without_modes,
    without_transforms,
)
from weft.base.pace import patient


def without(monkeypatch, *names):
    """As on a torch that lacks these."""
    for name in names:
        monkeypatch.setattr(_torch, name, None)


@pytest.mark.parametrize("missing", [(), ("_modes",)])
def test_modes_are_left_and_come_back(missing, monkeypatch):
    without(monkeypatch, *missing)
    make = without_modes(torch.empty)
    assert make(1).is_cpu
    with torch.device("meta"):
        assert make(1).is_cpu
        assert torch.empty(1).is_meta


@pytest.mark.parametrize(
    "missing", [(), ("_transform",), ("_wrapped",), ("_transform", "_wrapped")]
)
def test_transforms_are_seen_and_left(missing, monkeypatch):
    without(monkeypatch, *missing)
    make = without_transforms(torch.zeros)
    seen = []

    def function(x):
        seen.extend([is_wrapped(x), is_wrapped(make(1))])
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 3))
    assert seen == [True, False] * 2
    assert not any(map(is_wrapped, [torch.ones(1), torch.ones(1).to_sparse()]))


def test_what_cannot_be_left(monkeypatch):
    without(monkeypatch, "_no_modes", "_no_transforms")
    assert without_modes(torch.empty) is without_transforms(torch.empty) is torch.empty


@pytest.mark.parametrize("missing", [(), ("_frames",)])
def test_the_compiler_does_not_look_into_it(missing, monkeypatch):
    without(monkeypatch, *missing)
    compiling = []

    def told(x):
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    inside = uncompiled(told)
    graph = torch.compile(lambda x: inside(2 * x) + 1, backend="eager")
    assert graph(torch.ones(2)).tolist() == [4.0, 4.0]
    assert compiling == [False]


def test_the_end_of_a_backward():
    order = []

    def hook(grad):
        order.append(backward_id())
        at_end_of_backward(lambda: order.append("end"))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    for _ in range(2):
        (x * 2).sum().backward()
        order.append("after")
    first, second = order[0], order[3]
    assert order == [first, "end", "after", second, "end", "after"]
    assert isinstance(first, int) and isinstance(second, int) and 0 <= first != second
    assert backward_id() == -1


@pytest.mark.parametrize("missing", ["_graph_task", "_engine"])
def test_backwards_that_are_not_known(missing, monkeypatch):
    without(monkeypatch, missing)
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(backward_id()))
    x.sum().backward()
    assert seen == [-1]


@pytest.mark.parametrize("lacks", [False, True])
def test_process_groups(lacks, tmp_path, monkeypatch):
    if lacks:
        monkeypatch.delattr(distributed_c10d, "_resolve_process_group")
        monkeypatch.delattr(distributed_c10d, "_get_process_group_store")
        without(monkeypatch, "_set_timeout")
    with pytest.raises(KeyError):
        group_named("no such group")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        assert group_named(world.group_name) is world
        with pytest.raises(KeyError):
            group_named("no such group")
        found = store_of(world)
        assert found is not None
        found.set("a key", "there")
        assert found.get("a key") == b"there"
        assert timeout_of(world) == 77
        _torch.set_timeout(world, 7.0)  # and torch warns of nothing
        assert timeout_of(world) == (77 if lacks else 7)
        assert _torch.can_set_timeout() != lacks
    finally:
        dist.destroy_process_group()
    assert store_of(world) is None


NONE_OF_THEM = """
import torch
import torch._dynamo  # which needs them itself, to be imported
from torch.autograd import Variable, forward_ad
from torch.distributed import distributed_c10d
for owner, names in {
    torch._C: "_len_torch_function_stack DisableTorchFunction _DisableFuncTorch "
        "_current_graph_task_id",
    torch._C._functorch: "peek_interpreter_stack is_functorch_wrapped_tensor",
    torch._C._dynamo.eval_frame: "set_code_exec_strategy",
    torch._C._profiler: "_RecordFunctionFast",
    torch.profiler.record_function: "_call_end_callbacks_on_future",
    torch: "_foreach_copy_ _foreach_mul_",
    distributed_c10d: "_resolve_process_group _get_process_group_store",
}.items():
    for name in names.split():
        delattr(owner, name)
del Variable._execution_engine
import weft
with weft.init() as group:
    x = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    print(weft.sparse_all_reduce(x).to_dense().tolist())
"""


def test_weft_works_without_any_of_them():
    run = subprocess.run(
        [sys.executable, "-c", NONE_OF_THEM], capture_output=True, text=True, timeout=patient(120.0)
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[0.0, 3.0, 0.0]"


def test_no_other_module_names_them():
    """A private name has one place, where its fallback is, too."""
    root = Path(weft.__file__).parent
    private = ("torch._C", "_functorch", "_execution_engine", "torch._foreach", "c10d._")
    naming = [
        path.name
        for path in root.rglob("*.py")
        if path.name != "_torch.py" and any(name in path.read_text() for name in private)
    ]
    assert naming == []


def test_who_serves_a_device():
    group = dist.ProcessGroup(0, 1)
    assert backend_of(group, torch.device("cpu")) is None
    gloo = gloo_group(dist.HashStore(), 0, 1, 7.0, ["lo"])
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    assert backend_of(group, torch.device("cpu")) is gloo
    assert backend_of(group, torch.device("meta")) is None


@pytest.mark.parametrize("missing", [(), ("_Options",), ("create_device",)])
def test_a_gloo_group_is_made(missing, monkeypatch):
    for name in missing:
        monkeypatch.delattr(dist.ProcessGroupGloo, name)
    group = gloo_group(dist.HashStore(), 0, 1, 7.0, ["lo"])
    assert group.options._timeout == timedelta(seconds=7)
    assert group.options._threads == (2 if missing else 1)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    assert total.item() == 1.0
