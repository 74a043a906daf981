"""`overlap_grads`: what it does while backward runs, and what it refuses.

That its sums are those of `sync_grads` is in test_sync_grads.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft.base.pace import patient
from weft.comm.gradients import Synchronised
from weft.testing import processes, spmd, threads

EVERYWHERE = ("threads", "device", "processes", "torch")


@spmd(2, on=("threads", "device"))
def test_reduction_begins_before_backward_ends(group):
    """The last layer's gradients are on their way when the first layer's hook sees this."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen = []
    weft.overlap_grads(module, bucket_bytes=1)
    made = group.worker.made
    module[0].weight.register_hook(lambda gradient: seen.append(group.worker.made - made))
    module(torch.ones(1, 2)).sum().backward()
    weft.sync_grads(module)
    assert seen[0] >= 2


@spmd(2, on=EVERYWHERE)
def test_accumulating_takes_a_pause(group):
    module = nn.Linear(2, 1)
    overlap = weft.overlap_grads(module, average=False)
    batch = torch.ones(1, 2) * (group.rank + 1)
    with overlap.paused():
        module(batch).sum().backward()
    module(batch).sum().backward()
    weft.sync_grads(module, average=False)
    assert module.weight.grad.tolist() == [[6, 6]]


class Sum(nn.Module):
    """Backward reads on in the memory that it makes the gradient of `upper`."""

    def __init__(self, read):
        super().__init__()
        self.lower, self.upper = (nn.Parameter(torch.zeros(6)) for _ in range(2))
        self.read = read

    def forward(self):
        lower = torch.tanh(self.lower.view(3, 2))
        lower.register_hook(lambda gradient: self.read.append(gradient.detach()))
        return (lower + self.upper.view(3, 2)) * 2


@pytest.mark.parametrize("how", ["asked for", "thrown away"])
@spmd(2, on=("threads", "device"))
def test_gradients_that_are_gone_are_not_those_that_backward_adds_to(group, how):
    read = []
    module = Sum(read)
    overlap = weft.overlap_grads(module, average=False)
    for _ in range(2):
        module().sum().backward()
        weft.sync_grads(module, average=False)
        if how == "asked for":
            torch.autograd.grad(module().sum(), [module.lower, module.upper])
        else:
            with overlap.paused():
                module().sum().backward()
        module.zero_grad()
    read.clear()
    module().sum().backward()
    assert module.upper.grad.data_ptr() != read[0].data_ptr()
    weft.sync_grads(module, average=False)


@spmd(1, 2, on=EVERYWHERE)
def test_a_gradient_that_a_hook_uses_up_is_none(group):
    module = nn.Linear(2, 1, bias=False)
    if group.rank == 0:
        module.weight.register_post_accumulate_grad_hook(lambda used: setattr(used, "grad", None))
    weft.overlap_grads(module, average=False)
    module(torch.ones(1, 2)).sum().backward()
    weft.sync_grads(module, average=False)
    if group.size > 1:
        assert module.weight.grad.tolist() == [[1, 1]]


