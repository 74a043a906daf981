"""A rank that is lost inside `weft.init`, after all have come to the store, is named by the others.

Each case is a job of three processes. Rank 1, or rank 0, which hosts the store, stops or ends at a
certain place. The others raise within the limit; so does the rank itself, when it goes on.
"""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest
import torch.distributed as dist

from weft import WireError
from weft.base.latch import join
from weft.base.pace import patient
from weft.group.joining import connect
from weft.rendezvous.store import HELD_UP, AnsweringStore, SilentStoreError

RANK = """
import os, pathlib, signal, sys, time
import torch.distributed as dist
import weft
from weft import kernels
from weft.bootstrap import gathering, membership
from weft.group import joining
from weft.group import process_group
kernels.prepare()
folder, victim, where, how, url, limit = sys.argv[1:]

def freeze():
    print(time.monotonic(), flush=True)
    if how == "dies":
        os._exit(7)
    if how == "stops later":
        time.sleep(0.5)  # the others write meanwhile what they do before they wait for this rank
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)  # a store that is hosted here has read what they wrote while it stood still

def lost_after(module, name):
    function = getattr(module, name)
    def lost(*args, **kwargs):
        found = function(*args, **kwargs)
        freeze()
        return found
    setattr(module, name, lost)

class Store(dist.Store):  # gloo's, in which a rank is lost once it has said where it listens
    def __init__(self, store):
        super().__init__()
        self.store = store
    def set(self, key, value):
        self.store.set(key, value)
        freeze()
    def get(self, key):
        return self.store.get(key)
    def wait(self, keys, *timeout):
        self.store.wait(keys, *timeout)

def lost_in_gloo(spec, store, **kwargs):
    kept.append(Store(store))
    return real(spec, store=kept[0], **kwargs)

kept, real = [], dist.init_process_group
if os.environ["RANK"] == victim:
    if where in ("met", "gone on"):
        lost_after(membership, "meet")
    elif where == "gloo":
        dist.init_process_group = lost_in_gloo
    elif where == "made":
        lost_after(gathering, "connect_all")
    else:
        lost_after(joining, "exchange")
# the limit is of what follows, and not of how long each takes to start
folder = pathlib.Path(folder)
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < 3:
    time.sleep(0.01)
began = time.monotonic()
try:
    weft.init(rendezvous=url or None, timeout=float(limit))
    print("made")
except weft.WireError as error:
    print(f"{time.monotonic() - began:.1f} {error.culprit} {error}")
assert not dist.is_initialized()
"""


class Job:
    """Three ranks, of which one is lost at a certain place."""

    def __init__(self, programs, folder, where, how, url, port, victim):
        self.how = how
        self.limit = patient(2.0)
        folder.mkdir()
        place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        arguments = [str(folder), str(victim), where, how, url, str(self.limit)]
        ranks = [programs(RANK, *arguments, env={**env, "RANK": str(rank)}) for rank in range(3)]
        self._lost = ranks.pop(victim)
        self._others = ranks

    def said(self):
        """What the ranks say; the lost one, if it goes on once the others have ended, last."""
        said = [rank.communicate(timeout=patient(60.0))[0] for rank in self._others]
        since = float(self._lost.text().splitlines()[0])
        if self.how != "dies":
            # its deadlines are from before it stopped: later than this it is late by all of them
            time.sleep(max(0.0, since + self.limit + 2 * patient(HELD_UP) - time.monotonic()))
            os.kill(self._lost.pid, signal.SIGCONT)
        out, _ = self._lost.communicate(timeout=patient(60.0))
        return [*said, out.partition("\n")[2]]


@pytest.mark.parametrize(
    ("where", "at_tcp", "at_a_file"),
    [
        ("met", "stops", "dies"),
        ("gloo", "dies", "stops"),
        ("made", "dies", "stops"),
        ("stated", "stops", "dies"),
    ],
)
def test_a_rank_that_is_lost_after_the_meeting_is_named(
    programs, where, at_tcp, at_a_file, port, tmp_path
):
    url = f"file://{tmp_path}/meet"
    jobs = [  # which wait at the same time
        Job(programs, tmp_path / "tcp", where, at_tcp, "", port, victim=1),
        Job(programs, tmp_path / "file", where, at_a_file, url, port, victim=1),
    ]
    for job in jobs:
        *others, itself = job.said()
        for text in others:
            assert re.match(r"[\d.]+ 1 .*rank 1 (came, and then|did not|cannot|died)", text), text
            # gloo alone takes five times it
            assert float(text.partition(" ")[0]) < 2.5 * job.limit, text
        if job.how == "stops":  # it is told the truth, not to mend the network
            told = r"[\d.]+ 1 .*(too late|rank 1 (came|did not|cannot be reached))"
            assert re.match(told, itself), itself


