"""torch.distributed on weft's backend: what scripts call, unchanged."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
import weakref
from datetime import timedelta
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import weft
from cases import in_default_group
from weft.backend import register
from weft.base.pace import patient
from weft.group import process_group
from weft.testing import run, spmd


@pytest.fixture
def ranks(tmp_path):
    """`ranks(size, body)` runs `body(me, size)` in torch's default group, of backend cpu:weft."""
    return lambda size, body: run(size, in_group, body, tmp_path, on="processes")


def in_group(group, body, folder):
    with in_default_group(group, folder, "cpu:weft"):
        result = body(group.rank, group.size)
        inside = dist.group.WORLD.weft_group
    assert inside.closed
    return result


def table(*indices, height=10):
    values = torch.arange(1.0, 1 + 2 * len(indices)).view(-1, 2)
    return torch.sparse_coo_tensor([indices], values, (height, 2), check_invariants=True)


def sparse(me, size):
    for op, combine in (("SUM", Tensor.sum), ("MAX", Tensor.amax)):
        for later in (False, True):
            mine = table(me, 4, 4)
            work = dist.all_reduce(mine, getattr(dist.ReduceOp, op), async_op=later)
            if later:
                assert work.get_future().wait()[0] is mine
                work.wait()
                assert work.is_completed() and work.exception() is None
            assert mine.is_coalesced() and mine.indices().tolist() == [[*range(size), 4]]
            every = [table(rank, 4, 4).to_dense() for rank in range(size)]
            right = combine(torch.stack(every), 0)
            assert torch.equal(mine.to_dense(), right), op
    # the group is the one that weft's own calls on this group use
    assert dist.group.WORLD.weft_group is process_group.of_group(None)
    indices, _ = weft.sparse_all_reduce((torch.tensor([me]), torch.ones(1)), group=None)
    assert indices.tolist() == list(range(size))


def others(me, size):
    """What neither test_calls nor PyTorch's own tests of gloo have."""
    for op, right in (("PRODUCT", 24), ("BOR", 7), ("MIN", 2)):
        tensor = torch.tensor([2, 4, 3][me], dtype=torch.int16)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        assert tensor.item() == right, op
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.full((size,), float(me)))
    assert torch.equal(out, torch.arange(float(size)))
    pair = dist.new_group([0, 2])
    if me != 1:
        mine = table(me)
        dist.all_reduce(mine, group=pair)
        assert mine.indices().tolist() == [[0, 2]]
        out = torch.empty(2)
        dist.all_gather_single(out, torch.tensor([float(me)]), group=pair)
        assert out.tolist() == [0.0, 2.0]


def several(me, size):
    """What `_coalescing_manager` makes one call of, which is gloo's."""
    for later in (False, True):
        sums, gathered = [torch.full((n,), float(me)) for n in (2, 3)], [torch.empty(size)] * 2
        scattered = [torch.empty(1), torch.empty(2)]
        with dist._coalescing_manager(async_ops=later) as works:
            for each in sums:
                dist.all_reduce(each)
        with dist._coalescing_manager(async_ops=later) as more:
            for each in gathered:
                dist.all_gather_single(each, torch.tensor([float(me)]))
        with dist._coalescing_manager(async_ops=later) as most:
            for each in scattered:
                dist.reduce_scatter_single(each, torch.ones(size * len(each)))
        for each in (works, more, most) if later else ():
            each.wait()
        assert all(each.eq(sum(range(size))).all() for each in sums)
        assert all(each.tolist() == list(range(size)) for each in gathered)
        assert all(each.eq(size).all() for each in scattered)


def late(me, size):
    """A barrier whose time is up says so, and for whom it waits; then it can be waited for."""
    told, short = torch.zeros(1), timedelta(seconds=0.1)
    for later in (False, True):
        group = dist.new_group()
        dist.barrier(group)  # joins the ranks
        for _ in range(2):
            work = None
            if me == 0:
                with pytest.raises(weft.StillRunning, match=r"after 0\.1 s"):
                    work = dist.barrier(group, async_op=later, timeout=short)
                    work.wait()
                dist.send(told, 1)
            else:
                dist.recv(told, 0)
            if work is not None:
                work.wait(timedelta(seconds=20))
            else:
                dist.barrier(group)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == size


