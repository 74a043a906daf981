"""Models under DistributedDataParallel: with weft's hook their gradients are what they were.

Weights and inputs are small integers and the numbers of ranks powers of two, so that plain sums and
weft's must agree to the last bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import os
import signal
import threading
import time
import types
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cases import in_case, in_default_group
from weft import ddp
from weft.base.errors import Error, WeftError, WireError
from weft.base.pace import patient
from weft.bootstrap.init import init
from weft.bootstrap.local import launch
from weft.comm import sync_grads
from weft.ddp import backward, registration
from weft.ddp import state as of_models
from weft.group import process_group
from weft.group.callbacks import Callbacks
from weft.schedules import dense
from weft.testing import gloo_of_one_thread, spmd

VOCABULARY, WIDTH = 40, 4


class Model(nn.Module):
    """Tables of all kinds, one of them under two names, and a dense part."""

    def __init__(self, sparse=True):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.padded = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0, sparse=sparse)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum", sparse=sparse)
        self.twin = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.twin.weight = self.table.weight
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Linear(8, 2)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(3)
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, words, *, tables="table padded bag twin"):
        looked_up = [getattr(self, name)(words) for name in tables.split()]
        pooled = [each.sum(1) if each.dim() == 3 else each for each in looked_up]
        start = torch.zeros(len(words), WIDTH, dtype=self.first.weight.dtype)
        hidden = self.first(sum(pooled, start)).relu()
        return self.second(hidden)


def words(step, count=6):
    """A batch of this rank: indices, with duplicates."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, VOCABULARY // 2, (count, 3), generator=generator)


def gradients(model):
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {
        name: grad.to_dense() if grad.layout == torch.sparse_coo else grad.clone()
        for name, grad in found.items()
        if grad is not None
    }


def check_equal(found, wanted):
    mine, theirs = gradients(found), gradients(wanted)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=0, msg=name)


def registered(module, wire_dtype=None, **options):
    """A module in DistributedDataParallel, under weft's hook."""
    model = DistributedDataParallel(module, **options)
    ddp.register(model, wire_dtype=wire_dtype)
    return model


def both(options):
    """The same model twice: under weft's hook, and as it was."""
    model = Model()
    return registered(copy.deepcopy(model), **options), plain_ddp(model, **options)


def plain_ddp(model, **options):
    """A model as it was, in a group that may carry several sparse gradients."""
    group = dist.new_group(backend=gloo_of_one_thread())
    return DistributedDataParallel(model, process_group=group, **options)


def trained(*sizes, wire=None):
    """A test: a rank's program within `weft.init`, in so many processes that have a group.

    `wire` is that of `weft.init`: "group" has all tensors go as those of an accelerator do.
    """

    def decorate(body):
        @functools.wraps(body)
        def inside(group, tmp_path, **given):
            with in_default_group(group, tmp_path), init(timeout=60, wire=wire):
                body(**given)

        *own, _ = inspect.signature(inside, follow_wrapped=False).parameters.values()
        own += inspect.signature(body).parameters.values()
        inside.__dict__["__signature__"] = inspect.Signature(own)
        return spmd(*sizes, on=("processes",))(inside)

    return decorate


def same_on_all(text):
    """A text, which must be the same on every rank."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1
    return text


OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
}


def with_all_options(body):
    """Run a body once for each set of options, in these processes, which are slow to start."""
    for name, options in OPTIONS.items():
        with in_case(name):
            body(options)


@trained(4, 2, 1)
def test_gradients_are_those_of_plain_ddp():
    with_all_options(same_gradients)


def same_gradients(options):
    """Of steps that follow each other, that accumulate, and of which a rank's batch is empty."""
    ours, plain = both(options)
    for step in range(6):
        for model in (ours, plain):
            model.zero_grad()
            if step in (3, 4):
                with model.no_sync():
                    model(words(10 * step)).sum().backward()
                    model(words(10 * step + 1)).sum().backward()
            empty = dist.get_rank() == step - 4  # in the last steps the one, then the other
            model(words(step)[: 0 if empty else 6]).pow(2).sum().backward()
        check_equal(ours, plain)
        assert ours.module.table.weight.grad.is_coalesced()  # optimizers need not sort it again
        with torch.no_grad():
            for model in (ours, plain):
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad.to_dense().sign())


@trained(2)
def test_tables_may_be_unused():
    """On one rank in alternate steps, on all in one, which DistributedDataParallel cannot."""
    with_all_options(unused)


