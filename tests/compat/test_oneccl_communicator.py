"""Communicators: of the default group, of a key-value store, of a part; and the store itself."""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import weft
from weft.compat.oneccl import event
from weft.testing import processes, run, spmd


def total(comm, value):
    """The sum of a value over a communicator's ranks."""
    result = []
    attr = event.create_sparse_allreduce_attr(
        completion_fn=lambda *all: result.append(all[3].item())
    )
    one = torch.tensor([0]), torch.tensor([float(value)])
    event.sparse_allreduce(one[0], 1, one[1], 1, *[None] * 4, "sum", comm, attr=attr).wait()
    return result[0]


@spmd(1, 3)
def test_the_default_group(group):
    comm = event.create_communicator()
    assert (comm.rank(), comm.size()) == (group.rank, group.size)
    assert total(comm, group.rank) == sum(range(group.size))
    comm.close()  # which leaves the group as it was
    assert total(event.create_communicator(), 1) == group.size
    assert total(None, 1) == group.size
    assert repr(comm) == f"<Communicator rank {group.rank} of {group.size}>"


@spmd(4)
def test_split_by_color(group):
    comm = event.create_communicator()
    with comm.split(group.rank % 2) as half:
        assert (half.rank(), half.size()) == (group.rank // 2, 2)
        assert total(half, group.rank) == (2 if group.rank % 2 == 0 else 4)
    with pytest.raises(weft.Error, match="closed"):
        total(half, 1)
    with comm.split(-7) as same:
        assert (same.rank(), same.size()) == (group.rank, 4)
    with comm.split(group.rank) as alone:
        assert total(alone, group.rank) == group.rank


@spmd(20, on=("threads",))
def test_many_ranks_split(group):
    """Above 16 ranks colors travel by way of others."""
    with event.create_communicator().split(group.rank // 7) as part:
        assert (part.rank(), part.size()) == (group.rank % 7, 7 if group.rank < 14 else 6)


@spmd(3, on=("threads",))
def test_a_color_is_an_integer(group):
    for bad, said in (("red", "'red'"), (2**63, str(2**63)), (None, "None"), (1.0, r"1\.0")):
        with pytest.raises(weft.WeftError, match=f"rank 1: color is {said}: pass an integer"):
            event.create_communicator().split(bad if group.rank == 1 else 2)
    with event.create_communicator().split(group.rank == 1) as part:  # a bool is an integer, too
        assert (part.rank(), part.size()) == (group.rank // 2, 2 - group.rank % 2)
    with event.create_communicator().split(np.int64(group.rank // 2)) as part:
        assert part.size() == 2 - group.rank // 2


def meet(rank, size, address):
    """One process: rank 0 has made the store, the others join it."""
    kvs = event.create_kvs(address)
    kvs.set(f"greeting {rank}", bytes([rank, 255]))
    assert kvs.get(f"greeting {(rank + 1) % size}") == bytes([(rank + 1) % size, 255])
    comm = event.create_communicator(size, rank, kvs, timeout=30.0)
    backwards = event.create_communicator(size, size - 1 - rank, kvs, timeout=30.0)
    with comm, backwards:
        return total(comm, rank), backwards.rank(), total(backwards, 1)


def of_environment(size, address):
    import os

    return meet(int(os.environ["RANK"]), size, address)


def test_processes_meet_at_a_store():
    main = event.create_main_kvs("127.0.0.1")
    address = main.get_address()
    assert len(address) <= 256
    assert processes(2, of_environment, 2, address.ljust(256, b"\0")) == [
        (1.0, 1, 2.0),
        (1.0, 0, 2.0),
    ]


def test_any_store_of_torch_serves():
    store = dist.HashStore()

    def program(group):
        with event.create_communicator(2, np.int64(group.rank), store, timeout=10.0) as comm:
            return total(comm, 1)

    assert run(2, program) == [2.0, 2.0]


def test_who_does_not_come_is_named():
    """Nobody waits for longer than was said; one that was held up says so of itself."""
    told = r"rank 1 did not join before the timeout of 0\.5 s|rank 0 came \d+ s too late to join it"

    def program(group, rank, store):
        with pytest.raises(weft.WireError, match=told):
            event.create_communicator(2, rank, store, timeout=0.5)

    run(1, program, 0, dist.HashStore())
    run(2, program, 0, dist.HashStore())  # who is there twice


def test_the_main_store_is_reachable():
    kvs = event.create_main_kvs()  # at whatever address this machine has
    kvs.set("x", bytearray(b"1"))
    assert event.create_kvs(kvs.get_address()).get("x") == b"1"


def test_what_is_wrong_is_raised_here():
    for given in ((2, None, None), (2, 0, None), (None, None, dist.HashStore())):
        with pytest.raises(weft.WeftError, match="pass size, rank and kvs together"):
            event.create_communicator(*given)
    for address in (b"nowhere", b"host:port", ":80", "x:70000", b"\xff:1", None):
        with pytest.raises(weft.WeftError, match="is no address of a store: pass host:port"):
            event.create_kvs(address)
    with pytest.raises(weft.WireError, match=r"no store answers at 127\.0\.0\.1:9 within 0\.2 s"):
        event.create_kvs("127.0.0.1:9", timeout=0.2)
    store = dist.HashStore()
    for given, text in (
        (("2", 0, store), "size is '2' and rank is 0: pass two integers"),
        ((2, 0.0, store), "size is 2 and rank is 0.0: pass two integers"),
        ((2, 2, store), "rank 2 is none of 2 ranks"),
        ((2, 0, "127.0.0.1:80"), "kvs is a str: make it by create_main_kvs"),
    ):
        with pytest.raises(weft.WeftError, match=text):
            event.create_communicator(*given)
    with pytest.raises(weft.WeftError, match="timeout is -1: pass a positive number"):
        event.create_communicator(2, 0, store, timeout=-1)
    with pytest.raises(weft.WeftError, match="timeout is '3': pass a positive number"):
        event.create_kvs("127.0.0.1:9", timeout="3")
    for host in ("203.0.113.5", 7):  # of a network that is for documents
        with pytest.raises(weft.WeftError, match=r"no store can listen at .*: pass an address of"):
            event.create_main_kvs(host)
    main = event.create_main_kvs("127.0.0.1")
    kvs = event.create_kvs(main.get_address())
    kvs.store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(weft.WeftError, match="key 'x' is set to a int: pass bytes"):
        kvs.set("x", 1)
    with pytest.raises(weft.WireError, match="key 'nobody' has no value: is the process that"):
        kvs.get("nobody")
    with pytest.raises(weft.WeftError, match=r"call weft\.init"):
        event.create_communicator()


def without_an_interface(path):
    rank = int(os.environ["RANK"])
    if rank == 0:
        os.environ["WEFT_INTERFACE"] = "nothing7"
    with pytest.raises(weft.WeftError) as told:
        event.create_communicator(3, rank, dist.FileStore(path, 3), timeout=60.0)
    return str(told.value)


def test_a_rank_that_cannot_listen_is_told_to_all(tmp_path):
    """At once: else the others would wait for it until their deadline."""
    first, *others = processes(3, without_an_interface, str(tmp_path / "store"), timeout=50.0)
    assert others == [first] * 2
    assert first.startswith("rank 0: it cannot listen: WEFT_INTERFACE=nothing7 names no interface")