def misled(me, size):
    """Timeouts that are none are named before anything is begun."""
    tensor, forever = torch.ones(1), timedelta.max  # which C++ makes a negative one of
    for wrong in (timedelta(0), timedelta(seconds=-1), forever):
        with pytest.raises(weft.WeftError, match=rf"rank {me}: timeout is .*: pass a positive"):
            dist.new_group(timeout=wrong)
        for later in (False, True):
            with pytest.raises(weft.WeftError, match=r"rank 1: timeout is .*: pass a positive"):
                work = dist.barrier(async_op=later, timeout=wrong if me == 1 else timedelta(9))
                work.wait()
    work = dist.group.WORLD.allreduce([tensor])
    with pytest.raises(weft.WeftError, match=r"timeout is -1\.0: pass a positive"):
        work.wait(timedelta(seconds=-1))
    work.wait()
    assert tensor.item() == size


def functionally(me, size):
    """C++ calls these, and reads the works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the names of before torch 2.13
        world = dist.group.WORLD
        assert (functional.all_reduce(torch.ones(3), "sum", world) + 0).tolist() == [2.0] * 3
        got = functional.all_gather_tensor(torch.full((2,), float(me)), 0, world) + 0
        assert got.tolist() == [0.0, 0.0, 1.0, 1.0]
        got = functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, world) + 0
        assert got.tolist() == [2.0, 2.0]
        gives, takes = ([1, 2], [1, 2]) if me == 0 else ([2, 1], [2, 1])
        got = functional.all_to_all_single(torch.full((3,), float(me)), takes, gives, world) + 0
        assert got.tolist() == ([0.0, 1.0, 1.0] if me == 0 else [0.0, 0.0, 1.0])


def compiled(me, size):
    """torch.compile looks into what it calls, but not into what a group does."""

    def exchange(x):
        whole, own = torch.empty(size * len(x)), torch.empty(len(x))
        dist.all_reduce(x)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter_single(own, whole)
        dist.barrier()
        if me == 0:
            dist.send(own, 1)
            dist.recv(own, 1)
        else:
            dist.irecv(own, 0).wait()
            dist.isend(own, 0).wait()
        return 2 * own

    for _ in range(2):
        given = torch.ones(2) + me
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what else torch does not look into
            assert torch.compile(exchange, backend="eager")(given).tolist() == [12.0, 12.0]
        assert given.tolist() == [3.0, 3.0]


def promised(me, size):
    """What is under way may be the input of a graph, which waits for it."""
    ones, whole = torch.ones(2), torch.zeros(2 * size)
    if me == 1:
        time.sleep(0.2)
    with functional.allow_inflight_collective_as_graph_input_ctx():
        works = [dist.all_reduce(ones, async_op=True)]
        functional.wait_tensor(ones)
        assert ones.tolist() == [size, size]
        works.append(dist.all_gather_single(whole, ones, async_op=True))
        large = torch.ones(1000)
        memory = weakref.ref(large.untyped_storage())
        dist.all_reduce(large, async_op=True).wait()  # and nobody waits for the tensor
        assert memory() is not None
        del large
        deadline = time.monotonic() + 10
        while memory() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # until the worker's thread has left the call
        assert memory() is None
        assert functional.wait_tensor(whole).tolist() == [size] * 2 * size
    for work in works:
        work.wait()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-2, 3, (20, 4), generator=generator).float()
        self.table = nn.Embedding(20, 4, sparse=True, _weight=weight)
        self.dense = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.dense.weight.copy_(torch.randint(-2, 3, (2, 4), generator=generator))

    def forward(self, words):
        return self.dense(self.table(words))


def words(rank, step):
    return torch.tensor([rank, 7, 7 + step])


def ddp(me, size):
    """Integers and two ranks: the means are exact."""
    model, alone = DistributedDataParallel(Model()), Model()
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(words(me, step)).sum().backward()
        for rank in range(size):
            (alone(words(rank, step)).sum() / size).backward()
        found, wanted = model.module.table.weight.grad, alone.table.weight.grad
        assert found.layout == torch.sparse_coo
        assert torch.equal(found.to_dense(), wanted.to_dense())
        assert torch.equal(model.module.dense.weight.grad, alone.dense.weight.grad)


def compressed(me, size):
    """A hook of torch's, whose callbacks of one Future wait for others."""
    model, alone = (DistributedDataParallel(nn.Linear(32, 32)) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    given = torch.ones(2, 32) * me
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        for each in (model, alone):
            each.zero_grad()
            each(given).sum().backward()
    # a matrix of rank 1, as this gradient is, is itself
    found, wanted = (each.module.weight.grad for each in (model, alone))
    torch.testing.assert_close(found, wanted)


def unused(me, size):
    """A group that weft's own calls have made ends with torch's."""
    made = dist.new_group()
    weft.barrier(group=made)
    own = process_group.joined(made)
    dist.destroy_process_group(made)
    assert own.closed
    made = dist.new_group()
    assert weft.all_reduce(torch.ones(1), group=made).item() == size
    own = process_group.joined(made)
    dist.all_reduce(torch.ones(1), group=made)
    own.close()
    weft.barrier(group=made)
    own = process_group.joined(made)
    assert not own.closed
    dist.destroy_process_group(made)
    assert own.closed


def test_errors_reach_the_caller_and_the_next_call_works(ranks):
    texts = ranks(3, erring)
    assert len({tuple(each) for each in texts}) == 1


def erring(me, size):
    said = []
    wrong = table(me, height=10 + (me == 1))
    with pytest.raises(weft.WeftError, match="height") as caught:
        dist.all_reduce(wrong)
    said.append(str(caught.value))
    # torch's own coalesce would write outside of its memory here
    wild = torch.tensor([[2, -1 if me == 0 else 3]])
    wild = torch.sparse_coo_tensor(wild, torch.ones(2, 2), (10, 2), check_invariants=False)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        with pytest.raises(weft.WeftError, match="rank 0: index -1 is negative"):
            dist.all_reduce(wild, op)
    work = None
    text = "rank 2: tensors of 9 and of 4 elements were given: for the parts of 3 ranks the first "
    with pytest.raises(weft.WeftError, match=text) as caught:
        work = dist.all_gather_single(torch.empty(9), torch.ones(3 + (me == 2)), async_op=True)
        work.wait()
    said.append(str(caught.value))
    if work is not None:
        with pytest.raises(RuntimeError, match=text):
            work.get_future().wait()  # as C++ sees it
    right = table(me)
    dist.all_reduce(right)
    assert right.indices().tolist() == [[0, 1, 2]]
    return said


BODIES = [
    (3, sparse),
    (3, others),
    (3, several),
    (2, late),
    (2, misled),
    (2, functionally),
    (2, compiled),
    (2, promised),
    (2, ddp),
    (2, compressed),
    (2, unused),
]


@pytest.mark.parametrize(("size", "body"), BODIES)
def test_what_scripts_call(ranks, size, body):
    ranks(size, body)


def test_no_method_that_c_asks_for_is_left_to_torch():
    """What torch runs itself for a group written in Python it starts with the GIL held.

    gloo's threads take the GIL, to let go of a tensor, with the lock held that starting needs: now
    and then that is a deadlock. So none may be missing.
    """
    from weft.backend.group import WeftGroup

    asked = (
        "all_gather_single_coalesced all_to_all_single allgather allreduce allreduce_coalesced "
        "barrier broadcast recv reduce_scatter reduce_scatter_single_coalesced send "
        "allgather_into_tensor_coalesced alltoall_base reduce_scatter_tensor_coalesced "
        "allgather_coalesced gather_single recv_anysource"
    )
    assert set(asked.split()) <= {*vars(WeftGroup)}


WITHOUT_WEFT = """
import sys
import torch
import torch.distributed as dist
for name in ("weft", "cpu:weft"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    rows = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    print(type(dist.group.WORLD).__module__, rows.to_dense().tolist())
    dist.destroy_process_group()
"""


def test_torch_finds_the_backends_by_their_names():
    found = entry_points(group="torch.distributed.backends")
    mine = {each.name: each for each in found if each.value.startswith("weft")}
    assert sorted(mine) == ["weft"]
    assert all(each.load() is register for each in mine.values())
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        return  # torch 2.13 does not look for any
    line = [sys.executable, "-W", "error", "-c", WITHOUT_WEFT]
    run = subprocess.run(line, capture_output=True, text=True, timeout=patient(120.0))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["weft.backend.group [0.0, 3.0, 0.0]"] * 2
    assert run.stderr == ""


@spmd(1, on=("threads",))
def test_a_timeout_that_weft_would_not_keep_is_refused(group, tmp_path):
    """torch 2.15 has `dist.set_timeout`, which calls this."""
    wrong = pytest.raises(weft.WeftError, match="rank 0: cpu:weft keeps its timeout")
    with in_default_group(group, tmp_path, "cpu:weft"), wrong:
        dist.group.WORLD.set_timeout(timedelta(seconds=9))


def test_it_serves_alone():
    """torch 2.13 does not say that there are others, and keeps weft's alone."""
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        return
    one = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    with pytest.raises(weft.WeftError, match="rank 0: backend 'weft' takes no other beside it"):
        dist.init_process_group("cpu:weft,cuda:gloo", **one)