def unused(options):
    ours = registered(Model(), **options)
    oracle = DistributedDataParallel(Model(sparse=False), find_unused_parameters=True)
    for step in range(5):
        tables = "table bag" if dist.get_rank() == step % 2 and step < 4 else "bag"
        for model in (ours, oracle):
            model.zero_grad()
            model(words(step), tables=tables).sum().backward()
        mine, wanted = gradients(ours), gradients(oracle)
        assert mine.keys() == {*wanted, "table.weight", "padded.weight"}
        for name, gradient in mine.items():
            expected = wanted.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0, msg=name)
    assert ours.module.padded.weight.grad._nnz() == 0
    assert ours.module.table.weight.grad._nnz() == 0


@trained(2)
def test_a_table_may_be_unused_under_no_sync():
    ours = registered(Model())
    oracle = DistributedDataParallel(Model(sparse=False), find_unused_parameters=True)
    for model in (ours, oracle):
        with model.no_sync():
            model(words(0), tables="bag").sum().backward()
        model(words(1), tables="table bag").sum().backward()
        with model.no_sync():
            model(words(2), tables="table bag").sum().backward()
        model(words(3), tables="bag").sum().backward()
    mine, wanted = gradients(ours), gradients(oracle)
    torch.testing.assert_close(mine["bag.weight"], wanted["bag.weight"], rtol=0, atol=0)
    torch.testing.assert_close(mine["table.weight"], wanted["table.weight"], rtol=0, atol=0)


@trained(2)
def test_other_dtypes():
    narrow = torch.bfloat16
    for dtype, wire_dtype in (
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.float64, None),
        (torch.float32, narrow),
    ):
        ours = registered(Model().to(dtype), wire_dtype)
        plain = DistributedDataParallel(Model(sparse=False).to(dtype))  # gloo: no sparse halves
        for model in (ours, plain):
            # one line of words: larger integers are not exact in bfloat16
            model(words(0, count=1), tables="table padded bag").sum().backward()
        assert ours.module.table.weight.grad.dtype == dtype
        wanted = gradients(plain)
        for name, gradient in gradients(ours).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=0, msg=name)
    ours.zero_grad()
    ours(words(0) + dist.get_rank()).sum().mul(1.01).backward()
    gradient = ours.module.table.weight.grad.values()
    assert gradient.any()
    torch.testing.assert_close(gradient, gradient.to(narrow).float(), rtol=0, atol=0)


@trained(3)
def test_any_group_and_number_of_ranks():
    """Three ranks, of which two train, with real numbers: equal to rounding."""
    group = dist.new_group([0, 2])
    safe = gloo_of_one_thread()
    oracles = dist.new_group(backend=safe), dist.new_group([0, 2], backend=safe)
    for ranks, oracle in zip((None, group), oracles, strict=True):
        if ranks is group and dist.get_rank() == 1:
            continue
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True, max_norm=1.5), nn.Linear(WIDTH, 3)
        )
        ours = DistributedDataParallel(copy.deepcopy(model), process_group=ranks)
        plain = DistributedDataParallel(model, process_group=oracle)
        state = ddp.register(ours)
        assert state.group is process_group.of_group(ranks)
        for wrapped in (ours, plain):
            wrapped(words(0)).exp().sum().backward()
        wanted = gradients(plain)
        for name, gradient in gradients(ours).items():
            torch.testing.assert_close(gradient, wanted[name], msg=name)


@trained(2)
def test_hook_and_state_for_trainers():
    model = Model()
    ours = DistributedDataParallel(copy.deepcopy(model))
    plain = plain_ddp(model)
    state = ddp.State(algorithm="gather")
    ours.register_comm_hook(state, ddp.hook)
    for wrapped in (ours, plain):
        wrapped(words(0)).sum().backward()
    check_equal(ours, plain)
    assert {call.algorithm for call in state.calls} == {"gather"}
    assert sum(call.union for call in state.calls) == sum(
        gradient.coalesce()._nnz()
        for gradient in (parameter.grad for parameter in ours.parameters())
        if gradient.is_sparse
    )


