"""`sync_grads` and `sync_params` beside FSDP2, where DDP's hook does not reach."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

import weft
from weft.testing import processes


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(rank):
    return torch.linspace(-1, 1, 12).reshape(4, 3) + rank


def overlapping(shards):
    """A mesh of replicas by shards: FSDP2 reduces along the shards, weft along the replicas.

    Three steps in which it does so while FSDP2's backward goes on, and the gradients of one more.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replica", "shard"))
    replica = mesh["replica"].get_local_rank()
    sharded = model()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.add_(replica)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh["shard"])
    weft.sync_params(sharded, group=mesh["replica"])
    overlap = weft.overlap_grads(sharded, group=mesh["replica"], bucket_bytes=1)
    begun = []
    for step in range(3):
        sharded.zero_grad()
        sharded(batch(replica + step)).square().sum().backward()
        begun.append(len(overlap._works))
        weft.sync_grads(sharded, group=mesh["replica"])
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    overlap.remove()
    sharded.zero_grad()
    sharded(batch(replica)).square().sum().backward()
    if replica == 1:
        sharded[2].bias.grad = None  # as if it had not been used here
    weft.sync_grads(sharded, group=mesh["replica"])
    found = [(p.full_tensor().detach(), p.grad.full_tensor()) for p in sharded.parameters()]
    dist.destroy_process_group()
    return begun, found


@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_of_a_sharded_model_are_in_step(shards):
    alone = model()

    def add_gradients(replica, step=0):
        (alone(batch(replica + step)).square().sum() / 2).backward()

    for step in range(3):
        alone.zero_grad()
        for replica in range(2):
            add_gradients(replica, step)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    alone.zero_grad()
    add_gradients(0)
    share = alone[2].bias.grad.clone()
    add_gradients(1)
    alone[2].bias.grad = share
    for begun, found in processes(2 * shards, overlapping, shards):
        assert begun == [4] * 3  # all of them, before backward ended
        for parameter, (value, gradient) in zip(alone.parameters(), found, strict=True):
            torch.testing.assert_close(value, parameter.detach())
            torch.testing.assert_close(gradient, parameter.grad)


def words():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(10, 3, mode="sum", sparse=True), model())


def of_words(rank):
    return torch.tensor([[1, 2, 2], [4 + rank, 1, 9]])


def beside(most):
    """The norm, and the gradients after it was clipped, of a model whose table FSDP2 ignores."""
    with weft.init() as group:
        trained = words()
        table = trained[0]
        fully_shard(trained, ignored_params={table.weight})
        trained(of_words(group.rank)).square().sum().backward()
        with pytest.raises(weft.WeftError, match=r"modules differ: .* of a DTensor on rank 0"):
            weft.sync_grads(trained)  # FSDP2 has reduced the others
        weft.sync_grads(table)
        norm = weft.clip_grad_norm_(trained, most)
        clipped = whole_gradients(trained)
        weft.clip_grad_value_(trained, 0.01)
        return norm, clipped, whole_gradients(trained)


def whole_gradients(model):
    whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    assert whole[0].is_sparse
    return [gradient.to_dense() for gradient in whole]


def of_sums():
    """What each rank has is a summand of the gradient: no rank can limit that."""
    with weft.init():
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
        weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(RuntimeError, match="in-place operations that require placement"):
            weft.clip_grad_value_([weight], 1.0)


def test_values_of_summands_are_not_clipped():
    processes(2, of_sums)


@pytest.mark.parametrize("most", [0.5, 1e9])
def test_a_replicated_sparse_table_beside_it(most):
    alone = words()
    for rank in range(2):
        (alone(of_words(rank)).square().sum() / 2).backward()
    for parameter in alone.parameters():
        parameter.grad = parameter.grad.to_dense()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), most)
    clipped = [parameter.grad for parameter in alone.parameters()]
    for norm, by_norm, by_value in processes(2, beside, most):
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(by_norm, clipped)
        torch.testing.assert_close(by_value, [each.clamp(-0.01, 0.01) for each in clipped])
