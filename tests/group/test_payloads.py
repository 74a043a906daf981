"""A wire in rounds that `weft.init(wire=)` names: it carries tensors, and another the openings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import weft
from weft import nn
from weft.base.pace import patient
from weft.group import process_group
from weft.group.group import Group
from weft.group.joining import connect
from weft.sparse import ALGORITHMS
from weft.testing import RankFailure, processes, round_wire, run
from weft.testing.checked_rounds import CheckedRounds
from weft.wire.interface import Features
from weft.wire.registry import register_wire, wire_names

CPU = torch.device("cpu")
NAMES = sorted(ALGORITHMS)
SMALL = 16 << 10  # bytes that no message of an opening has


def register():
    if "rounds" not in wire_names():
        register_wire("rounds", round_wire)


@contextlib.contextmanager
def in_rounds(group, path):
    """A group of these ranks over the wire in rounds, and the messages on its other wire."""
    register()
    store = dist.FileStore(path, group.size)
    with connect(store, group.rank, group.size, 90.0, wire="rounds") as made:
        beside, post = [], made.wire.post

        def watched(sends=(), recvs=(), channel=0):
            beside.extend(tensor.nbytes for _, tensor in sends)
            return post(sends, recvs, channel)

        made.wire.post = watched
        yield made, beside


def rows_of(rank, dtype=torch.float32):
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(9000, (4000 * (rank != 1),), generator=draw)  # too many for an opening
    return weft.Rows(ids, torch.randint(-9, 9, (len(ids), 40), generator=draw).to(dtype), 9000)


def sums(group, path):
    rows = rows_of(group.rank)
    with in_rounds(group, path) as (made, beside):
        over = made.on(CPU)
        if made.size > 1:
            assert (over.route, over.features.lockstep) == ("cpu (rounds)", True)
            assert not made.features.lockstep and made.route == "cpu"
        for name in ("auto", *NAMES):
            for op in ("sum", "max"):
                wanted = weft.sparse_all_reduce(rows, op, group=group)
                for ranks in (made, made.subset(range(made.size - 1, -1, -1))):
                    found = weft.sparse_all_reduce(rows, op, algorithm=name, group=ranks)
                    assert torch.equal(found.indices, wanted.indices), name
                    assert torch.equal(found.values, wanted.values), name
        several = weft.sparse_all_reduce([rows, rows], group=made)
        assert all(torch.equal(each.values.sum(), rows_sum(group, rows)) for each in several)
        half = weft.sparse_all_reduce(rows_of(group.rank, torch.float16), group=made)
        assert torch.equal(half.values.float().sum(), rows_sum(group, rows))
        assert max(beside, default=0) < SMALL  # no rows went there


def rows_sum(group, rows):
    return weft.all_reduce(rows.values.sum(), group=group)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sparse_sums(size, tmp_path):
    run(size, sums, str(tmp_path / "store"), on="processes")


class Loose(CheckedRounds):
    """In rounds, and not exact: a receive by size may be longer than its message."""

    def __init__(self, below, ranks=None):
        super().__init__(below, ranks)
        self.features = Features(lockstep=True)

    def among(self, ranks):
        return Loose(self.below, [self.ranks[rank] for rank in ranks])


@pytest.fixture(params=["in rounds", "exact"])
def kind(request, exact_wire):
    """A wire that is in rounds, or exact, alone."""
    return Loose if request.param == "in rounds" else exact_wire


def over(group, kind, counts):
    """Calls of ranks with so many rows, over a wire of that kind."""
    with group.split(range(group.size)) as below, group.split(range(group.size)) as made:
        made.session.carry_payloads(kind(below.wire), "mine")
        ids = torch.arange(counts[group.rank]) * 3 + group.rank
        rows = weft.Rows(ids, torch.ones(len(ids), 2), 3 * max(counts) + 9)
        wanted = weft.sparse_all_reduce(rows, group=group)
        for name in NAMES:
            found = weft.sparse_all_reduce(rows, algorithm=name, group=made)
            assert torch.equal(found.indices, wanted.indices), name
            assert torch.equal(found.values, wanted.values), name
        gathered = weft.sparse_all_gather(rows, group=made)
        of_all = [torch.arange(count) * 3 + rank for rank, count in enumerate(counts)]
        assert torch.equal(gathered.indices, torch.cat(of_all))
        assert torch.equal(gathered.values, torch.ones(sum(counts), 2))
        reduced = weft.sparse_reduce(rows, group_dst=0, group=made)
        if group.rank == 0:
            assert torch.equal(reduced.indices, wanted.indices)
            assert torch.equal(reduced.values, wanted.values)


def test_a_wire_may_be_in_rounds_or_exact_alone(kind):
    """Lengths of lists are known before these travel, long or not."""
    run(3, over, kind, (60_000, 4, 5000))


def spoilt(group, kind, algorithm):
    """The error of a sum over such a wire to which rank 1 sends something else than it should."""
    with group.split(range(group.size)) as below, group.split(range(group.size)) as made:
        made.session.carry_payloads(kind(below.wire), "mine")
        rows = weft.Rows(torch.arange(5000) * 3, torch.ones(5000, 2), 15_000)
        with pytest.raises(weft.WireError) as caught:
            weft.sparse_all_reduce(rows, algorithm=algorithm, group=made)
        return str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [("gather", "lengths of lists"), ("doubling", "the length of a message")],
)
@pytest.mark.parametrize("length", [1 << 60, -5])
def test_who_says_impossible_lengths_is_named(kind, length, algorithm, what, monkeypatch):
    exchange = Group.all_gather_bytes

    def exchanged(group, message, decode, kind_of_message="a message"):
        if kind_of_message == what and group.session.rank == 1:
            message = struct.pack("<q", length) + message[8:]
        return exchange(group, message, decode, kind_of_message)

    monkeypatch.setattr(Group, "all_gather_bytes", exchanged)
    for text in run(3, spoilt, kind, algorithm):
        assert f"rank 1 sent {what}" in text


def in_place_of_tcp():
    register_wire("tcp", round_wire, replace=True)
    with weft.init(timeout=60, wire="tcp") as group:
        indices, _ = weft.sparse_all_reduce((torch.tensor([group.rank, 9]), torch.ones(2, 3)))
        return indices.tolist(), group.features.lockstep, group.on(CPU).features.lockstep


def test_openings_go_over_weft_s_own_wire_whatever_has_its_name():
    assert processes(2, in_place_of_tcp) == [([0, 1, 9], False, True)] * 2


def layers(made, rows):
    """On all ranks, and on some: the others know nothing of it."""
    some = -(-made.size // 2)
    results = []
    for ranks in (made.size, some, some):
        grid = weft.Partition(ranks, group=made)
        for kind in (nn.AllGather, nn.AllSumReduce, nn.SumReduce, nn.Broadcast):
            has = grid.active and (kind is not nn.Broadcast or not grid.rank)
            x = torch.full((rows if has else 0, 3), float(made.rank + 1), requires_grad=True)
            y = kind(grid, 0)(x)
            y.sum().backward()
            results += [y.detach(), x.grad]
    return results


def routines(made, rows):
    """Collectives of `weft.comm`, also backward."""
    x = torch.arange(2.0 * rows).view(rows, 2).requires_grad_()
    received = weft.all_to_all([x * (to + made.rank) for to in range(made.size)], made)
    total = weft.all_reduce(x * made.rank, group=made)
    fetched = weft.exchange(x, [torch.arange(2)] * made.size, made)
    torch.autograd.backward([*received, total], [torch.ones_like(x)] * (made.size + 1))
    model = torch.nn.Linear(rows, 3)
    torch.nn.init.constant_(model.weight, float(made.rank))
    torch.nn.init.zeros_(model.bias)
    weft.sync_params(model, group_src=made.size - 1, group=made)
    model(torch.ones(2, rows) * made.rank).sum().backward()
    weft.sync_grads(model, group=made)
    weft.barrier(group=made)
    moved = [each.detach() for each in (*received, total, *fetched, x.grad)]
    return [*moved, model.weight.detach().clone(), model.weight.grad]


def layers_and_routines(group, path):
    with in_rounds(group, path) as (made, beside):
        for body in (layers, routines):
            for rows in (2, 20_000):
                found, wanted = body(made, rows), body(group, rows)
                assert all(map(torch.equal, found, wanted)), (body, rows)
        inner = made.split(range(made.size - 1, -1, -1))
        with inner:
            assert inner.on(CPU).features.lockstep == (made.size > 1)
            total = weft.all_reduce(torch.full((30_000,), float(made.rank)), group=inner)
            assert total.eq(sum(range(made.size))).all()
        # what is small travels with the openings of layers and routines
        assert max(beside, default=0) < 256 << 10


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_layers_and_routines(size, tmp_path):
    run(size, layers_and_routines, str(tmp_path / "store"), on="processes")


def by_name():
    register()
    with weft.init(timeout=60, wire="rounds") as group:
        found = weft.sparse_all_reduce(rows_of(group.rank), algorithm="split")
        return group.on(CPU).route, group.route, weft.config()["wire"], int(found.values.sum())


def test_a_program_asks_for_it_by_its_name():
    wanted = sum(int(rows_of(rank).values.sum()) for rank in range(3))
    found = processes(3, by_name)
    assert {each[:2] for each in found} == {("cpu (rounds)", "cpu")}
    assert {each[3] for each in found} == {wanted}
    assert processes(2, by_name, env={"WEFT_SAFE": "1"})[0][:2] == ("cpu (rounds)", "cpu")


def of_torch():
    register()
    dist.init_process_group("weft")
    group = process_group.of_group(None)
    beside, post = [], group.wire.post

    def watched(sends=(), recvs=(), channel=0):
        beside.extend(tensor.nbytes for _, tensor in sends)
        return post(sends, recvs, channel)

    group.wire.post = watched
    tensor = torch.full((30_000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    assert max(beside, default=0) < SMALL
    dist.destroy_process_group()
    return group.on(CPU).route, tensor[[0, -1]].tolist()


def test_collectives_of_torch_take_it():
    assert processes(3, of_torch, env={"WEFT_WIRE": "rounds"}) == [("cpu (rounds)", [3.0] * 2)] * 3


RANK = """
import json, os, signal, sys, time, torch, weft
import torch.distributed as dist
from weft.testing import round_wire
place, victim = sys.argv[1:]
weft.register_wire("rounds", round_wire)
group = weft.init(rendezvous=f"file://{place}", timeout=120.0, wire="rounds")
exchange, done, rows = dist.all_to_all_single, [], (torch.arange(50_000), torch.ones(50_000, 8))
def until(*given, **options):
    done.append(given)
    if len(done) == 5 and group.rank == int(victim):
        print(json.dumps({"at": time.monotonic()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(*given, **options)
dist.all_to_all_single = until
try:
    while len(done) < 20:
        weft.sparse_all_reduce(rows, algorithm="split")
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit, "at": time.monotonic()}))
sys.stdout.flush()
os._exit(0)
"""


def test_survivors_name_who_was_killed_in_a_round(survivors, tmp_path):
    victim = 2
    given = str(tmp_path / "place"), str(victim)
    began, printed = survivors(RANK, given, [{}] * 3, victim)
    for rank, [said] in printed.items():
        assert said["culprit"] == victim, said
        assert said["text"].startswith(f"rank {rank}: rank {victim} died while"), said
        assert said["at"] - began < patient(5.0), said


def with_a_socket(start):
    """The wire in rounds of two ranks, with a socket between them that it closes."""
    wire = round_wire(start)
    close_rounds = wire.close
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ports = start.exchange(str(listening.getsockname()[1]).encode())
        if start.rank == 0:
            wire.socket, _ = listening.accept()
        else:
            wire.socket = socket.create_connection(("127.0.0.1", int(ports[0])))
        start.exchange(b"")  # rank 0 listens until rank 1 has connected

    def close():
        wire.socket.close()
        close_rounds()

    wire.close = close
    return wire


def dies_with_a_child(folder):
    """Rank 1 is killed, while a child that it has forked goes on, in a session of its own."""
    register_wire("socket", with_a_socket)
    with weft.init(wire="socket", timeout=300) as group:
        weft.barrier()
        payloads = group.on(CPU).wire
        if group.rank == 1:
            payloads.socket.recv(1)  # rank 0 is through the barrier
            is_there, tells = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
                child = os.fork()
            if child == 0:
                os.setsid()  # else whoever started the ranks ends it with its parent
                os.write(tells, b".")
                time.sleep(patient(15))
                os._exit(0)
            os.read(is_there, 1)  # with which it has let go of what it must
            os.kill(os.getpid(), signal.SIGKILL)
        payloads.socket.sendall(b".")
        payloads.socket.settimeout(patient(10))
        end = payloads.socket.recv(1)
        (folder / "end").write_bytes(end or b"the connection has ended")


def test_a_forked_child_holds_no_connection_of_the_wire_of_payloads(tmp_path):
    """Else the peers, who wait for its parent there, would not see that this has died."""
    with pytest.raises(RankFailure, match=r"(?s)rank 1 .*SIGKILL"):
        processes(2, dies_with_a_child, tmp_path)
    assert (tmp_path / "end").read_text() == "the connection has ended"