@trained(2)
def test_a_gradient_that_shares_memory_with_another_is_reduced_apart():
    """Plain DistributedDataParallel divides that of the table in place, and so the other."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(2, 2)
            self.table = nn.Embedding(9, 2, sparse=True)

        def forward(self, index):
            hidden = self.line(torch.ones(3, 2))
            return hidden + self.table(index)

    torch.manual_seed(0)
    model = Sum()
    synced = copy.deepcopy(model)
    ours = registered(model)
    for wrapped in (ours, synced):
        wrapped(torch.tensor([1, 5, 2 + dist.get_rank()])).square().sum().backward()
    sync_grads(synced)
    for mine, other in zip(ours.parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())


@trained(2)
def test_a_result_is_not_copied_into_its_gradient():
    job_of, results = backward.job_of, []

    def remember(*args):
        job, device = job_of(*args)
        return lambda: results.append(job()) or results[-1], device

    model = registered(nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "job_of", remember)
        for _ in range(2):
            model.zero_grad()
            model(words(0)).sum().backward()
            result = results[-1]._values()
            assert model.module.weight.grad._values().data_ptr() == result.data_ptr()


@trained(2)
def test_a_registered_model_may_go_with_its_hooks():
    """Which C++ holds, where Python sees no cycle."""
    model = registered(nn.EmbeddingBag(9, 2, sparse=True))
    model(torch.tensor([[1, 2]])).sum().backward()
    gone = weakref.ref(model.module.weight)
    del model
    gc.collect()
    assert gone() is None


def left_to_the_collector(step):
    """The tensors in cycles that a step has made, which only the garbage collector ends."""
    step()
    gc.collect()
    # kept: those of an earlier test, whose threads may still hold them, and let go of them below
    before = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    gc.disable()
    try:
        step()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [each for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        del before


@trained(2)
def test_no_gradient_waits_for_the_garbage_collector():
    def registered(model):
        ddp.register(model)

    def sparsified(model):
        model.register_comm_hook(ddp.TopK(0.5), ddp.topk_hook)

    for prepare in (registered, sparsified):
        model = DistributedDataParallel(Model())
        prepare(model)

        def step(model=model):
            model.zero_grad()
            model(words(0)).sum().backward()

        with in_case(prepare.__name__):
            assert left_to_the_collector(step) == []


@trained(2)
def test_backward_goes_on_while_gradients_travel():
    model = DistributedDataParallel(Model(), bucket_cap_mb=1e-5)
    seen = []
    free = threading.Event()

    def hook(state, bucket):  # torch compares annotations with types, and these are postponed
        future = ddp.hook(state, bucket)
        seen.append(free.is_set())
        if bucket.is_last():
            free.set()
        return future

    state = ddp.State()
    model.register_comm_hook(state, hook)
    held = state.group.worker.submit("something long", lambda: free.wait(20))
    model(words(0)).sum().backward()
    assert held.wait() is True  # so nothing was waited for before the last bucket had come
    assert len(seen) > 2 and not any(seen)


@trained(2)
def test_ranks_may_run_out_of_data():
    for unused in (False, True):
        out_of_data({"find_unused_parameters": unused})


def out_of_data(options):
    dense = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.fill_(2)
    ours, plain = (DistributedDataParallel(copy.deepcopy(dense), **options) for _ in range(2))
    ddp.register(ours)
    for model in (ours, plain):
        with model.join():
            for step in range(1 + 2 * dist.get_rank()):
                model.zero_grad()
                model(torch.full((2, 3), float(step + 1))).sum().backward()
    check_equal(ours, plain)


@trained(2)
def test_an_error_is_raised_as_itself_and_the_next_step_works():
    an_error_and_the_next_step({})


def an_error_and_the_next_step(options):
    model = Model()
    ours = DistributedDataParallel(copy.deepcopy(model), **options)
    plain = plain_ddp(model, **options)
    state = ddp.register(ours, algorithm=["auto", "plain"][dist.get_rank()])
    with pytest.raises(WeftError, match=r"algorithm: .*auto.*plain") as caught:
        ours(words(0)).sum().backward()
    assert type(caught.value) is WeftError and same_on_all(str(caught.value))
    assert any("zero_grad" in note for note in caught.value.__notes__)
    state.algorithm = "auto"
    for step in range(2):
        for model in (ours, plain):
            model.zero_grad()
            model(words(step)).sum().backward()
        check_equal(ours, plain)


@trained(2)
def test_an_error_of_a_dense_bucket_too():
    ours, plain = both({"bucket_cap_mb": 1e-5})
    refused = []

    def refuse(op, dtype):
        refused.append(op)
        return "only once" if len(refused) == 1 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "refuses", refuse)
        with pytest.raises(WeftError, match="only once"):
            ours(words(0)).sum().backward()
    for model in (ours, plain):
        model.zero_grad()
        model(words(1)).sum().backward()
    check_equal(ours, plain)


@trained(1)
def test_a_closed_wire_is_an_error_as_itself():
    model = DistributedDataParallel(Model())
    ddp.register(model).group.close()
    for _ in range(2):  # the model is as good as before
        with pytest.raises(Error, match="closed"):
            model(words(0)).sum().backward()


@pytest.mark.parametrize(("how", "size"), [("killed", 4), ("raised", 2), ("killed in backward", 4)])
def test_who_fails_is_named_by_all_others(how, size):
    """Also where they await its buffers, in a call of DistributedDataParallel's own over gloo."""
    with pytest.raises(LookupError if how == "raised" else WireError) as caught:
        launch(size, failing_in_its_second_step, [how], env={"OMP_NUM_THREADS": "1"})
    notes = "\n".join(caught.value.__notes__)
    end = "left, after it raised (LookupError: no such word)" if how == "raised" else "died"
    for rank in range(1, size):
        assert f"rank {rank} of {size} raised WireError: rank {rank}: rank 0 {end} while" in notes


