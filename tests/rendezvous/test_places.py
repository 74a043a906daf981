"""Where the ranks of each launch meet, which files are believed, and what is said of others."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from weft.base.errors import AbsentError, WeftError, WireError
from weft.base.pace import patient
from weft.bootstrap import membership
from weft.bootstrap.membership import Member, check
from weft.rendezvous import machine
from weft.rendezvous import places as rendezvous
from weft.rendezvous.launchers import Launch
from weft.rendezvous.places import File, Mpi, Tcp, place
from weft.rendezvous.store import AnsweringStore, exchange

KEY = struct.pack("=I", 9) + b"refcount/"  # of the first record of torch's file
COUNT = KEY + struct.pack("=I", 1)  # before its value, of one byte
ZERO, ONE = (Launch("environment", rank, 2, rank, 2) for rank in range(2))
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
ONE_HOST = Launch("mpirun", 1, 2, 1, 2, "prterun-vm-1@1", known=True)
SRUN = Launch("srun", 1, 2, 0, 1, "12.0", "node08", known=True)


@pytest.fixture(autouse=True)
def private(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"weft-{os.getuid()}"


def soon(seconds):
    return time.monotonic() + seconds


# Which place it is.


@pytest.mark.parametrize(
    ("launch", "url", "env", "expected"),
    [
        (ONE, None, MASTER, Tcp("node1", 29500, "node1:29500")),
        (ONE, "env://", MASTER, Tcp("node1", 29500, "node1:29500")),
        (SRUN, None, MASTER, Tcp("node1", 29500, "node1:29500")),
        (
            ONE,
            None,
            {**MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Tcp("node1", 29500, "node1:29500", agent=True),
        ),
        (ONE, None, {**MASTER, "MASTER_ADDR": "fd00::7"}, Tcp("fd00::7", 29500, "[fd00::7]:29500")),
        (ONE, "tcp://[fd00::7]:1", {}, Tcp("fd00::7", 1, "tcp://[fd00::7]:1")),
        (SRUN, "file:///nfs/run%207", MASTER, File(Path("/nfs/run 7"))),
        (ONE, "file:///nfs/", {}, File(Path("/nfs/weft-rendezvous"))),
        (ONE, f"file://{Path.cwd()}", {}, File(Path.cwd() / "weft-rendezvous")),
        (Launch("mpirun", 1, 2, 0, 1, "x"), None, {}, Mpi()),
        (Launch("a new one", 0, 1, 0, 1, "x"), "file:///nfs/run7", {}, None),
        (Launch("alone", 0, 1, 0, 1), None, MASTER, None),
    ],
)
def test_places(launch, url, env, expected):
    assert place(launch, url, env) == expected


def test_two_jobs_of_a_launcher_that_names_them_share_a_folder():
    one, other = (
        [
            place(Launch("srun", rank, 2, 0, 1, job, "node08", known=True), "file:///nfs/", {})
            for rank in (0, 1)
        ]
        for job in ("12.0", "13.0")
    )
    assert one[0] == one[1] != other[0] == other[1]
    assert place(ONE_HOST, "file:///nfs/", {}) not in one
    # MPICH's mpirun has a name of its own on each host
    unnamed = [Launch("mpirun", rank, 2, 0, 1, f"process-{rank}") for rank in (0, 1)]
    found = {place(each, "file:///nfs/", {}) for each in unnamed}
    assert found == {File(Path("/nfs/weft-rendezvous"))}


def test_the_port_of_a_slurm_job_follows_from_its_name():
    found = [
        place(Launch("srun", rank, 2, 0, 1, job, "node08", known=True), None, env)
        for rank, job, env in (
            (0, "12.0", {}),
            (1, "12.0", {}),
            (0, "12.1", {}),
            (0, "12.0", {"MASTER_ADDR": "node1"}),
        )
    ]
    assert found[0] == found[1]
    assert all(isinstance(each, Tcp) and 10000 <= each.port < 32768 for each in found)
    assert [each.host for each in found] == ["node08"] * 3 + ["node1"]
    assert found[0].port == found[3].port != found[2].port
    assert re.fullmatch(r"node08:\d+, as job 12\.0", found[0].where)


def test_names_that_are_no_text_name_hosts_and_jobs(port, tmp_path, monkeypatch):
    """As the environment hands on bytes that are not UTF-8."""
    monkeypatch.setenv("WEFT_HOST", "caf\udce9")
    assert re.fullmatch("[0-9a-f]{32}", machine.own_host())
    job = Launch("srun", 0, 2, 0, 1, "caf\udce9", "node08", known=True)
    in_folder = place(job, f"file://{tmp_path}/", {})
    assert isinstance(in_folder, File) and in_folder.path.parent == tmp_path
    named = place(job, None, {})
    assert isinstance(named, Tcp)
    assert Tcp("127.0.0.1", port, "there", space=named.space).open(ZERO, soon(5)).hosts


@pytest.mark.parametrize("launch", [ONE_HOST, Launch("a new one", 1, 2, 1, 2, "12.0")])
def test_ranks_of_one_host_meet_in_a_private_folder(launch, private):
    assert place(launch, None, {}) == File(private / launch.job)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o777)
    place(launch, None, {})
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.rmdir()
    private.symlink_to(private.parent)
    with pytest.raises(WeftError, match="is not this user's folder"):
        place(launch, None, {})


@pytest.mark.parametrize(
    ("url", "env", "complaint"),
    [
        ("tcp://node1", {}, "has no host and port: write tcp://host:port"),
        ("tcp://:1", {}, "has no host and port"),
        ("tcp://node1:0", {}, "has no host and port"),
        ("tcp://node1:99999", {}, "has no host and port"),
        ("file://run7", {}, "is no absolute path"),
        ("file:///", {}, "is no absolute path"),
        ("env://?rank=1", {}, "is none of env://, tcp://host:port and file:///path"),
        (None, {}, "has rank and world size but no MASTER_ADDR and no MASTER_PORT: start with"),
        (None, {"MASTER_ADDR": "node1"}, "but no MASTER_PORT: start with torchrun, or set what"),
        (None, {**MASTER, "MASTER_PORT": "x"}, "MASTER_PORT='x', which is no port"),
        (None, {**MASTER, "MASTER_ADDR": "a..b"}, "at 'a..b:29500', and 'a..b' is no name of a"),
        (None, {**MASTER, "MASTER_ADDR": "\udcff"}, r"'\\udcff' is no name of a host"),
        (f"tcp://{'n' * 64}:1", {}, "is no name of a host: pass that of rank 0's, whose parts"),
    ],
)
def test_places_that_are_none(url, env, complaint):
    with pytest.raises(WeftError, match=complaint):
        place(ONE, url, env)


# At a host and a port.


def test_jobs_that_share_a_port_do_not_share_keys(port):
    first, second = (Tcp("127.0.0.1", port, "there", space=job) for job in ("12.0", "13.0"))
    host = first.open(ZERO, soon(5))
    host.store.set("there", "yes")
    assert first.open(ONE, soon(5)).store.get("there") == b"yes"
    assert not second.open(ONE, soon(5)).store.check(["there"])
    assert host.hosts


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has one address")
def test_a_store_is_its_own_though_another_has_its_port_at_another_address(monkeypatch):
    """In a process with many stores the system does choose a port twice."""
    first = rendezvous.host("127.0.0.1")
    listener = rendezvous.listener_at
    monkeypatch.setattr(rendezvous, "listener_at", lambda address, _: listener(address, first.port))
    made = []
    hosts = threading.Thread(target=lambda: made.append(rendezvous.host("127.0.0.2")), daemon=True)
    hosts.start()
    hosts.join(patient(10.0))
    (second,) = made
    assert second.port == first.port
    second.set("there", "yes")
    assert not first.check(["there"])


def test_a_connection_that_comes_back_leads_to_no_store(port, monkeypatch):
    """As a port does that the system chose for the end that connects, where nobody listens."""

    def to_itself(address, timeout):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.connect(address)
        return sock

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(RuntimeError, match=f"127.0.0.1 port {port}: the connection came back"):
        rendezvous.connect("127.0.0.1", port, 0.1)


def test_rank_0_may_be_behind_an_address_that_is_not_its_host_s(port, monkeypatch):
    """As that of a service of Kubernetes: whoever calls it is led to rank 0."""
    monkeypatch.setattr(rendezvous, "is_here", lambda host: False)
    where = Tcp("127.0.0.1", port, "there")
    host = where.open(ZERO, soon(5))
    guest = where.open(ONE, soon(5))
    host.store.set("there", "yes")
    assert guest.store.get("there") == b"yes"


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_rank_0_that_is_not_where_it_should_be_says_so(host, port, capfd, caplog):
    meeting = Tcp(host, port, f"{host}:29500").open(ZERO, soon(5))
    assert f"{host}:29500, which has to lead to rank 0 on " in meeting.where
    assert [each.message for each in caplog.records] == [f"rank 0 waits at {meeting.where}"]
    assert capfd.readouterr().err == ""  # none of torch's stack traces


def test_a_name_that_nobody_knows_is_named():
    with pytest.raises(WireError, match=r"rank 1: rank 0 was not there .*no-such-host.* not known"):
        Tcp("no-such-host.invalid", 29500, "there").open(ONE, soon(0.1))


def test_an_interface_that_is_not_there_keeps_nobody_from_meeting(monkeypatch):
    """So that all, on whatever host, hear of it in the membership check."""
    from weft.rendezvous import mpi

    said = []

    def broadcast(world, text, timeout):
        said.append(text)
        return said[0]

    monkeypatch.setattr(mpi, "world", lambda: SimpleNamespace(rank=len(said), size=2))
    monkeypatch.setattr(mpi, "broadcast", broadcast)
    monkeypatch.setenv("WEFT_INTERFACE", "nothing7")
    host, guest = (Mpi().open(launch, soon(5)) for launch in (ZERO, ONE))
    host.store.set("there", "yes")
    assert guest.store.get("there") == b"yes"


# At a file.


def come(path, rank, seconds, size=2):
    """What a process at this file hears: the backend, or its error."""
    mine = Member(rank, size, host="node1", pid=100 + rank)
    try:
        meeting = File(path).open(Launch("environment", rank, size, rank, size), soon(seconds))
        return check(meeting, mine, soon(seconds))[0].backend
    except (WeftError, WireError) as error:
        return f"{type(error).__name__}: {error}"


def together(*comers):
    with ThreadPoolExecutor(len(comers)) as pool:
        return list(pool.map(lambda each: each(), comers))


def crashed(path, decision=None):
    """What rank 0 of an earlier run has left, of which rank 1 had come."""
    meeting = File(path.with_name("used")).open(ZERO, soon(5))
    membership.begin_round(AnsweringStore(meeting.store, soon(9.0)))
    store = dist.PrefixStore("weft/round1", meeting.store)
    store.add("arrived", 2)
    for number in (1, 2):
        store.set(f"member{number}", json.dumps({"rank": number - 1, "size": 2, "able": ["gloo"]}))
    store.add("judge", 1)
    if decision is not None:
        store.set("decision", json.dumps(decision))
    shutil.copy(path.with_name("used"), path)  # to which nobody says goodbye


def test_the_file_is_for_this_user_alone_and_goes_with_the_last_that_uses_it(tmp_path):
    path, old = tmp_path / "run7", os.umask(0)
    try:
        meeting = File(path).open(ZERO, soon(5))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    guest = File(path).open(ONE, soon(5))
    meeting.store.set("a", "b")
    del meeting
    assert guest.store.get("a") == b"b"
    del guest
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "decision", [None, {"backend": "old", "came": 2}, {"error": "of old", "came": 2}]
)
def test_what_a_crashed_run_has_left_is_waited_past(decision, tmp_path):
    path = tmp_path / "run7"
    crashed(path, decision)

    def late():
        time.sleep(0.5)
        return come(path, 0, 20)

    assert together(lambda: come(path, 1, 20), late) == ["gloo", "gloo"]


def test_rank_0_of_a_crashed_run_does_not_count(tmp_path):
    crashed(tmp_path / "run7")
    heard = come(tmp_path / "run7", 1, 0.2)
    text = f"WireError: rank 0 came to file://{tmp_path}/run7, and did not answer in time: is it "
    assert heard.startswith(text)


def test_one_too_many_hears_that_the_others_may_be_complete(tmp_path):
    path = tmp_path / "run7"
    crashed(path, {"backend": "gloo", "came": 2})  # as far as a third process can tell
    assert come(path, 1, 0.2).endswith("complete without it: was one started twice?")


def test_two_processes_that_are_rank_0_hear_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "GRACE", 1.0)
    monkeypatch.setattr(membership, "LINGER", 30.0)  # though the third of them is held up
    path = tmp_path / "run7"
    heard = together(*(lambda r=rank: come(path, r, 30, size=3) for rank in (0, 0, 1)))
    assert len(set(heard)) == 1
    assert heard[0].startswith("WeftError: rank 0 of 3 was started twice: on node1 (process 100)")
    assert not path.exists()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.write_text("{"), "is not a file of a rendezvous"),
        (lambda path: path.write_text("10.0.0.1\n"), "is not a file of a rendezvous"),
        (lambda path: path.write_bytes(COUNT + b"x"), "is not a file of a rendezvous"),
        (lambda path: path.chmod(0o622), "may be written by others .mode 622."),
        (
            lambda path: (path.rename(f"{path}x"), path.symlink_to(f"{path}x")),
            "is no regular file: remove it",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "is no regular file"),
    ],
)
@pytest.mark.parametrize("launch", [ZERO, ONE])
def test_what_is_not_believed(launch, tmp_path, spoil, complaint):
    path = tmp_path / "run7"
    crashed(path)
    spoil(path)
    with pytest.raises(WeftError, match=complaint):
        File(path).open(launch, soon(0.3))


WRITER = """
import fcntl, sys, time
with open(sys.argv[1], "r+b", buffering=0) as file:
    whole = file.read()
    fcntl.flock(file, fcntl.LOCK_EX)  # as torch does
    file.truncate(4)
    print("begun", flush=True)
    time.sleep(0.5)
    file.seek(4)
    file.write(whole[4:])
