"""Who is no rank of the job is refused and named, and the job goes on; real processes."""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import struct
import time
from contextlib import ExitStack

import torch.distributed as dist

import weft
from weft.base.pace import patient

# A rank that says, before it joins the others, where it listens and what they must know; the second
# time rank 1 comes only when the strangers have been.
RANK = """
import json, logging, os, pathlib, resource, sys, time, psutil, torch, weft
from weft.wire.tcp.listener import Listener

logging.basicConfig(format="%(message)s")
folder, connect, turns = pathlib.Path(sys.argv[1]), Listener.connect, []

def awaited(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def told(self, rank, *how):
    turns.append(rank)
    there = psutil.Process().net_connections("inet")
    there = [each.laddr.ip for each in there if each.status == "LISTEN"]
    said = [self.endpoint.port, self.endpoint.token, there]
    (folder / "part").with_suffix(f".{rank}").write_text(json.dumps(said))
    (folder / "part").with_suffix(f".{rank}").rename(folder / f"wire{len(turns)}.{rank}")
    if rank == 1 and len(turns) == 2:
        awaited("strangers")
    return connect(self, rank, *how)

Listener.connect = told
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
try:
    weft.init(timeout=60)
    weft.shutdown()
    with weft.init(timeout=60):
        (folder / "met").touch()
        awaited("other job")
        print(weft.all_reduce(torch.ones(1)).item())
except weft.Error as error:
    print(error)
"""


def awaited(path):
    until = time.monotonic() + patient(60)
    while not path.exists():
        assert time.monotonic() < until, f"there is no {path}"
        time.sleep(0.01)
    return path


def test_only_the_ranks_of_the_job_get_in(programs, tmp_path, port):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    envs = [{**os.environ, **place, "RANK": str(rank)} for rank in (0, 1)]
    job = [programs(RANK, str(tmp_path), env=each) for each in envs]
    _, old, _ = json.loads(awaited(tmp_path / "wire1.0").read_text())
    at, token, listening = json.loads(awaited(tmp_path / "wire2.0").read_text())
    assert old != token and set(listening) == {"127.0.0.1"}
    with ExitStack() as stack:
        for said in (
            *[b""] * 200,
            b"GET / HTTP/1.1\r\n\r\n" + bytes(30),
            token[:10].encode(),
        ):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", at)))
            stranger.sendall(said)
        for key, who in ((old, 1), (token, 7)):  # as rank 1 of the group before; as a rank too many
            with socket.create_connection(("127.0.0.1", at)) as stranger:
                asked = stranger.recv(16) + struct.pack("!II16s", who, 0, b"")
                proof = hmac.digest(key.encode(), b"weft connects" + asked, "sha256")
                stranger.sendall(asked[16:] + proof)
                assert stranger.recv(32) == b""
        (tmp_path / "strangers").touch()
        awaited(tmp_path / "met")
        others = [programs(RANK, str(tmp_path), env=each) for each in envs]
        said = [each.communicate()[0] for each in others]
        assert all("the 2 ranks at" in each and "complete without it" in each for each in said)
    (tmp_path / "other job").touch()
    (first, log), (second, _) = (each.communicate() for each in job)
    assert first == second == "2.0\n"
    where = "from 127.0.0.1: it"
    assert re.search(rf"^rank 0 refused \d+ connections {where} did not prove that it", log, re.M)
    assert re.search(
        rf"^rank 0 refused a connection {where} knows the token, but rank 7", log, re.M
    )


def test_a_listener_that_opens_meanwhile_is_not_deaf(monkeypatch):
    """A metrics server, or a debugger, that another thread starts while weft makes its group."""
    listeners = []
    make_group = dist.init_process_group

    def beside(*args, **kwargs):
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        make_group(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", beside)
    with weft.init():
        [listener] = listeners
        with socket.create_connection(listener.getsockname(), 5.0), listener:
            listener.settimeout(5.0)
            listener.accept()[0].close()