# in processes: the wire of threads may see itself that what is being sent is changed
@spmd(1, 2, on=("processes",))
def test_a_module_that_two_reentrant_checkpoints_run_is_told_of(group):
    """Each has a backward of its own, which gives the module gradients."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    weft.overlap_grads(module, bucket_bytes=1)

    def backward_of_both(use_reentrant):
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(module[0], x, use_reentrant=use_reentrant)
        module[1](x).sum().backward()

    backward_of_both(use_reentrant=True)
    with pytest.raises(weft.WeftError, match=r"one module, pass them use_reentrant=False$"):
        weft.sync_grads(module)
    module.zero_grad()
    backward_of_both(use_reentrant=False)
    weft.sync_grads(module)


def backward(module):
    module(torch.ones(1, 2)).sum().backward()


def changes_too_late(group, bucket_bytes, changes):
    """The last rank changes gradients of a module so, each time after a backward."""
    module, last = nn.Linear(2, 1), group.size - 1
    weft.overlap_grads(module, average=False, bucket_bytes=bucket_bytes)
    for change in changes:
        backward(module)
        if group.rank == last:
            change(module)
        with pytest.raises(weft.WeftError, match=rf"^rank {last}: the gradient of .* changed"):
            weft.sync_grads(module, average=False)
        module.zero_grad()
        backward(module)
        weft.sync_grads(module, average=False)
        assert module.weight.grad.tolist() == [[group.size] * 2]


@spmd(1, 2, 3, on=EVERYWHERE)
def test_a_gradient_that_changes_too_late_is_an_error_on_every_rank(group):
    changes_too_late(group, 1 << 20, [backward] * 4)


@spmd(
    1, 2, 3, on=("processes",)
)  # threads see that what is being sent changes, and break the group
def test_a_gradient_that_changes_in_a_bucket_of_its_own_is_too(group):
    changes_too_late(group, 1, [backward] * 4)


@spmd(1, 2, 3, on=EVERYWHERE)
def test_a_gradient_that_is_replaced_too_late_is_an_error_on_every_rank(group):
    def replace(module):
        module.bias.grad = torch.ones(1)

    changes_too_late(group, 1, [nn.Module.zero_grad, replace])


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@spmd(1, 2, 3, on=("processes",))  # as above
def test_a_gradient_that_is_written_too_late_is_an_error_on_every_rank(group, bucket_bytes):
    """Its rank would send it as it was, or write to the sum."""

    def clip(module):
        weft.clip_grad_value_(module, 0.5)

    def double(module):
        module.bias.grad.mul_(2)

    changes_too_late(group, bucket_bytes, [clip, double])


@pytest.mark.parametrize("starts", [True, False])
@spmd(2, on=("processes",))
def test_rows_that_are_written_too_late_are_an_error_on_every_rank(group, starts):
    """Whether their bucket has started, or waits for a parameter that is not used."""
    table = nn.Embedding(4, 2, sparse=True)
    if not starts:
        table.unused = nn.Parameter(torch.ones(1))
    weft.overlap_grads(table, average=False)

    def write(rows):
        rows._values().mul_(2)

    def add(rows):
        rows.add_(rows.clone())

    for change in (write, add, None):
        table.zero_grad()
        table(torch.tensor([0, group.rank])).sum().backward()
        if change and group.rank == 1:
            change(table.weight.grad)
        if change:
            with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of 'weight' changed"):
                weft.sync_grads(table, average=False)
    weft.sync_grads(table, average=False)
    assert table.weight.grad.to_dense().tolist() == [[3, 3], [1, 1], [0, 0], [0, 0]]


@spmd(2, on=("processes",))
def test_rows_that_are_touched_while_they_are_summed_are_an_error_on_every_rank(group):
    """What is written to them, or put in their place, would be lost."""
    table = nn.Embedding(4, 2, sparse=True)
    made, replaced = [], threading.Event()
    table.weight.register_post_accumulate_grad_hook(lambda weight: made.append(weight.grad))
    weft.overlap_grads(table, average=False)

    def write():
        group.worker.call("until the sum is there", lambda: None)
        made[-1]._values().mul_(2)

    def replace():
        table.weight.grad = made[-1].clone()
        replaced.set()

    for change in (write, replace):
        if change is replace and group.rank == 1:
            held = group.worker.submit("before the sum is there", lambda: replaced.wait(20.0))
        table(torch.tensor([0, group.rank])).sum().backward()
        if group.rank == 1:
            change()
        with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of 'weight' changed"):
            weft.sync_grads(table, average=False)
        table.zero_grad()
    assert group.rank == 0 or held.wait()


def change_after(backward, change, group, when):
    """A backward, and a change on rank 1, where buckets are yet to be reduced or have been."""
    begin = threading.Event()
    if when == "early":
        group.worker.submit("before the buckets", lambda: begin.wait(20.0))
    backward()
    if when == "late":
        group.worker.call("after the buckets", lambda: None)
    if group.rank == 1:
        change()
    begin.set()


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("to", [(torch.float64,), (torch.float64, torch.float32)])
@spmd(2, on=EVERYWHERE)
def test_a_module_that_is_converted_after_backward_is_an_error_on_every_rank(group, to, when):
    """Its gradients are the same objects then, of other memory, and no write is counted."""
    for made in nn.Linear(2, 1), nn.Embedding(4, 2, sparse=True):
        weft.overlap_grads(made, average=False)
        given = torch.zeros(1, 2) if isinstance(made, nn.Linear) else torch.tensor([0])

        def convert(module=made):
            for dtype in to:
                module.to(dtype)

        change_after(made(given).sum().backward, convert, group, when)
        with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of '\w+' changed"):
            weft.sync_grads(made, average=False)


@spmd(2, on=EVERYWHERE)
def test_a_conversion_is_an_error_on_every_rank_also_where_buckets_wait_for_sync_grads(group):
    module = nn.ParameterList([torch.zeros(2), torch.zeros(3), torch.zeros(4)])
    weft.overlap_grads(module, average=False, bucket_bytes=8)
    used = [module[0], module[2]] if group.rank == 1 else module
    sum(each.sum() for each in used).backward()
    if group.rank == 1:
        module.double()
    with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of '\d' changed"):
        weft.sync_grads(module, average=False)
    assert weft.all_reduce(torch.ones(1), group=group).item() == 2


@pytest.mark.parametrize("when", ["early", "late"])
@spmd(2, on=EVERYWHERE)
def test_a_parameter_that_takes_no_sum_any_more_is_an_error_on_every_rank(group, when):
    table = nn.Embedding(4, 2, sparse=True)
    weft.overlap_grads(table, average=False)

    def change():
        table.weight.data = torch.ones(5, 2)

    change_after(table(torch.tensor([0])).sum().backward, change, group, when)
    with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of 'weight' cannot be its su"):
        weft.sync_grads(table, average=False)
    assert weft.all_reduce(torch.ones(1), group=group).item() == 2


@pytest.mark.parametrize("when", ["early", "late"])
@spmd(2, on=EVERYWHERE)
def test_weights_may_be_elsewhere_while_their_gradients_are_reduced(group, when):
    """So they are where a program offloads them, all after backward or each around its layer."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    lower, upper = module[0].weight, module[1].weight
    weights = nn.init.ones_(lower).data, nn.init.ones_(upper).data
    weft.overlap_grads(module, average=False, bucket_bytes=1)

    def back(*_):
        lower.data = weights[0]

    def away(*_):
        lower.data = torch.empty(0)

    module[0].register_forward_hook(away)
    module[0].register_full_backward_pre_hook(back)

    def backward():
        x = torch.ones(1, 2, requires_grad=True)
        module(x).sum().backward()

    change_after(backward, away, group, when)
    weft.sync_grads(module, average=False)
    assert lower.grad.tolist() == [[2, 2], [2, 2]] and upper.grad.tolist() == [[4, 4]]