def failing_in_its_second_step(how):
    with init(timeout=60):
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.BatchNorm1d(3))
        wrapped = registered(model)
        wrapped(words(0)).sum().backward()
        output = wrapped(words(1)) if how == "killed in backward" else None
        if dist.get_rank() == 0 and how == "raised":
            raise LookupError("no such word")
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        (wrapped(words(1)) if output is None else output).sum().backward()


def refuse_a_future(_):
    time.sleep(0.1)  # the call has ended by then
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("sparse", [True, False])
@trained(2)
def test_who_can_start_no_thread_for_a_bucket_is_named(sparse):
    wrapped = registered(Model(sparse))
    outputs = wrapped(words(0))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(Callbacks, "prepare", refuse_a_future)
        with pytest.raises(WireError, match=r"rank 0 gave up: ddp .* can have no Future"):
            outputs.sum().backward()


@trained(1)
def test_a_backward_ends_where_no_thread_can_be_started_for_tables():
    """DistributedDataParallel waits for their Futures, which have no deadline."""
    wrapped = DistributedDataParallel(Model())
    wrapped.register_comm_hook(ddp.State(), ddp.hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Callbacks, "prepare", refuse_a_future)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            wrapped(words(0)).sum().backward()


@pytest.mark.parametrize(
    ("how", "by"),
    [
        (signal.SIGKILL, "backward"),
        (signal.SIGKILL, "the block of init"),
        (signal.SIGSTOP, "backward"),
    ],
)
def test_who_fails_after_the_last_bucket_is_named(how, by, tmp_path):
    """Its peers await its used parameters then, over gloo, inside of torch's backward."""
    with pytest.raises(WireError) as caught:
        given = [how, by, tmp_path / "arrived"]
        launch(2, failing_after_its_last_bucket, given, env={"OMP_NUM_THREADS": "1"})
    told = "\n".join(caught.value.__notes__)
    end = "died" if how == signal.SIGKILL else "does not answer"
    assert f"rank 1 of 2 raised WireError: rank 1: rank 0 {end}" in told or (
        str(caught.value).startswith(f"rank 1: rank 0 {end}")
    )


def failing_after_its_last_bucket(how, by, arrived):
    kind, hooks = WireError, ddp.hook
    with contextlib.ExitStack() as left, init(timeout=60) as group:
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if how == signal.SIGSTOP and dist.get_rank() == 1:
            left.callback(os.kill, pids[0], signal.SIGKILL)
        armed = threading.Event()

        @functools.wraps(hooks)
        def hook(state, bucket):
            future = hooks(state, bucket)
            if armed.is_set() and dist.get_rank() == 1:
                future.add_done_callback(lambda _: arrived.touch())
            elif armed.is_set():
                future.wait()
                while not arrived.exists():
                    time.sleep(0.01)
                time.sleep(0.2)  # the other comes to await the used parameters
                os.kill(os.getpid(), how)
            return future

        if by == "backward":
            registration.hook = hook
            ddp.register(wrapped)
        else:  # the hook knows nothing of the model
            kind = RuntimeError
            wrapped.register_comm_hook(ddp.State(), hook)
        for step in range(2):
            output = wrapped(torch.ones(3, WIDTH)).sum()
            if step:
                armed.set()
            if step and how == signal.SIGSTOP:  # which is found out at the deadline
                group.set_timeout(patient(3.0))
            try:
                output.backward()
            except (RuntimeError, WireError) as error:
                assert type(error) is kind and ("gloo" in str(error)) == (kind is RuntimeError)
                raise


