"""SAR's start-up on real processes: the guide's example, files of earlier runs, adopted groups."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.bootstrap.local import launch
from weft.compat import sar
from weft.rendezvous import places

QUICK = {"OMP_NUM_THREADS": "1"}
GUIDE = Path(__file__).resolve().parents[2] / "docs/coming-from-sar.md"
EXAMPLE = re.search(r"```python\n(if backend_name.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    weft.shutdown()
    assert not dist.is_initialized()
    sar.comm._ports.clear()


def total():
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    sar.comm.all_reduce(tensor, torch.distributed.ReduceOp.SUM)
    return tensor.item()


def example(code, path):
    """Run the guide's lines, with what a program has at that point; RANK is not told to weft."""
    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if rank:
        time.sleep(0.05)  # so that one waits for the file, or finds the old one
    space = {"sar": sar, "torch": torch, "rank": rank, "world_size": size}
    space |= {"backend_name": "gloo", "path_to_ip_file": path}
    exec(code, space)
    assert "RANK" not in os.environ
    return sar.rank(), sar.world_size(), total(), space["master_ip_address"]


def test_the_guide_s_example_runs_as_it_stands(tmp_path):
    assert EXAMPLE is not None
    path = tmp_path / "ip_file"
    found = launch(3, example, (EXAMPLE[1], str(path)), env=QUICK)
    assert [each[:3] for each in found] == [(rank, 3, 18) for rank in range(3)]
    assert len({each[3] for each in found}) == 1
    assert not path.exists()  # all have come


def killed(path):
    sar.nfs_ip_init(0, path)
    mode = os.stat(path).st_mode
    return stat.S_IMODE(mode), os.kill(os.getpid(), 9)


def test_a_file_that_a_killed_run_has_left_is_not_believed(tmp_path):
    path = tmp_path / "ip_file"
    with pytest.raises(weft.WireError, match="rank 0"):
        launch(1, killed, (str(path),), env=QUICK)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = launch(2, example, (EXAMPLE[1], str(path)), env=QUICK)
    assert [each[:3] for each in found] == [(rank, 2, 6) for rank in range(2)]


def at_a_port(port):
    """An address and a port of the program's own, which weft does not read in the environment."""
    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)
    return sar.rank(), sar.world_size(), total()


def test_a_port_of_one_s_own(port):
    assert launch(2, at_a_port, (port,), env=QUICK) == [(0, 2, 6), (1, 2, 6)]


def adopting():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    try:
        with pytest.raises(weft.WeftError, match=f"with rank {rank} of 2, and rank 0 of 1 was"):
            sar.initialize_comms(0, 1, "192.0.2.7", "gloo")
        sar.initialize_comms(rank, size, "192.0.2.7", "gloo")
        sar.initialize_comms(rank, size, "192.0.2.7", "gloo")
        found = total()
        weft.shutdown()
        assert dist.is_initialized()
        return found
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_there_is_adopted():
    assert launch(2, adopting, env=QUICK) == [6] * 2


def test_what_is_wrong_is_said(port):
    with pytest.raises(weft.WeftError, match="backend 'gloop' is unknown: use one of gloo"):
        sar.initialize_comms(0, 1, "127.0.0.1", "gloop", master_port_number=port)
    with pytest.raises(weft.WeftError, match="nccl"):
        sar.initialize_comms(0, 1, "127.0.0.1", "nccl", master_port_number=port)
    with pytest.raises(weft.WeftError, match="no group of ranks"):
        sar.rank()


def test_a_file_that_is_none_of_ours_is_refused(tmp_path):
    path = tmp_path / "ip_file"
    path.write_text("10.0.0.1\n")
    for rank in (0, 1):
        with pytest.raises(weft.WeftError, match="is not a file of a rendezvous"):
            sar.nfs_ip_init(rank, str(path))
    assert path.read_text() == "10.0.0.1\n"


def test_a_port_at_which_this_process_had_a_store_before(tmp_path, port, monkeypatch):
    """The system may choose the same for another one."""
    at_any_port = places.listener_at
    monkeypatch.setattr(places, "listener_at", lambda address, _: at_any_port(address, port))
    places.host(places.free_address())  # and it is gone
    ip = sar.nfs_ip_init(0, str(tmp_path / "ip_file"))
    sar.initialize_comms(0, 1, ip, "gloo")
    assert sar.comm._ports[ip] == port
