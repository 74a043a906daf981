"""SAR's "communication routines": each name, and each sentence that can be held.

What is held elsewhere:

| claim | where |
|---|---|
| the lines that start a job, word for word | test_sar_start.py: the guide's example |
| a file of a run that was killed; a group that is there | test_sar_start.py |
| tensors are moved to the device of communication and back | test_sar.py |
| the backend mpi: started by mpirun | tests/backend |
| the name of a network interface | tests/rendezvous/test_address.py |
"""

from __future__ import annotations

import inspect
import os

import pytest
import torch
import torch.distributed as dist

import weft
from weft.bootstrap.local import launch
from weft.compat import sar
from weft.testing import spmd

SIGNATURES = {
    "initialize_comms": "_rank _world_size master_ip_address backend _comm_device",
    "rank": "",
    "world_size": "",
    "sync_params": "model",
    "gather_grads": "model",
    "nfs_ip_init": "_rank ip_file",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_relevant_methods(name):
    """By their names, at `sar` and in the package `comm`, with their arguments in order."""
    function = getattr(sar, name)
    assert getattr(sar.comm, name) is function
    given = [*inspect.signature(function).parameters]
    wanted = SIGNATURES[name].split()
    assert given[: len(wanted)] == wanted
    assert name == "initialize_comms" or len(given) == len(wanted)


@pytest.mark.parametrize("name", ["all_to_all", "all_reduce"])
def test_the_two_collective_calls(name):
    assert callable(getattr(sar.comm, name)) and getattr(sar, name) is getattr(sar.comm, name)


@spmd(1, 2, 3)
def test_all_to_all_and_all_reduce_work_on_every_backend(group):
    """First paragraph: there some backends lacked all_to_all."""
    size = sar.world_size()
    assert (sar.rank(), size) == (group.rank, group.size)
    recv = [torch.empty(2) for _ in range(size)]
    sar.comm.all_to_all(recv, [torch.tensor([float(group.rank), to]) for to in range(size)])
    assert [each.tolist() for each in recv] == [[source, group.rank] for source in range(size)]
    total = torch.tensor([group.rank + 1.0])
    sar.comm.all_reduce(total, dist.ReduceOp.SUM)
    assert total.item() == size * (size + 1) / 2


@pytest.mark.parametrize("backend", ["nccl", "ccl", "mpi"])
def test_its_three_backends_are_known(backend, port, monkeypatch):
    """Where one is not there, the error says what it lacks, and not that there is no such name."""
    monkeypatch.delenv("SAR_SOCKET_NAME", raising=False)
    try:
        sar.initialize_comms(0, 1, "127.0.0.1", backend, "cpu", master_port_number=port)
    except weft.WeftError as error:
        assert "is unknown" not in str(error) and backend in str(error)
    finally:
        weft.shutdown()


class Net(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(self.linear.weight, float(rank))
        self.register_buffer("seen", torch.tensor([rank]))


@spmd(2, 3)
def test_models(group):
    """Relevant methods: what rank 0 has; the sum of all gradients, which is not divided."""
    model = Net(group.rank + 5)
    assert sar.sync_params(model) is None
    assert model.linear.weight.tolist() == [[5.0, 5.0]] and model.seen.item() == 5
    model.linear(torch.ones(1, 2)).sum().backward()
    assert sar.gather_grads(model) is None
    assert model.linear.weight.grad.tolist() == [[float(group.size)] * 2]


def own_rank():
    """The job's numbers, which weft shall not read from the environment."""
    return int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))


def by_a_file(path):
    rank, size = own_rank()
    address = sar.nfs_ip_init(rank, path)
    assert isinstance(address, str)
    sar.initialize_comms(rank, size, address, "gloo", torch.device("cpu"))
    dist.barrier()  # torch.distributed is initialised, too
    return address, sar.rank(), sar.world_size()


def test_the_master_s_address_goes_by_the_file_system(tmp_path):
    """Third paragraph, and `nfs_ip_init`: to all workers."""
    found = launch(3, by_a_file, (str(tmp_path / "ip_file"),), env={"OMP_NUM_THREADS": "1"})
    assert [each[1:] for each in found] == [(rank, 3) for rank in range(3)]
    assert len({each[0] for each in found}) == 1


def by_one_s_own_means(port):
    rank, size = own_rank()
    sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)
    return sar.rank(), sar.world_size(), dist.get_rank()


def test_the_address_may_come_by_one_s_own_means(port):
    """Without a shared file system."""
    found = launch(2, by_one_s_own_means, (port,), env={"OMP_NUM_THREADS": "1"})
    assert found == [(0, 2, 0), (1, 2, 1)]


def test_the_socket_may_be_named(tmp_path, monkeypatch, port):
    """SAR_SOCKET_NAME; without it, one that is there is chosen."""
    monkeypatch.delenv("WEFT_INTERFACE", raising=False)
    monkeypatch.setenv("SAR_SOCKET_NAME", "lo")
    assert sar.nfs_ip_init(0, str(tmp_path / "named")) == "127.0.0.1"
    monkeypatch.setenv("SAR_SOCKET_NAME", "nosuch7")
    with pytest.raises(weft.WeftError, match="SAR_SOCKET_NAME=nosuch7 names no interface"):
        sar.initialize_comms(0, 1, "127.0.0.1", "gloo", "cpu", master_port_number=port)
    monkeypatch.delenv("SAR_SOCKET_NAME")
    assert sar.nfs_ip_init(0, str(tmp_path / "chosen"))