@pytest.mark.parametrize(("count", "dtype"), [(0, torch.float16), (4, torch.bfloat16)])
@spmd(2, on=EVERYWHERE)
def test_a_gradient_that_is_not_like_its_parameter_any_more_begins_no_bucket(group, count, dtype):
    """Other ranks, which have none, would add zeros of the parameter's kind to it."""
    module = nn.ParameterList([torch.zeros(2), torch.zeros(4, dtype=torch.float16)])
    weft.overlap_grads(module, average=False)
    if group.rank == 0:
        module[1].sum().backward()
    module[1].data = torch.zeros(count, dtype=dtype)
    module[0].sum().backward()
    with pytest.raises(weft.WeftError, match=r"^rank 0: the gradient of '1' .* the parameter "):
        weft.sync_grads(module, average=False)
    assert weft.all_reduce(torch.ones(1), group=group).item() == 2


@spmd(2, on=EVERYWHERE)
def test_a_gradient_that_torch_has_yet_to_conjugate_is_not_taken_for_changed(group):
    module = nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
    weft.overlap_grads(module, average=False)
    (module[0].conj() * torch.tensor([1j, 2j])).sum().real.backward()
    assert module[0].grad.is_conj()
    weft.sync_grads(module, average=False)
    assert module[0].grad.tolist() == [2j, 4j]


@pytest.mark.parametrize("sparse", [False, True])
@spmd(2, on=EVERYWHERE)
def test_a_gradient_of_another_shape_than_its_parameter_is_an_error_on_every_rank(group, sparse):
    """Torch would refuse the sum as its gradient, and with another number of elements no sum is."""
    table = nn.Embedding(4, 2, sparse=sparse)
    table(torch.tensor([0])).sum().backward()
    if group.rank == 1:
        table.weight.data = torch.ones(5, 2)
    text = r"^rank 1: the gradient of 'weight' has shape \(4, 2\), the parameter \(5, 2\): make"
    with pytest.raises(weft.WeftError, match=text):
        weft.sync_grads(table, average=False)
    assert weft.all_reduce(torch.ones(1), group=group).item() == 2