@pytest.mark.parametrize("where", ["met", "gloo", "made", "stated"])
def test_rank_0_is_named_where_it_dies_and_hosts_the_store(programs, where, port, tmp_path):
    *others, _ = Job(programs, tmp_path / "ranks", where, "dies", "", port, victim=0).said()
    named = "is rank 0, which hosts it, gone|rank 0 (came, and then|did not|cannot|died)"
    for text in others:
        assert re.match(rf"[\d.]+ 0 .*({named})", text), text


def test_rank_0_is_named_where_it_stops_and_hosts_the_store(programs, port, tmp_path):
    jobs = [  # which wait at the same time
        Job(programs, tmp_path / where, where, how, url, port, victim=0)
        for where, how, url in [
            ("met", "stops", ""),
            ("gone on", "stops later", f"tcp://127.0.0.2:{port}"),
            ("made", "stops", f"tcp://[::1]:{port}"),
        ]
    ]
    silent = r"[\d.]+ 0 .*does not answer.: is rank 0, which hosts it, gone or stopped"
    late = r"[\d.]+ 0 rank 0: .*(this rank|rank 0) came \d+ s too late .*: was it"
    for job in jobs:
        *others, itself = job.said()
        for text in others:
            assert re.match(silent, text), text
            assert float(text.partition(" ")[0]) < 2.5 * job.limit, text
        assert re.match(late, itself), itself


HOST = """
import signal
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


@pytest.fixture
def host(programs):
    """The process that hosts a store, and the store's port."""
    program = programs(HOST)
    until = time.monotonic() + patient(60.0)
    while not program.text().endswith("\n"):
        assert time.monotonic() < until, "no store"
        time.sleep(0.01)
    return program.pid, int(program.text())


def test_a_request_of_a_store_whose_host_is_stopped_ends_at_the_deadline(monkeypatch, host):
    # else a rank that is held up blames itself
    monkeypatch.setattr("weft.group.joining.HELD_UP", 60.0)
    pid, port = host
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    answering = AnsweringStore(store, time.monotonic() + patient(60.0))
    answering.part("a").set("key", "value")
    assert answering.part("a").get("key") == b"value"
    assert answering.check(["a/key"]) and answering.add("number", 2) == 2
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + patient(60.0)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until, "it does not stop"
        time.sleep(0.01)
    silent = AnsweringStore(store, time.monotonic() + 0.2)
    with pytest.raises(SilentStoreError, match=f"127.0.0.1 port {port} does not answer"):
        silent.check(["key"])
    with pytest.raises(SilentStoreError):  # at once, by the same object
        silent.get("key")
    # whose rank 0 need not host it
    with pytest.raises(WireError, match="is the process that hosts it gone or stopped") as caught:
        connect(store, 0, 2, 0.2, name="aside")
    assert caught.value.culprit is None


@pytest.mark.parametrize("wait", [1, 2])  # that for the deadline, and one after it
def test_who_stood_still_in_a_wait_hears_the_answer(monkeypatch, host, wait):
    pid, port = host
    answering = AnsweringStore(dist.TCPStore("127.0.0.1", port, is_master=False), 0.0)
    waits = []

    def still_in_one(thread, seconds):
        waits.append(thread)
        if len(waits) <= wait:
            if len(waits) == wait:
                os.kill(pid, signal.SIGCONT)
            return False
        return join(thread, patient(60.0))

    monkeypatch.setattr("weft.base.within.join", still_in_one)
    os.kill(pid, signal.SIGSTOP)
    assert answering.check(["key"]) is False


FOUND_SILENT = """
import atexit, os, signal, sys, time
import torch.distributed as dist
from weft.rendezvous.store import AnsweringStore, SilentStoreError

port, host = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
os.kill(host, signal.SIGSTOP)
try:
    while True:
        AnsweringStore(store, time.monotonic() + 0.2).check(["key"])
except SilentStoreError:
    atexit.register(os.kill, host, signal.SIGKILL)
"""


def test_a_process_ends_well_while_the_silent_host_of_its_store_is_killed(programs, host):
    pid, port = host
    finder = programs(FOUND_SILENT, str(port), str(pid), whole=True)
    said = finder.communicate()
    assert finder.returncode == 0, said
