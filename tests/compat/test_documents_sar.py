"""SAR's "communication routines": each name, and each sentence that can be held.

What is held elsewhere:

| claim | where |
|---|---|
| the lines that start a job, word for word; the file | test_sar_start.py: the guide's example |
| an address by one's own means | test_sar_start.py: a port of one's own |
| `all_to_all` and `all_reduce` on gloo, too; models | test_sar.py |
| a file of a run that was killed; a group that is there | test_sar_start.py |
| tensors are moved to the device of communication and back | test_sar.py |
| the backend mpi: started by mpirun | tests/backend |
| the name of a network interface | tests/rendezvous/test_address.py |
"""

from __future__ import annotations

import inspect

import pytest

import weft
from weft.compat import sar

SIGNATURES = {
    "all_to_all": "recv_tensors send_tensors move_to_comm_device",
    "all_reduce": "red_tensor op move_to_comm_device",
    "initialize_comms": "_rank _world_size master_ip_address backend _comm_device",
    "rank": "",
    "world_size": "",
    "sync_params": "model",
    "gather_grads": "model",
    "nfs_ip_init": "_rank ip_file",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_relevant_methods_and_the_two_collective_calls(name):
    """By their names, at `sar` and in the package `comm`, with their arguments in order."""
    function = getattr(sar, name)
    assert getattr(sar.comm, name) is function
    given = [*inspect.signature(function).parameters]
    wanted = SIGNATURES[name].split()
    assert given[: len(wanted)] == wanted
    assert name == "initialize_comms" or len(given) == len(wanted)


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