@trained(2)
def test_complex_gradients_are_sent_as_they_are():
    module = nn.Linear(1, 2, bias=False, dtype=torch.complex64)
    model = registered(module, torch.bfloat16)
    below = 2.0**-9  # one of bfloat16's last digits
    model(torch.tensor([1 + below + dist.get_rank() + 1j])).real.sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 1), 1.5 + below - 1j))


@trained(1, 3)
def test_dense_buckets_travel_in_the_wire_dtype_as_those_of_sync_grads_do():
    me, size = dist.get_rank(), dist.get_world_size()
    for dtype, narrow, cap in (
        (torch.float32, torch.bfloat16, 25),
        (torch.float64, torch.float16, 0.02),  # MB: several buckets
    ):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(70, 300), nn.Linear(300, 3)).to(dtype)
        synced = copy.deepcopy(model)
        ours = DistributedDataParallel(model, bucket_cap_mb=cap)
        state = ddp.register(ours, wire_dtype=narrow)
        batch = torch.randn(4, 70, generator=torch.Generator().manual_seed(me)).to(dtype)
        for step in range(3):
            before = state.group.traffic.bytes
            for wrapped in (ours, synced):
                wrapped.zero_grad()
                wrapped(batch + step).exp().sum().backward()
            sent = state.group.traffic.bytes - before
            in_full = sum(each.grad.nbytes for each in synced.parameters()) * (size - 1)
            assert sent <= in_full * narrow.itemsize / dtype.itemsize * 1.05, (sent, in_full, cap)
            sync_grads(synced, wire_dtype=narrow)
            for mine, other in zip(ours.parameters(), synced.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)


@trained(3)
def test_who_disagrees_on_the_wire_dtype_is_named_on_every_rank():
    me = dist.get_rank()
    ours = DistributedDataParallel(nn.Linear(70, 300))
    for given, wire_dtype, text in (
        (ours, torch.float16 if me == 1 else None, r"differ in wire_dtype: .*rank 1 has torch.flo"),
        (ours, "float16" if me == 2 else torch.float16, "^rank 2: wire_dtype is 'float16': pass"),
        (ours.module if me == 0 else ours, None, "^rank 0: register takes a Dist.* this is Linear"),
        (ours.module, None, "^rank 0: register takes a Dist.* this is Linear"),
    ):
        with pytest.raises(WeftError, match=text) as caught:
            ddp.register(given, wire_dtype=wire_dtype)
        assert same_on_all(str(caught.value))
    with pytest.raises(AttributeError):
        ddp.register(ours, wire_dtype=torch.float16).wire_dtype = None
    ours(torch.ones(1, 70)).sum().backward()
    assert ours.module.bias.grad.eq(1).all()


def check_alone(model):
    """A model that is not wrapped trains as if it were not registered; nobody is asked."""
    state, other = ddp.register(model), copy.deepcopy(model)
    for each in (model, other):
        update = torch.optim.SGD(each.parameters(), lr=0.5)
        each(torch.tensor([[3, 7, 3]])).exp().sum().backward()
        update.step()
    check_equal(model, other)
    assert torch.equal(model.weight, other.weight) and model.weight.grad.is_sparse
    assert not state.calls
    with pytest.raises(WeftError, match=r"wire_dtype is torch.float64"):
        ddp.register(model, wire_dtype=torch.float64)


@trained(1)
def test_a_model_that_is_not_wrapped_is_left_alone_in_a_group_of_one():
    check_alone(nn.EmbeddingBag(9, 2, sparse=True))


def test_a_model_that_is_not_wrapped_is_left_alone_without_a_group(monkeypatch, caplog):
    registration.say_alone.cache_clear()
    table = nn.EmbeddingBag(9, 2, sparse=True)
    check_alone(table)
    ddp.register(table)
    assert [(record.name, record.levelname) for record in caplog.records] == [("weft", "WARNING")]
    assert "runs alone" in caplog.text
    with pytest.raises(WeftError, match=r"register takes a Dist.* this is Tensor: wrap it first"):
        ddp.register(table.weight.data)
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun's, whose ranks have no group yet
    with pytest.raises(WeftError, match=r"register takes a Dist.* this is EmbeddingBag"):
        ddp.register(table)


