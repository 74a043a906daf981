"""Fuzz the decoders: bytes from a peer are read, or refused with an error that names the peer.

    python tools/fuzz_decoders.py [--executions 100000] [--seed 0] [--first 0]

An execution takes valid bytes and flips some, cuts them off, overwrites them, or replaces them by
random ones. Most executions pass the bytes to a decoder that reads by addresses or keeps a state.
The bytes end at a page boundary, and the next page is protected. The other executions replay a
whole call on one rank, with recorded messages of its peers, some of which are changed: it may give
another result, or raise; it must touch no memory of others, and come to an end.

There are two child processes, one with the compiled kernels, one with the reference kernels. Both
fill memory when it is freed (`MALLOC_PERTURB_`). A failure is reported with the number of its
execution; `--first` begins there again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import functools
import mmap
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import weft
from weft import kernels
from weft.backend import calls
from weft.base import tensors
from weft.base.memory import Pool, memory_of
from weft.failure import detector
from weft.group.group import Group
from weft.group.session import Session
from weft.sparse import codec
from weft.testing import run
from weft.wire.tcp.connection import Connection, Receive

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for the modules there that are no tests
from cases import on_hosts, set_rate

REPLAYED = 20  # executions of which one replays a call
WRONG = 20  # after which a child ends
WORDS = (0, 1, -1, 2, 7, 255, 1 << 31, -(1 << 31), 1 << 44, 1 << 62, -(1 << 63), (1 << 63) - 1)
REFUSED = (ValueError, TypeError, struct.error, OverflowError, RecursionError)


class Guarded:
    """Memory that ends at a protected page: access beyond its end ends the process."""

    def __init__(self, nbytes):
        self.pages, self.nbytes = mmap.mmap(-1, nbytes + mmap.PAGESIZE), nbytes
        end = ctypes.addressof(ctypes.c_char.from_buffer(self.pages)) + nbytes
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0

    def take(self, nbytes, raw=b""):
        """So many bytes at its end, but for what aligns them, which begin with those."""
        assert nbytes <= self.nbytes, f"{nbytes} bytes are asked for"
        start = (self.nbytes - nbytes) // 16 * 16
        self.pages[start : start + len(raw)] = raw
        return tensor(memoryview(self.pages)[start : start + nbytes])


def tensor(raw):
    return torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0).byte()


def spoilt(raw, rng):
    """These bytes, but for some."""
    data, kind = bytearray(raw), rng.randrange(8)
    if kind == 0 or not data:
        return rng.randbytes(rng.randrange(len(data) + 17))
    if kind == 1:
        return raw[: rng.randrange(len(raw))]
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(min(len(data), rng.choice((16, 128, 1 << 20))))
        if kind < 4:
            data[at] ^= 1 << rng.randrange(8)
            continue
        at, other = at // 4 * 4, rng.randrange(len(data)) // 4 * 4
        if kind < 6:
            word = struct.pack("<Q", rng.choice(WORDS) + rng.choice((0, 0, 1, -1)) & (1 << 64) - 1)
            data[at : at + 8] = word[: len(data) - at]
        else:
            data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
    return bytes(data)


# Decoders: each gives valid bytes, and what reads them ------------------------------------------

MESSAGE, SEGMENT = Guarded(1 << 18), Guarded(1 << 12)
ROOM = Guarded(64 * MESSAGE.nbytes)  # a bit of a message may be an index of eight bytes


def lists(dtype):
    def read(message):
        found = codec.unpack(message, dtype, 1_200_000, ROOM.take).numpy()
        assert not len(found) or (found[0] >= 0 and found[-1] <= 1_200_000)
        assert (found[1:] > found[:-1]).all()

    samples = []
    for step in (1, 3, 1000):
        indices = torch.arange(1100, dtype=dtype) * step + 5
        indices[700:] += 2 * step
        samples += [codec.pack(indices, Pool(), gaps=gaps).tensor for gaps in (False, True)]
        code = kernels.index_code(indices[:300])
        if code is None:  # in the child without machine code
            continue
        room = torch.zeros(code.most, dtype=torch.uint8)
        room = room[: kernels.encode(indices[:300], code, room)]
        samples.append(torch.cat([torch.tensor([300, len(room), 5]).view(torch.uint8), room]))
    return [each.numpy().tobytes() for each in samples], read


class Stream:
    """A socket on which these bytes come, some at a time."""

    family = socket.AF_UNIX

    def __init__(self, raw):
        self.left, self.step = raw, 1 + len(raw) % 300

    def fileno(self):
        return -1

    def recv_into(self, place):
        if not self.left:
            raise BlockingIOError
        count = min(len(place), self.step, len(self.left))
        place[:count], self.left = self.left[:count], self.left[count:]
        return count

    def recvmsg_into(self, places):
        return (self.recv_into(next(each for each in places if len(each))),)


class Peer:
    """The segment of a peer."""

    memory = SEGMENT.take(4096)
    nbytes, address = 4096, memory.data_ptr()


def frames():
    def read(message):
        kind = len(message) % 6
        peer = Peer if kind % 3 else None
        connection = Connection(1, Stream(message.numpy().tobytes()), peer, mapped=False)
        for channel, limit in ((7, 64), (3, 4096), (3, 64), (7, 8192)):
            want = limit if kind % 2 else ROOM.take(limit)
            connection.expect(channel, Receive(want, Pool()))
        while not connection.lost and connection.receive():
            pass
        assert connection.garbled or not connection.lost

    said = (
        (0, 7, 40, 0),
        (1, 7, 0, 1),
        (2, 3, 900, 3196),
        (3, 3, 64, 8),
        (4, 0, 0, 1),
        (0, 7, 5000, 0),
    )
    some = [struct.pack("<IIQQ", *each) + bytes(each[2] * (each[0] == 0)) for each in said]
    return [b"".join(some), b"".join(some[3:]), *some], read


def words():
    def read(message):
        with contextlib.suppress(*detector.UNREADABLE):
            detector.read(message.numpy().tobytes())

    said = b'{"verdict": [1, "rank 1 died"]}', b'{"ask": 3}', b"[" * 5000
    call = b'["ranks 2, 0", 7, "barrier"]'
    here = b'[7, "barrier", 2, 0.3, "", "a.py:1", [2], %b, true, [%b], ""]' % (call, call)
    return [*said, b'{"here": %b, "to": 3}' % here, b'{"bye": %b}' % here], read


DECODERS = {
    "index list, int32": functools.partial(lists, torch.int32),
    "index list, int64": functools.partial(lists, torch.int64),
    "frame": frames,
    "detector": words,
}

# Whole calls: each makes every kind of statement, header and message that it needs ---------------

ROWS = (torch.arange(40) * 3, torch.arange(3, 90, 2), torch.tensor([0, 3, 95]))


def rows(group, times=60):
    indices = torch.cat([ROWS[group.rank % 3] + 200 * time for time in range(times)])
    return weft.Rows(indices, torch.ones(len(indices), 2), 200 * times)


def reduced(algorithm, group):
    return weft.sparse_all_reduce(rows(group), group=group, algorithm=algorithm)


def of_backend(group, job):
    """A call of the backend `cpu:weft`."""
    return group.worker.call("a call of the backend", job)


ALGORITHMS = ["gather", "split", "doubling"]
if kernels.is_compiled():
    ALGORITHMS.append("holders")
CALLS = {
    **{name: functools.partial(reduced, name) for name in ALGORITHMS},
    "eager": lambda group: weft.sparse_all_reduce(rows(group, 1), group=group),
    "list": lambda group: weft.sparse_all_reduce([rows(group), rows(group, 2)], group=group)[0],
    "reduce": lambda group: weft.sparse_reduce(rows(group), group=group),
    "reduce_scatter": lambda group: weft.sparse_reduce_scatter(rows(group), group=group),
    "all_gather": lambda group: [weft.sparse_all_gather(rows(group), group=group)],
    "broadcast": lambda group: [
        weft.sparse_broadcast(rows(group) if group.rank else None, 1, group)
    ],
    "all_to_all": lambda group: weft.all_to_all([torch.ones(group.rank, 9)] * group.size, group),
    "all_reduce": lambda group: weft.all_reduce(torch.ones(5), group=group),
    "barrier": lambda group: weft.barrier(group=group),
    "attempt": lambda group: weft.attempt(int, group),
    "layer": lambda group: weft.nn.AllGather(weft.Partition(group.size, group=group), 0)(
        torch.ones(2)
    ),
    "backend's all_gather_single": lambda group: of_backend(
        group, calls.all_gather_single(group, torch.empty(9 * group.size), torch.ones(9))
    ),
    "backend's reduce_scatter_single": lambda group: of_backend(
        group,
        calls.reduce_scatter_single(group, torch.empty(9), torch.ones(9 * group.size), "sum"),
    ),
    "modules": lambda group: weft.sync_params(torch.nn.Linear(2, 2 + group.rank % 2), group=group),
}


def call(name, group):
    set_rate(group, 16)  # at which index lists are packed
    with on_hosts(group, [*map(str, range(group.size))]):  # between which they are
        return CALLS[name](group)


@functools.cache
def recorded(name, size):
    """What ranks send each other: the messages by sender, receiver and channel."""
    said = collections.defaultdict(list)

    def program(group):
        def post(sends=(), recvs=(), channel=0, inner=group.wire.post):
            for peer, message in sends:
                said[group.rank, peer, channel].append(tensors.as_bytes(message).numpy().tobytes())
            return inner(sends, recvs, channel)

        group.wire.post = post
        with contextlib.suppress(weft.WeftError if name == "modules" else ()):  # which differ
            call(name, group)

    run(size, program)
    return said


class Replayed:
    """A wire on which recorded messages come, some of them spoilt."""

    def __init__(self, rank, size, said, rng):
        self.rank, self.size = rank, size
        self.coming = {key: collections.deque(each) for key, each in said.items() if key[1] == rank}
        for _ in range(rng.choice((1, 1, 3)) if self.coming else 0):
            queue = self.coming[rng.choice(sorted(self.coming))]
            at = rng.randrange(len(queue))
            queue[at] = spoilt(queue[at], rng)

    def post(self, sends=(), recvs=(), channel=0):
        queues = [self.coming.get((peer, self.rank, channel)) for peer, _ in recvs]
        return Coming(recvs, [queue.popleft() if queue else None for queue in queues])

    def lease(self, nbytes):
        return None

    def abort(self, failure):
        return None

    def close(self):
        return None


class Coming:
    def __init__(self, recvs, messages):
        self.heard, self.places = [*zip(recvs, messages, strict=True)], []

    def wait(self):
        for (peer, want), raw in self.heard[len(self.places) :]:
            most = want if isinstance(want, int) else want.nbytes
            if raw is None or len(raw) > most or most > 1 << 24:
                raise weft.WireError("as a group does where less comes, or more", culprit=peer)
            self.places.append(tensor(bytearray(want)) if isinstance(want, int) else want)
            memory_of(self.places[-1])[: len(raw)] = raw
        return self.places

    def release(self):
        return None


def replaying(rank, size, said, rng):
    """A group over such a wire, which knows no peers: there are none."""
    wire, hosts = Replayed(rank, size, said, rng), ["threads"] * size
    ranks = range(size)
    session = Session(wire, 5.0, hosts, detector=None, memory=Pool(), join=None, global_ranks=ranks)
    return Group(session)


def replay(rng):
    """One call as one rank hears it."""
    name = rng.choice([*CALLS])
    size = rng.choice((2, 3, 2 if name in ALGORITHMS else 18))
    rank = rng.randrange(size)
    said = recorded(name, size)
    with contextlib.suppress(Exception), replaying(rank, size, said, rng) as group:
        call(name, group)
    return name


# Executions --------------------------------------------------------------------------------------


def execute(seed, number, made):
    """One execution: what was attacked; raises what should not come of it."""
    rng = random.Random(seed << 40 | number)
    if number % REPLAYED == 0:
        return replay(rng)
    name = rng.choice([*made])
    samples, read = made[name]
    raw = spoilt(rng.choice(samples), rng)
    with contextlib.suppress(REFUSED):
        read(MESSAGE.take(len(raw), raw))
    return name


def child(given, at):
    """Execute; `at` is memory that says how far it came."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    made, done, wrong = {name: make() for name, make in DECODERS.items()}, collections.Counter(), 0
    for number in range(given.first, given.first + given.executions):
        at[:8] = number.to_bytes(8, "little")
        try:
            done[execute(given.seed, number, made)] += 1
        except Exception:
            wrong += 1
            print(f"execution {number}:", traceback.format_exc(), flush=True)
            if wrong == WRONG:
                break
    print(", ".join(f"{count:,d} {name}" for name, count in sorted(done.items())))
    return wrong > 0


def main():
    parse = argparse.ArgumentParser()
    for option, default in (("executions", 100_000), ("seed", 0), ("first", 0)):
        parse.add_argument(f"--{option}", type=int, default=default)
    parse.add_argument("--at", help="of a child: the file that it says in how far it came")
    given = parse.parse_args()
    if given.at:
        with Path(given.at).open("r+b") as file:
            return child(given, mmap.mmap(file.fileno(), 8))
    began, share, failed, children = time.monotonic(), -(-given.executions // 2), False, {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("machine", "reference"):
            (at := Path(folder) / kind).write_bytes(bytes(8))
            line = [sys.executable, __file__, f"--at={at}", f"--executions={share}"]
            line += [f"--seed={given.seed}", f"--first={given.first}"]
            more = {"WEFT_KERNELS": kind, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"}
            children[at] = subprocess.Popen(line, env={**os.environ, **more})
        for at, process in children.items():
            if process.wait():
                failed, last = True, int.from_bytes(at.read_bytes(), "little")
                print(f"{at.name}: ended with {process.returncode} in execution {last}")
    print(f"{2 * share:,d} executions in {time.monotonic() - began:.0f} s, seed {given.seed}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