@spmd(1, on=("threads",))
def test_a_step_that_was_interrupted_leaves_no_error_for_the_next(group):
    module, begin, ended = nn.Linear(2, 1), threading.Event(), threading.Event()
    weft.overlap_grads(module, average=False)

    def interrupted(work, timeout=None):
        raise KeyboardInterrupt

    def fails(*args, **kwargs):
        begin.wait(20.0)
        raise weft.WeftError("of the step before")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Synchronised, "reduce", fails)
        backward(module)
        patch.setattr(weft.Work, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weft.sync_grads(module, average=False)
        group.worker.submit("the next", ended.set)
        begin.set()
        assert ended.wait(20.0)
    module.zero_grad()
    backward(module)
    weft.sync_grads(module, average=False)
    assert module.weight.grad.tolist() == [[1, 1]]


@spmd(2, on=("processes",))
def test_gradients_in_one_memory_are_not_taken_for_changed(group):
    """A write of one is counted for all that share it, also of one without elements."""
    module = nn.ParameterList([torch.zeros(3), torch.zeros(0), torch.zeros(3)])
    flat, one = torch.zeros(3), torch.zeros(3)
    weft.overlap_grads(module, average=False)
    for _ in range(2):
        module[0].grad, module[1].grad, module[2].grad = flat.zero_(), flat[3:], one.zero_()
        (module[0].sum() + module[1].sum() + 2 * module[2].sum()).backward()
        weft.sync_grads(module, average=False)
        assert flat.tolist() == [2, 2, 2] and one.tolist() == [4, 4, 4]


def writes_to_a_dtensor():
    with weft.init() as group:
        mesh = init_device_mesh("cpu", (group.size,))
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
        weft.overlap_grads(module, average=False)
        for factor in (10, None):
            module.weight.sum().backward()
            if factor and group.rank == 1:
                module.weight.grad.mul_(factor)
            if factor:
                with pytest.raises(weft.WeftError, match=r"^rank 1: the gradient of 'weight' ch"):
                    weft.sync_grads(module, average=False)
                module.zero_grad()
        weft.sync_grads(module, average=False)
        return module.weight.grad.to_local().tolist()


def compiled_backward():
    module = nn.Linear(3, 1)
    with weft.init() as group:
        weft.overlap_grads(module, average=False)
        loss = module(torch.full((1, 3), 1.0 + group.rank)).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        weft.sync_grads(module, average=False)
        return module.weight.grad.tolist()


def test_a_backward_that_is_compiled_is_overlapped():
    assert processes(2, compiled_backward) == [[[3, 3, 3]]] * 2


def test_a_dtensor_that_is_written_too_late_is_an_error_on_every_rank():
    assert processes(2, writes_to_a_dtensor) == [[2, 2]] * 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("length", [6, 1 << 20])
@spmd(2, on=("processes",))
def test_autograd_knows_that_a_gradient_was_reduced(group, length):
    """Whatever way it went, by itself or beside others."""
    module = nn.Linear(length, 1, bias=False)
    module(torch.ones(1, length)).square().sum().backward(create_graph=True)
    squared = module.weight.grad.square().sum()
    weft.sync_grads(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@spmd(2, 3, on=EVERYWHERE)
def test_ranks_that_began_more_buckets_meet_again_after_an_error(group):
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    weft.overlap_grads(module, average=False, bucket_bytes=1)
    for bad in (0, group.size - 1):
        if group.rank == bad:  # it has come to the first bucket, the others to the last
            module[3].weight.grad_dtype = None
            module[3].weight.grad = torch.zeros(2, 2, dtype=torch.float64)
        else:
            module(torch.ones(1, 2)).sum().backward()
        with pytest.raises(weft.WeftError, match=rf"rank {bad}: the gradient of '3.weight' is"):
            weft.sync_grads(module, average=False)
        module.zero_grad()
        module[3].weight.grad_dtype = torch.float32
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(module, average=False)
        assert torch.equal(module[3].weight.grad[0], module[3].weight.grad[1])


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@spmd(2, on=EVERYWHERE)
def test_overlap_sees_parameters_as_they_are_when_their_gradients_are_made(group, bucket_bytes):
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    weft.overlap_grads(module, average=False, bucket_bytes=bucket_bytes)

    def step(dtype):
        module(torch.ones(1, 2, dtype=dtype)).sum().backward()
        weft.sync_grads(module, average=False)
        module.zero_grad()

    step(torch.float32)
    dtype = torch.bfloat16 if group.rank else torch.float16
    module.to(dtype)
    for _ in range(2):
        with pytest.raises(weft.WeftError, match=r"parameter of torch.float16 .* on rank 0, and"):
            step(dtype)
        module.zero_grad()
    module.double()
    step(torch.float64)
    if group.rank:
        module[0].weight.data = module[0].weight.data.t().contiguous()
    with pytest.raises(weft.WeftError, match=r"'0.weight' .* of shape \(3, 2\) on rank 0"):
        weft.sync_grads(module, average=False)


@pytest.mark.parametrize("changed", [0, 1])
@spmd(2, on=EVERYWHERE)
def test_overlap_takes_a_layer_that_all_ranks_have_changed_alike(group, changed):
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    module = nn.ModuleList(layers)
    weft.overlap_grads(module, average=False, bucket_bytes=1)

    def step():
        given = torch.ones(1, 2)
        for layer in layers:
            given = layer(given.to(layer.weight.dtype))
        given.sum().backward()
        weft.sync_grads(module, average=False)
        assert torch.equal(layers[1].bias.grad.float(), torch.full((2,), 2.0))
        module.zero_grad()

    step()
    layers[changed].double()
    if group.rank:  # whose buckets wait, while the other's are under way
        group.worker.submit("slow", lambda: time.sleep(0.05))
    else:
        group.worker.submit("quick", lambda: None)
    step()


@spmd(2, on=EVERYWHERE)
def test_overlap_does_not_pass_over_parameters_that_were_replaced(group):
    module = nn.Linear(2, 1)
    overlap = weft.overlap_grads(module)
    module.weight = nn.Parameter(torch.ones(1, 2))
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(weft.WeftError, match=r"other parameters than when overlap_grads was"):
        weft.sync_grads(module)
    overlap.remove()
    weft.overlap_grads(module)
    module(torch.ones(1, 2)).sum().backward()  # accumulates
    weft.sync_grads(module)
    assert module.weight.grad.tolist() == [[2, 2]]


@spmd(1, 2, on=EVERYWHERE)
def test_a_wrapper_of_an_overlapped_module_is_not_reduced_twice(group):
    module = nn.Sequential(nn.Linear(2, 1))
    weft.overlap_grads(module, average=False)
    for wrapper in (nn.Sequential(module), torch.compile(module, backend="eager"), module[0]):
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(wrapper, average=False)
        assert module[0].weight.grad.tolist() == [[group.size] * 2]
    with pytest.raises(weft.WeftError, match="overlap already"):
        weft.overlap_grads(module[0])


@spmd(1, 2, on=EVERYWHERE)
def test_a_module_that_is_overlapped_in_part_is_refused_and_the_next_call_works(group):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    weft.overlap_grads(module[0], average=False)
    module(torch.ones(1, 2)).sum().backward()
    last = group.size - 1
    with pytest.raises(weft.WeftError, match=rf"^rank {last}: the module has some of the param"):
        weft.sync_grads(module if group.rank == last else module[0], average=False)
    module.zero_grad()
    module(torch.ones(1, 2)).sum().backward()
    weft.sync_grads(module[0], average=False)
    weft.sync_grads(module[1], average=False)
    assert module[1].bias.grad.item() == group.size


@spmd(2, on=EVERYWHERE)
def test_what_overlap_refuses(group):
    module = nn.Linear(2, 1)
    overlap = weft.overlap_grads(module)
    with pytest.raises(weft.WeftError, match="overlap already"):
        weft.overlap_grads(module)
    for other in ({"average": False}, {"wire_dtype": torch.bfloat16}):
        with pytest.raises(weft.WeftError, match="another group, average or wire_dtype"):
            weft.sync_grads(module, **other)
    overlap.remove()
    with pytest.raises(weft.WeftError, match=r"'weight' is .* on rank 0, and .* on rank 1"):
        weft.overlap_grads(nn.Linear(2 + group.rank, 1))
    with pytest.raises(weft.WeftError, match="rank 1: bucket_bytes is 0: pass a positive"):
        weft.overlap_grads(module, bucket_bytes=1 - group.rank)
    with pytest.raises(weft.WeftError, match="rank 0: module is a int"):
        weft.overlap_grads(module if group.rank else 3)


@pytest.mark.parametrize("is_used", [True, False])
@spmd(2, 3, on=EVERYWHERE)
def test_hooks_that_go_in_the_middle_of_a_step_leave_it_to_sync_grads(group, is_used):
    """What backward began is not summed again; the last rank's batch need not use all of it."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    weft.sync_params(module)
    overlap = weft.overlap_grads(module, average=False, bucket_bytes=1)
    for removes in (True, False, False):
        module.zero_grad()
        given = torch.ones(1, 2)
        uses_all = is_used or group.rank < group.size - 1
        (module if uses_all else module[0])(given).sum().backward()
        if removes:
            overlap.remove()
            if is_used:  # else some ranks have begun buckets, and no other call may come between
                with pytest.raises(weft.WeftError, match=r"has run since, call weft\.sync_grads"):
                    weft.overlap_grads(module)
        weft.sync_grads(module, average=False)
        assert module[1].bias.grad.item() == group.size - (not is_used)
    weft.overlap_grads(module, average=False)
    weft.all_reduce(torch.ones(1))


@pytest.mark.parametrize("removes", ["before the group ends", "after it"])
@spmd(2, 3, on=EVERYWHERE)
def test_a_step_that_was_given_up_with_its_group_is_not_completed(group, removes):
    """The last rank has not come to its backward."""
    module = nn.Linear(2, 1)
    part = group.split(list(range(group.size)))
    overlap = weft.overlap_grads(module, average=False, group=part)
    if group.rank < group.size - 1:
        module(torch.ones(1, 2)).sum().backward()
    if removes == "before the group ends":
        overlap.remove()
    part.close()
    overlap.remove()
    given_up = weakref.ref(overlap)
    del overlap
    for goes_on in (weft.sync_grads, weft.overlap_grads):
        goes_on(module, average=False)
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(module, average=False)
        assert module.bias.grad.item() == group.size
        gc.collect()
        assert given_up() is None


@spmd(2, on=EVERYWHERE)
def test_layers_may_be_made_anew_around_their_parameters(group):
    """As `nn.SyncBatchNorm.convert_sync_batchnorm` does it."""
    module = nn.Sequential(nn.Linear(2, 1, bias=False))
    weft.overlap_grads(module, average=False)
    anew = nn.Linear(2, 1, bias=False)
    anew.weight = module[0].weight
    for _ in range(2):
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        module[0] = anew
        weft.barrier()  # of a call that has ended its group knows no more
        gc.collect()
        weft.sync_grads(module, average=False)
        assert anew.weight.grad.tolist() == [[2, 2]]


@spmd(2, on=EVERYWHERE)
def test_hooks_may_go_while_torch_calls_them(group):
    module = nn.Linear(2, 1, bias=False)
    module.weight.register_post_accumulate_grad_hook(lambda _: overlap.remove())
    overlap = weft.overlap_grads(module, average=False)
    for _ in range(2):
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        weft.sync_grads(module, average=False)
        assert module.weight.grad.tolist() == [[2, 2]]


@spmd(2, 3, on=EVERYWHERE)
def test_a_wrapper_that_is_overlapped_may_go_before_what_it_wraps(group):
    """Also in the middle of a step, where one rank collects its garbage."""
    module = nn.Linear(2, 1)
    wrapper = nn.ModuleList([module])
    overlap = weakref.ref(weft.overlap_grads(wrapper, average=False))
    for step in range(3):
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        wrapper = None
        weft.barrier()  # of a call that has ended its group knows no more
        if group.rank == 0:
            gc.collect()
        weft.sync_grads(module, average=False)
        assert module.bias.grad.item() == group.size, step
    overlap().remove()
    weft.overlap_grads(module)


@pytest.mark.parametrize("trains", [False, True])
@spmd(1, 2)
def test_a_module_may_go_with_its_hooks(group, trains):
    """Which C++ holds, where Python sees no cycle."""
    module = nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 1))
    weft.overlap_grads(module)
    if trains:
        module(torch.ones(1, 2).long()).sum().backward()
        weft.sync_grads(module)
    gone = weakref.ref(module[0].weight)
    del module
    gc.collect()
    late = time.monotonic() + patient(10.0)
    while gone() is not None and time.monotonic() < late:
        time.sleep(0.01)  # until the worker's thread has left the call
    assert gone() is None


def test_two_threads_of_backward_start_each_bucket_once(monkeypatch):
    """Autograd has a thread for each device, and a program may have two backwards at a time."""
    [group] = threads.group(1)
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    weft.overlap_grads(model, average=False, group=group, bucket_bytes=1)
    submit, started = group.worker.submit, []
    others = [threading.Thread(target=model[0](torch.ones(1, 2)).sum().backward)]

    def submit_late(name, job):
        started.append(name)
        while others:
            other = others.pop()
            other.start()
            other.join(30.0)
        return submit(name, job)

    monkeypatch.setattr(group.worker, "submit", submit_late)
    model[1](torch.ones(1, 2)).sum().backward()
    weft.sync_grads(model, average=False, group=group)
    assert len(started) == 2
    assert all(each.grad.tolist() == [[1.0, 1.0]] * 2 for each in model.parameters())
    group.close()