def said_in_steps(caplog, late):
    """What the log says of two steps of a model, which is registered before them, or in between."""
    with init():
        model = DistributedDataParallel(Model())
        with caplog.at_level("INFO", "weft"):
            for step in range(3):
                if step == late:
                    ddp.register(model)
                model(words(step)).sum().backward()
    return [record.message for record in caplog.records if "ddp" in record.message]


def test_the_log_says_what_the_first_step_carried(caplog):
    (said,) = said_in_steps(caplog, late=False)
    assert said == "ddp: tables: 3, dense buckets: 1, sent by rank 0 in the first step: 0 KB"


def test_the_log_says_that_a_model_was_registered_late(caplog):
    warned, said = said_in_steps(caplog, late=True)
    assert "the model has run already" in warned and "tables: 3" in said


@trained(2)
def test_a_model_that_has_a_hook_already_is_refused_on_every_rank():
    twice, other = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    ddp.register(twice)
    if dist.get_rank() == 1:
        other.register_comm_hook(None, fp16_compress_hook)
    for model, rank in ((twice, 0), (other, 1)):
        with pytest.raises(WeftError, match=f"rank {rank}: this model has a communication hook"):
            ddp.register(model)
    twice(torch.ones(1, 2)).sum().backward()
    assert twice.module.bias.grad.eq(1).all()


@trained(2)
def test_a_forward_that_was_set_on_the_model_is_the_one_that_runs():
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)
    plainly = model.forward
    model.forward = lambda x: 10 * plainly(x)
    ddp.register(model)
    assert model(torch.ones(1, 1)).item() == 10
    model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad.item() == 5  # the mean of both ranks'

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)
    model.forward = types.MethodType(lambda self, x: 10 * type(self).forward(self, x), model)
    ddp.register(model)
    other = copy.deepcopy(model)
    ddp.register(other)
    with torch.no_grad():
        other.module.weight.fill_(2)
    assert (model(torch.ones(1, 1)).item(), other(torch.ones(1, 1)).item()) == (10, 20)


class Tied(nn.Module):
    """A table whose weight an output layer has, too, declared before it or behind."""

    def __init__(self, output_first):
        super().__init__()
        output = nn.Linear(3, 7, bias=False)
        if output_first:
            self.out = output
        self.table = nn.Embedding(7, 3, sparse=True)
        self.out = output
        self.table.weight = output.weight

    def forward(self, index):
        return self.out(self.table(index))


@trained(2)
def test_a_table_that_is_tied_to_a_dense_layer_is_refused_unless_that_is_declared_first():
    with pytest.raises(
        WeftError, match=r"^rank 0: 'table.weight' .* tied to 'out.weight'"
    ) as error:
        ddp.register(DistributedDataParallel(Tied(output_first=False)))
    same_on_all(str(error.value))
    holding = Tied(output_first=True)
    del holding.out
    holding.kept = nn.ParameterList([holding.table.weight])  # which makes no gradients
    ddp.register(DistributedDataParallel(holding))
    model = Tied(output_first=True)
    ours, plain = DistributedDataParallel(copy.deepcopy(model)), DistributedDataParallel(model)
    ddp.register(ours)
    for wrapped in (ours, plain):
        wrapped(torch.tensor([1, 2 + dist.get_rank()])).sum().backward()
    check_equal(ours, plain)


def looked_up(weight, index):
    return nn.functional.embedding(index, weight, sparse=True).sum()


def gathered(weight, index):
    return torch.gather(weight, 0, index[:, None], sparse_grad=True).sum()


class ByFunction(nn.Module):
    """A parameter and a table, with what gives both their gradients."""

    def __init__(self, use):
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)
        self.weight = nn.Parameter(torch.ones(7, 3))
        self.use = use

    def forward(self, index):
        return self.table(index).sum() + self.use(self, index)


def plain_use(model, index):
    return model.weight[index].sum()


OTHER_KINDS = [
    (lambda model, index: looked_up(model.weight, index), "'weight' got a sparse gradient"),
    (lambda model, index: gathered(model.weight, index), "'weight' got a sparse gradient"),
    (
        lambda model, index: (model.table.weight @ model.weight.T).sum(),
        "'table.weight' has sparse gradients in Embedding, and got a dense one",
    ),
]


