"""Who waits to be joined is told if a rank dies or leaves: in a split, and with a line."""

from __future__ import annotations

import pathlib
import re
import time

import pytest
import torch.distributed as dist

import weft
from weft.base.pace import patient
from weft.group import joining
from weft.testing import processes, run, spmd
from weft.wire.tcp.listener import Listener

RANK = """
import json, os, signal, sys, weft
place, joins, end = sys.argv[1:]
group = weft.init(rendezvous=place, timeout=1000.0)
try:
    weft.barrier()  # another rank may be in it yet, and is told there
    if group.rank == 2:
        print(json.dumps({"at": 0.0}), flush=True)
        if end == "died":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no data")
    elif joins == "add_line":
        group.add_line()
    elif joins == "split":
        group.split([2, 1, 0])
    elif group.rank == 1:
        group.split([0, 1])
    else:
        weft.barrier()  # before its split, which is refused
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("end", ["died", "left, after it raised (ValueError: no data)"])
@pytest.mark.parametrize("joins", ["split", "add_line", "split without it"])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_who_waits_for_a_rank_that_is_gone_is_told_so_at_once(
    survivors, tmp_path, port, kind, joins, end
):
    """Also where the store ends with the rank that was told first."""
    place = f"file://{tmp_path}/place" if kind == "file" else f"tcp://127.0.0.1:{port}"
    _, printed = survivors(RANK, (place, joins, end), [{}] * 3, 2)
    for rank, (said,) in printed.items():
        assert said["text"].startswith(f"rank {rank}: rank 2 {end}"), said
        assert said["text"].endswith("; start the group again")
        assert said["culprit"] == 2


def splits_unlike_the_other():
    with weft.init() as group:
        if group.rank == 0:
            return ""
        group.set_timeout(patient(2.0))
        with pytest.raises(weft.WireError) as caught:
            group.split([1, 2] if group.rank == 1 else [2, 1])
        return str(caught.value)


def test_who_is_split_otherwise_is_told_of_the_order():
    """Whoever gives up first; the other one sees it leave, if it is in time."""
    order = "that all ranks make their calls in the same order, whichever groups they are on"
    number = r"( \(rank 1 of this group is rank 2 of the job\))?"
    for text in processes(3, splits_unlike_the_other)[1:]:
        pattern = f"rank 1 did not join .*{order}{number}$|rank [12] left|too late to join it"
        assert re.search(pattern, text), text


def until(condition):
    late = time.monotonic() + patient(60.0)
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.01)


def splits_as_another_rank_breaks_the_group(late, place):
    """`late` waits for that: before it comes to be joined, or as the last, in its connecting."""
    there, begun = pathlib.Path(place), [pathlib.Path(f"{place}.{rank}") for rank in range(3)]
    with weft.init(timeout=600.0) as group:
        own, come, connect = group.session, joining.exchange, Listener.connect

        def until_it_broke():
            there.touch()
            until(lambda: own.detector.verdict)

        def come_late(*args):
            until_it_broke()
            return come(*args)

        def connect_late(*args):
            until_it_broke()
            return connect(*args)

        if group.rank == late:
            joining.exchange = come_late if late < 2 else come
            Listener.connect = connect_late if late == 2 else connect
        if group.rank == 3:
            until(lambda: there.exists() and all(each.exists() for each in begun))
            own.abort("no data")
            return ""
        begun[group.rank].touch()  # it is through weft.init, which the others may not be
        with pytest.raises(weft.WireError) as caught:
            group.split([0, 1, 2])
        return str(caught.value)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_comes_to_be_joined_as_the_group_breaks_waits_for_nobody(tmp_path, late):
    place = str(tmp_path / "late")
    told = processes(4, splits_as_another_rank_breaks_the_group, late, place)
    for rank in range(3):
        assert told[rank] == f"rank {rank}: rank 3 gave up: no data; start the group again"


@pytest.mark.parametrize(
    ("kinds", "near"),
    [(["x", "x", "x", "x"], {2}), (["x", "x", "x", "y"], set()), (["", "", "", ""], set())],
)
def test_ranks_of_a_host_meet_if_all_ranks_have_the_same_machine_code(kinds, near):
    hosts = ["red", "blue", "red", "blue"]
    said = [joining.Statement(*each, "", {}) for each in zip(hosts, kinds, strict=True)]
    assert joining.who_meets(said, 0) == near


def leaves_as_it_is_connected():
    def fail(*_):
        raise ValueError("no data")

    try:
        with weft.init(timeout=600.0) as group:
            if group.rank == 2:
                Listener.connect = fail
            return group.split([0, 1, 2])
    except (weft.WireError, ValueError) as error:
        return str(error)


def test_who_is_connected_to_a_rank_that_leaves_is_told_so_at_once():
    told = processes(3, leaves_as_it_is_connected)
    left = "rank 2 left, after it raised (ValueError: no data); start the group again"
    assert told == [f"rank 0: {left}", f"rank 1: {left}", "no data"]


def breaks_a_part(group):
    part = group.split([3, 2, 1])
    weft.barrier(group=group)  # all are through that
    if part is None:
        return ""
    if group.rank == 2:
        part.session.abort("no data")
    with pytest.raises(weft.WireError, match=r"rank 1 gave up: no data") as caught:
        while True:
            weft.barrier(group=part)
    assert caught.value.culprit == 1
    return str(caught.value)


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_an_error_of_a_part_says_which_rank_of_the_job_is_to_blame(on):
    told = run(4, breaks_a_part, on=on)
    for text in told[1:]:
        assert text.endswith("start the group again (rank 1 of this group is rank 2 of the job)")


@spmd(2, 3)
def test_a_part_and_a_line_wait_as_long_as_their_group_does_by_now(group):
    with group.split(range(group.size)) as own:
        own.session.set_timeout(41.0)
        own.add_line()
        with own.split([1, 0]) or own as part:
            assert (part.timeout, own.line.timeout) == (41.0, 41.0)


def hosted():
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.mark.parametrize(
    ("made", "error"),
    [(hosted, OSError("no route")), (dist.HashStore, RuntimeError("no route"))],
)
def test_the_host_of_a_store_is_not_to_blame_for_sockets_nor_where_there_is_none(
    made, error, monkeypatch
):
    def fail(*_):
        raise error

    monkeypatch.setattr(joining, "exchange", fail)
    monkeypatch.setattr(joining, "HELD_UP", 0.1)
    store = made()
    with pytest.raises(
        weft.WireError, match=r"it was not joined \(timeout 9 s\): no route"
    ) as told:
        joining.connect(store, 0, 2, 9.0)
    assert told.value.culprit is None
