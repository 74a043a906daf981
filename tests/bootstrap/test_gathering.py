"""A rank that is lost inside `weft.init`, after all have come to the store, is named by the others.

Each case is a job of three processes. Rank 1, or rank 0, which hosts the store, stops or ends at a
certain place. The others raise within the limit; so does the rank itself, when it goes on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from weft.testing.pace import patient
from weft.wire.store import AnsweringStore, SilentStoreError

LIMIT = patient(4.0)

RANK = """
import os, signal, sys, time
import torch.distributed as dist
import weft
from weft import kernels
from weft.bootstrap import gathering, membership
from weft.group import control, process_group
kernels.prepare()
victim, where, how, url, limit = sys.argv[1:]

def freeze():
    print("lost", flush=True)
    if how == "dies":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGSTOP)

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
    if where == "met":
        lost_after(membership, "meet")
    elif where == "gloo":
        dist.init_process_group = lost_in_gloo
    elif where == "made":
        lost_after(gathering, "connect_all")
    else:
        lost_after(control, "exchange")
began = time.monotonic()
try:
    weft.init(rendezvous=url or None, timeout=float(limit))
    print("made")
except weft.WireError as error:
    print(f"{time.monotonic() - began:.1f} {error.culprit} {error}")
assert not dist.is_initialized()
"""


def job(where: str, how: str, url: str, port: int, victim: int = 1) -> list[str]:
    """What the ranks of a job say; the lost one, if it goes on once the others have ended, last."""
    env = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env["OMP_NUM_THREADS"] = "1"
    line = [sys.executable, "-c", RANK, str(victim), where, how, url, str(LIMIT)]
    ranks = [
        subprocess.Popen(line, env={**env, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE)
        for rank in range(3)
    ]
    lost = ranks.pop(victim)
    try:
        said = [each.communicate(timeout=150)[0] for each in ranks]
        lost.send_signal(signal.SIGCONT)
        said.append(lost.communicate(timeout=60)[0].removeprefix("lost\n"))
    finally:
        for each in (*ranks, lost):
            each.kill()
            each.wait()
    return said


@pytest.mark.parametrize("how", ["stops", "dies"])
@pytest.mark.parametrize("where", ["met", "gloo", "made", "stated"])
@pytest.mark.parametrize("place", ["tcp", "file"])
def test_a_rank_that_is_lost_after_the_meeting_is_named(
    place: str, where: str, how: str, port: int, tmp_path: Path
) -> None:
    *others, itself = job(where, how, f"file://{tmp_path}/meet" if place == "file" else "", port)
    for text in others:
        took, culprit, error = text.split(" ", 2)
        assert culprit == "1" and re.search("rank 1 (came, and then|did not|cannot|died)", error)
        # gloo alone takes five times the limit
        assert float(took) < 2.5 * LIMIT, text
    if how == "stops":  # it is told the truth, not to mend the network
        assert itself.split(" ")[1] == "1"
        assert re.search("too late|rank 1 (came|did not|cannot be reached)", itself), itself


@pytest.mark.parametrize("where", ["met", "made"])
def test_rank_0_is_named_where_it_stops_and_hosts_the_store(where: str, port: int) -> None:
    *others, itself = job(where, "stops", "", port, victim=0)
    for text in others:
        assert re.match(r"[\d.]+ 0 .*does not answer: is rank 0, which hosts it, stopped", text)
        assert float(text.partition(" ")[0]) < 2.5 * LIMIT, text
    assert re.match(r"[\d.]+ 0 rank 0: .*rank 0 came \d+ s too late .*: was it stopped", itself)


HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_request_of_a_store_whose_host_is_stopped_ends_at_the_deadline() -> None:
    line = [sys.executable, "-c", HOST]
    host = subprocess.Popen(line, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        port = int(host.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        answering = AnsweringStore(store, time.monotonic() + patient(60.0))
        answering.part("a").set("key", "value")
        assert answering.part("a").get("key") == b"value"
        assert answering.check(["a/key"]) and answering.add("number", 2) == 2
        host.send_signal(signal.SIGSTOP)
        silent = AnsweringStore(store, time.monotonic() + 0.2)
        with pytest.raises(SilentStoreError, match=f"127.0.0.1 port {port} does not answer"):
            silent.check(["key"])
        with pytest.raises(SilentStoreError):  # at once, by the same object
            silent.get("key")
    finally:
        host.kill()
        host.communicate()