@pytest.mark.parametrize("erring", ["all ranks", "the last rank"])
@pytest.mark.parametrize("finds_unused", [False, True])
@trained(2, 3)
def test_a_gradient_of_another_kind_than_torch_expects_is_named_on_all_ranks(erring, finds_unused):
    last = dist.get_world_size() - 1
    culprit = 0 if erring == "all ranks" else last
    index = torch.tensor([1, 2 + dist.get_rank()])

    def step(model, use):
        errs = erring == "all ranks" or dist.get_rank() == last
        model.zero_grad()
        model.module.use = use if errs else plain_use
        model(index).backward()

    for use, text in OTHER_KINDS:
        options = {"find_unused_parameters": finds_unused}
        model = registered(ByFunction(plain_use), **options)
        for _ in range(2):
            with pytest.raises(WeftError, match=f"^rank {culprit}: {text}") as error:
                step(model, use)
            same_on_all(str(error.value))
        step(model, plain_use)
        assert model.module.weight.grad.to_dense()[1].eq(1).all()
        wanted = 1 / dist.get_world_size()
        assert torch.allclose(model.module.table.weight.grad.to_dense()[2], torch.tensor(wanted))
    # of the last one: the table is used otherwise in a later step
    for number in range(3):
        errs = number == 1
        with pytest.raises(WeftError, match=f"^rank {culprit}: {text}") if errs else nullcontext():
            step(model, use if errs else plain_use)


@trained(2)
def test_what_watches_gradients_goes_with_the_model_though_its_state_is_kept():
    table = nn.Embedding(5, 2, sparse=True)
    inside = nn.Sequential(table, nn.Linear(2, 1))
    model = DistributedDataParallel(inside)
    state = ddp.register(model)
    index = torch.tensor([dist.get_rank()])
    model(index).sum().backward()
    del model
    gc.collect()
    table.sparse = False
    model = registered(inside)
    for _ in range(2):
        model.zero_grad()
        model(index).sum().backward()
        assert table.weight.grad.layout == torch.strided
    assert state.unlike is None


@trained(2, 3)
def test_a_table_may_be_frozen_for_a_step_where_ddp_finds_what_is_unused():
    """As a dense weight may."""
    inside = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    table = inside[0].weight
    model = registered(inside, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        is_frozen = step in (1, 2)
        table.requires_grad_(not is_frozen)
        before = table.detach().clone()
        optimizer.zero_grad()
        model(torch.tensor([dist.get_rank()])).sum().backward()
        same_on_all(str(inside[1].weight.grad))
        if is_frozen:
            assert table.grad is None
        else:
            same_on_all(str(table.grad.to_dense()))
            assert table.grad.to_dense()[: dist.get_world_size()].all()
        optimizer.step()
        assert table.equal(before) == is_frozen


@pytest.mark.parametrize("adds_before", [False, True])
@trained(2)
def test_a_backward_that_failed_with_a_frozen_table_leaves_nothing_to_the_next(adds_before):
    inside = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    table = inside[0].weight
    model = registered(inside, find_unused_parameters=True)
    table.requires_grad_(False)
    index = torch.tensor([dist.get_rank()])
    with model.no_sync():
        out = model(index)
        out.register_hook(_raise)
        with pytest.raises(ValueError, match="not finite"):
            out.sum().backward()
    table.requires_grad_(True)
    if adds_before:
        inside(index).sum().backward()
        model(index)
        assert table.grad._nnz() == 1
    for _ in range(2):
        model.zero_grad()
        model(index).sum().backward()
        assert table.grad.to_dense()[:2].all()


def _raise(gradient):
    raise ValueError("not finite")


@trained(2)
def test_a_state_made_by_hand_compares_the_wire_dtype_in_backward():
    ours = DistributedDataParallel(nn.Linear(70, 300))
    wrong = torch.float16 if dist.get_rank() else torch.bfloat16
    ours.register_comm_hook(ddp.State(wire_dtype=wrong), ddp.hook)
    for _ in range(2):
        with pytest.raises(WeftError, match="ranks differ in wire_dtype"):
            ours(torch.ones(1, 70)).sum().backward()


# By the process group: tensors of the CPU go as those of an accelerator do, over gloo.


@contextmanager
def noted():
    """What weft began on process groups meanwhile, in order."""
    began = []

    def noting(name):
        collective = getattr(dist, name)

        def begin(tensor, *args, **kwargs):
            began.append(f"{name} {tensor.dtype}")
            return collective(tensor, *args, **kwargs)

        return begin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noting("all_reduce"))
        yield began