"""


def test_a_file_that_another_rank_is_writing_is_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "WRITTEN", 30.0)  # though the writer is held up
    path = tmp_path / "run7"
    crashed(path)
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"begun\n"
        assert File(path).open(ONE, soon(30)).lasts


@pytest.mark.parametrize("launch", [ZERO, ONE])
@pytest.mark.parametrize(
    "left",
    [
        pytest.param(KEY[:2], id="inside the first length"),
        pytest.param(KEY[:7], id="inside the first key"),
        pytest.param(KEY, id="before the value's length"),
        pytest.param(COUNT[:-1], id="inside the value's length"),
        pytest.param(COUNT, id="before the value"),
        pytest.param(KEY + struct.pack("=I", 2**31 - 1) + b"xx", id="of 2 GiB"),
        pytest.param(KEY + struct.pack("=i", -5) + b"xx", id="of a negative length"),
        pytest.param(COUNT + b"2" + KEY, id="inside the second record"),
    ],
)
def test_a_record_that_a_killed_process_left_cut_is_told(launch, left, tmp_path, monkeypatch):
    path = tmp_path / "run7"
    path.write_bytes(left)
    path.chmod(0o600)
    monkeypatch.setattr(dist, "FileStore", lambda *_: pytest.fail("torch would read for ever"))
    with pytest.raises(WeftError, match=f"^{path} ends inside a record, .*: remove it"):
        File(path).open(launch, soon(0.3))


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "run7"
    crashed(path)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(WeftError, match=f"belongs to user {me} and this is user {me + 1}"):
        File(path).open(ONE, soon(0.3))


@pytest.mark.parametrize("launch", [ZERO, ONE])
def test_a_folder_that_is_not_there_is_a_mistake(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "SETTLED", 0.2)
    with pytest.raises(WeftError, match=r"rank [01]: .*/a/run7 cannot .*no folder .*/a on this"):
        File(tmp_path / "a" / "run7").open(launch, soon(50))


def test_a_folder_may_come_a_moment_later(tmp_path):
    late = threading.Timer(0.3, (tmp_path / "a").mkdir)
    late.start()
    assert File(tmp_path / "a" / "run7").open(ONE, soon(50)).where == f"file://{tmp_path}/a/run7"
    late.join()


def test_who_waits_at_a_file_writes_nothing_meanwhile(tmp_path):
    lengths = []
    for seconds in (0.1, 0.6):
        path = tmp_path / str(seconds)
        store = dist.FileStore(str(path), 2)
        with pytest.raises(AbsentError, match="rank 1 did not come"):
            exchange(store, "place", 7, 0, 2, seconds, "did not come")
        lengths.append(path.stat().st_size)
    assert lengths[0] == lengths[1]
