"""`weft.bootstrap.meeting`: where the ranks of each launch meet."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import pytest

from weft.bootstrap import addresses, meeting
from weft.bootstrap.launchers import Launch
from weft.bootstrap.meeting import File, Mpi, Ports, Tcp, place
from weft.bootstrap.store import listener
from weft.errors import WeftError, WireError

TWO = Launch("environment", 1, 2, 1, 2)
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
ONE_HOST = Launch("mpirun", 1, 2, 1, 2, "prterun-vm-1@1")
SRUN = Launch("srun", 1, 2, 0, 1, "12.0", "node08")


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("launch", "url", "env", "expected"),
    [
        (TWO, None, MASTER, Tcp("node1", 29500, False, "node1:29500")),
        (TWO, "env://", MASTER, Tcp("node1", 29500, False, "node1:29500")),
        (SRUN, None, MASTER, Tcp("node1", 29500, False, "node1:29500")),
        (
            TWO,
            None,
            {**MASTER, "MASTER_ADDR": "fd00::7"},
            Tcp("fd00::7", 29500, False, "[fd00::7]:29500"),
        ),
        (TWO, "tcp://[fd00::7]:1", {}, Tcp("fd00::7", 1, False, "tcp://[fd00::7]:1")),
        (SRUN, "file:///nfs/run%207", MASTER, File(Path("/nfs/run 7"))),
        (TWO, "file:///nfs/", {}, File(Path("/nfs/weft-meeting"))),
        (TWO, f"file://{Path.cwd()}", {}, File(Path.cwd() / "weft-meeting")),
        (SRUN, None, {}, Ports("node08", "12.0")),
        (SRUN, None, {"MASTER_ADDR": "node1"}, Ports("node1", "12.0")),
        (Launch("mpirun", 1, 2, 0, 1, "x"), None, {}, Mpi()),
        (Launch("mpirun", 0, 1, 0, 1, "x"), "file:///nfs/run7", {}, None),
        (Launch("alone", 0, 1, 0, 1), None, MASTER, None),
    ],
)
def test_places(launch: Launch, url: str | None, env: dict[str, str], expected: object) -> None:
    assert place(launch, url, env) == expected


def test_two_jobs_of_a_launcher_that_names_them_share_a_folder() -> None:
    one, other = (
        [place(Launch("srun", rank, 2, 0, 1, job, "node08"), "file:///nfs/", {}) for rank in (0, 1)]
        for job in ("12.0", "13.0")
    )
    assert one[0] == one[1] != other[0] == other[1]
    assert place(ONE_HOST, "file:///nfs/", {}) not in one
    # MPICH's mpirun has a name of its own on each host
    unnamed = [Launch("mpirun", rank, 2, 0, 1, f"process-{rank}") for rank in (0, 1)]
    found = {place(each, "file:///nfs/", {}) for each in unnamed}
    assert found == {File(Path("/nfs/weft-meeting"))}


def test_torchrun_hosts_the_store_itself() -> None:
    found = place(TWO, None, {**MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert isinstance(found, Tcp) and found.agent


@pytest.mark.parametrize("launch", [ONE_HOST, Launch("srun", 1, 2, 1, 2, "12.0", "node08")])
def test_ranks_of_one_host_meet_in_a_private_folder(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / f"weft-{os.getuid()}"
    assert place(launch, None, {}) == File(folder / launch.job)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    place(launch, None, {})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(WeftError, match="is not this user's folder"):
        place(launch, None, {})


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("tcp://node1", "has no host and port: write tcp://host:port"),
        ("tcp://:1", "has no host and port"),
        ("tcp://node1:0", "has no host and port"),
        ("tcp://node1:99999", "has no host and port"),
        ("file://run7", "is no absolute path"),
        ("file:///", "is no absolute path"),
        ("env://?rank=1", "is none of env://, tcp://host:port and file:///path"),
    ],
)
def test_urls_that_are_none(url: str, complaint: str) -> None:
    with pytest.raises(WeftError, match=complaint):
        place(TWO, url, {})


def test_a_port_that_is_none() -> None:
    with pytest.raises(WeftError, match="MASTER_PORT='x', which is no port"):
        place(TWO, None, {**MASTER, "MASTER_PORT": "x"})


def test_the_ports_follow_from_the_job() -> None:
    ports = Ports("node08", "12.0").ports()
    assert ports == Ports("elsewhere", "12.0").ports() != Ports("node08", "12.1").ports()
    assert len(set(ports)) == len(ports) > 10
    assert all(10000 <= port < 32768 for port in ports)


def test_a_rank_finds_the_port_that_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_kept", {})
    where = Ports("127.0.0.1", f"test {time.time()}")
    with listener("", where.ports()[0]):  # another program's, which answers nothing
        monkeypatch.setattr(meeting, "_SHORT", 0.2)
        deadline = time.monotonic() + 20
        with meeting.at(where, Launch("srun", 0, 2, 0, 1), deadline) as (host, times):
            assert host.hosts and times == 1
            guest = where.meet(Launch("srun", 1, 2, 0, 1), deadline)
            host.store.set("a", "b")
            assert guest.store.get("a") == b"b" and not guest.hosts
    with pytest.raises(
        WireError, match=r"rank 1: rank 0 did not answer at 127.0.0.1, ports .* job"
    ):
        where.meet(Launch("srun", 1, 2, 0, 1), time.monotonic() + 0.1)


def test_a_name_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(WireError, match=r"rank 1: .* at node7, .* that name \(Name or service"):
        Ports("node7", "12.0").meet(Launch("srun", 1, 2, 1, 2), time.monotonic() + 0.1)


def test_rank_0_needs_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_SHORT", 0.1)
    with listener("", 0) as sock:
        port = sock.getsockname()[1]
        where = place(TWO, f"tcp://127.0.0.1:{port}", {})
        assert where is not None
        with pytest.raises(WeftError, match=f"cannot host .*:{port}: another program listens the"):
            where.meet(Launch("environment", 0, 2, 0, 2), time.monotonic() + 1)
        with pytest.raises(WireError, match=r"rank 1: rank 0 was not there at .*it is no store"):
            where.meet(TWO, time.monotonic() + 0.1)


@pytest.mark.parametrize("where", [Ports("127.0.0.1", "12.0"), File(Path("run7")), Mpi()])
def test_an_interface_that_is_not_there_keeps_nobody_from_meeting(
    where: Ports | File | Mpi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that all, on whatever host, hear of it in the roll call."""
    said: list[str] = []

    class World:
        def broadcast(self, text: str, timeout: float) -> str:
            said.append(text)
            return said[0]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meeting, "_mpi_world", lambda launch, deadline: World())
    monkeypatch.setenv("WEFT_INTERFACE", "nothing7")
    host = where.meet(Launch("srun", 0, 2, 0, 2), time.monotonic() + 5)
    guest = where.meet(Launch("srun", 1, 2, 0, 2), time.monotonic() + 5)
    host.store.set("there", "yes")
    assert guest.store.get("there") == b"yes"
    host.close()


def test_rank_0_may_be_behind_an_address_that_is_not_its_host_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a service of Kubernetes: whoever calls it is led to rank 0."""
    monkeypatch.setattr(addresses, "is_here", lambda host: False)
    with listener("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    where = Tcp("127.0.0.1", port, False, "there")
    host = where.meet(Launch("environment", 0, 2, 0, 2), time.monotonic() + 5)
    guest = where.meet(TWO, time.monotonic() + 5)
    host.store.set("there", "yes")
    assert guest.store.get("there") == b"yes"


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_rank_0_that_is_not_where_it_should_be_says_so(
    host: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    where = Tcp(host, 29500, False, "there")
    began = time.monotonic()
    with pytest.raises(WireError, match=rf"rank 0 is on .*, which is not {host} .* lead here with"):
        where.meet(Launch("environment", 0, 2, 0, 2), began + 0.5)
    assert time.monotonic() - began < 5  # torch and the others' ears would take longer
    assert capfd.readouterr().err == ""  # none of torch's stack traces
    assert [record.message for record in caplog.records if "waiting for that" in record.message]