@trained(4, 2, 1, wire="group")
def test_by_the_group_gradients_are_the_same():
    with noted() as began:
        with_all_options(same_gradients)
    # of a table so small that it is summed whole, too, and of which of its rows are there
    sums = {"all_reduce torch.float32", "all_reduce torch.uint8"}
    assert {*began} <= sums and (began or dist.get_world_size() == 1)


@trained(4, wire="group")
def test_by_the_group_tables_may_be_unused():
    with_all_options(unused)


@trained(2, wire="group")
def test_a_dense_bucket_is_one_sum_of_the_group():
    ours, plain = both({"bucket_cap_mb": 1e-5})
    for step in range(2):  # of which the second has the buckets for good
        for model in (ours, plain):
            model.zero_grad()
        with noted() as began:
            ours(words(step)).sum().backward()
        plain(words(step)).sum().backward()
        check_equal(ours, plain)
    assert began[:2] == ["all_reduce torch.float32"] * 2  # in the order of backward


@trained(2, wire="group")
def test_the_group_adds_halves_in_full_precision():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(70, 300), nn.Linear(300, 3))
    ours, plain = (DistributedDataParallel(copy.deepcopy(model)) for _ in range(2))
    batch = torch.randn(2, 70, generator=torch.Generator().manual_seed(dist.get_rank()))
    with noted() as began:
        ddp.register(ours, wire_dtype=torch.float16)
        ours(batch).sum().mul(99).backward()  # numbers that are normal in float16, too
    assert {*began} == {"all_reduce torch.float32"}
    plain.register_comm_hook(None, fp16_compress_hook)
    plain(batch).sum().mul(99).backward()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


@trained(2, wire="group")
def test_by_the_group_ranks_may_run_out_of_data():
    for unused in (False, True):
        out_of_data({"find_unused_parameters": unused})


@trained(2, wire="group")
def test_by_the_group_an_error_is_raised_as_itself_and_the_next_step_works():
    with_all_options(an_error_and_the_next_step)


@trained(2)
def test_a_dense_gradient_is_this_ranks_own_after_an_error():
    def refuse(*args):
        raise WeftError("not now")

    for views in (False, True):
        model = registered(nn.Linear(3, 2), gradient_as_bucket_view=views)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(of_models, "reduce_dense", refuse)
            with pytest.raises(WeftError, match="not now"):
                model(torch.ones(1, 3)).sum().mul(1 + dist.get_rank()).backward()
        assert model.module.weight.grad.eq(1 + dist.get_rank()).all()


class Summed(torch.autograd.Function):
    """As SyncBatchNorm: in backward it uses the model's group, while gradients do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Summing(nn.Module):
    def forward(self, x):
        return Summed.apply(x)


@trained(2, wire="group")
def test_a_model_may_use_the_group_in_backward():
    layers = [layer for _ in range(8) for layer in (nn.Linear(3, 3), Summing())]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1)
    options = {"bucket_cap_mb": 1e-5}
    ours = registered(copy.deepcopy(model), **options)
    plain = DistributedDataParallel(model, process_group=dist.new_group(), **options)
    for _ in range(10):
        for each in (ours, plain):
            each.zero_grad()
            each(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        check_equal(ours, plain)


@trained(2)
def test_buckets_that_torch_leaves_out_are_refused():
    model = DistributedDataParallel(
        nn.Linear(2, 1), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    with pytest.raises(WeftError, match=r"^rank 0: .*: leave it False") as caught:
        ddp.register(model)
    same_on_all(str(caught.value))


@pytest.mark.parametrize("sparse", [False, True])
def test_by_the_group_who_fails_in_backward_is_named(sparse):
    with pytest.raises(WireError) as caught:
        launch(3, failing_by_the_group, [sparse], env={"OMP_NUM_THREADS": "1"})
    notes = "\n".join(caught.value.__notes__)
    for rank in (1, 2):
        assert f"rank {rank} of 3 raised WireError: rank {rank}: rank 0 died while" in notes


def failing_by_the_group(sparse):
    with init(timeout=60, wire="group"):
        table = nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=sparse)
        wrapped = registered(table)
        for step in range(3):
            output = wrapped(words(step))
            if step == 2 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                output.sum().backward()
            except RuntimeError as error:  # of gloo, which names nobody
                raise AssertionError(str(error)) from None
