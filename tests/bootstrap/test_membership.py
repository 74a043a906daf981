"""The membership check: what is decided, and that every process that comes hears the same."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from weft.base.errors import WeftError, WireError
from weft.base.pace import patient
from weft.bootstrap import membership
from weft.bootstrap.membership import Member, check, judge
from weft.rendezvous.places import Rendezvous
from weft.rendezvous.store import AnsweringStore


def member(rank, size=3, **more):
    return Member(rank, size, host=f"host{rank}", pid=100 + rank, **more)


COMPLETE = [member(0), member(2), member(1)]


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([member(0), member(1, 4)], "world size: rank 0 has 3, rank 1 has 4"),
        ([member(0), member(0)], r"rank 0 of 3 was started twice: on host0 \(process 100\) and on"),
        (
            [member(-1, 0, error="no RANK")],
            r"a process without a rank \(host-1, process 99\): no R",
        ),
        (
            [*COMPLETE[:2], member(1, weft="9")],
            "weft version: ranks 0, 2 have , rank 1 has 9; in",
        ),
        ([*COMPLETE[:2], member(1, torch="9")], "torch version: .*; install the same everywhere"),
        ([*COMPLETE[:2], member(1, backend="ucc")], "backend: .* have none given, rank 1 has ucc"),
        (
            [member(rank, address="127.0.0.1", machine=str(rank)) for rank in range(3)],
            "ranks 0, 1 and 2 would listen at 127.0.0.1, .* WEFT_INTERFACE",
        ),
        (  # one of them cannot tell where it is
            [member(r, address="127.0.0.1", machine="" if r == 1 else "one") for r in range(3)],
            r"ranks 0, 1 and 2 would .* seem to be on several hosts \(host0, host1, host2\)"
            ": name the network interface in WEFT_INTERFACE",
        ),
        (  # each host's docker0
            [member(r, address=f"172.17.0.{r % 2}", machine=str(r)) for r in range(3)],
            r"ranks 0 and 2 would both listen at 172.17.0.0, .*host0, host2.* WEFT_INTERFACE",
        ),
    ],
)
def test_what_does_not_fit(entries, error):
    decision = judge(entries)
    assert decision is not None
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(decision.error)
    assert decision.came == len(entries)


def test_what_fits():
    assert all(judge(COMPLETE[:count]) is None for count in range(3))
    decision = judge(COMPLETE)
    assert decision is not None and (decision.error, decision.backend) == ("", "gloo")
    for address in ("127.0.0.1", "10.0.0.7"):
        local = [member(rank, address=address, machine="one") for rank in range(3)]
        assert judge(local) == decision


def test_who_cannot_tell_its_machine_is_where_its_host_is():
    for address in ("127.0.0.1", "10.0.0.7"):
        for blind in range(3):
            at = [
                Member(r, 3, host="here", address=address, machine="" if r == blind else "one")
                for r in range(3)
            ]
            decision = judge(at)
            assert decision is not None and decision.error == ""


HIDDEN = """
import ctypes, os, sys, torch, weft

if os.environ["RANK"] == "1":  # a mount that nobody else sees, over /proc
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())

with weft.init(rendezvous=f"file://{sys.argv[1]}", timeout=180) as group:
    sys.stdout.write(f"{weft.all_reduce(torch.ones(1)).item()}\\n")
"""


@pytest.mark.network
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="to hide /proc from a rank needs root",
)
def test_a_rank_from_which_proc_is_hidden_takes_part(programs, tmp_path):
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment["WEFT_KERNELS"] = "reference"  # machine code, if it is not kept, takes a while
    place = str(tmp_path / "place")
    ranks = [programs(HIDDEN, place, env=environment | {"RANK": f"{rank}"}) for rank in range(2)]
    said = [rank.communicate(180.0) for rank in ranks]
    assert [out for out, _ in said] == ["2.0\n"] * 2, said
    assert "/proc is hidden from this process" in said[1][1]
    assert "/proc" not in said[0][1]


def test_the_devices_of_all_choose_the_backend():
    with_gpu = [member(rank, able=("nccl", "gloo")) for rank in range(3)]
    assert judge(with_gpu).backend == "nccl"
    assert judge([*with_gpu[:2], member(2)]).backend == "gloo"
    assert judge([member(rank, backend="gloo", able=("nccl", "gloo")) for rank in range(3)]).backend


@pytest.fixture
def connect(monkeypatch):
    """A connection of its own for each process, as to one store, which answers in any case."""
    monkeypatch.setattr("weft.base.within.PIECES", 100)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return server.clone


def attend(connect, *members, timeout=10.0, elastic=False):
    """Each member's process, as a thread: the backend it hears of, or its error."""
    deadline = time.monotonic() + timeout

    def come(mine):
        try:
            meeting = Rendezvous(connect(), "there", hosts=mine.rank == 0, lasts=elastic)
            decision, space = check(meeting, mine, deadline)
            space.add("after", 1)
            return decision.backend
        except (WeftError, WireError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(come, members))


@pytest.mark.parametrize("elastic", [False, True])
def test_all_hear_the_same_error(connect, elastic, monkeypatch):
    monkeypatch.setattr(membership, "GRACE", 0.2)
    wrong = member(1, error="no interface nothing7")
    heard = attend(connect, *COMPLETE[:2], wrong, elastic=elastic)
    assert heard == ["WeftError: rank 1 (host1, process 101): no interface nothing7"] * 3


def test_one_too_many_hears_it_and_disturbs_nobody(connect):
    assert attend(connect, *COMPLETE) == ["gloo"] * 3
    heard = attend(connect, member(2))
    assert heard[0].startswith("WeftError: rank 2 (host2, process 102): the 3 ranks at there are ")


def test_who_is_missing_is_named_to_all(connect):
    heard = attend(connect, member(0), member(2), timeout=patient(3.0))
    assert len(set(heard)) == 1
    assert "WireError: rank 1 did not come to there in time (2 of 3 came, from host" in heard[0]


def test_who_stops_as_it_comes_is_named_and_not_those_who_came_after(connect, monkeypatch):
    """Between its number in order of arrival and what it says of itself."""
    stopped, after, write = threading.Event(), threading.Event(), AnsweringStore.set

    def stop(to, key, value):
        if key.startswith("member") and json.loads(value)["rank"] == 1:
            stopped.set()
            assert after.wait(30.0)
        write(to, key, value)

    def come_after():
        assert stopped.wait(30.0)
        try:
            return attend(connect, member(0), member(2), timeout=patient(3.0))
        finally:
            after.set()

    monkeypatch.setattr(AnsweringStore, "set", stop)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(attend, connect, member(1), timeout=1)
        heard = pool.submit(come_after).result(60.0)
        assert [*set(heard)] == first.result(60.0)
    assert "WireError: rank 1 did not come to there in time (2 of 3 came, from host" in heard[0]


def test_rank_0_may_be_who_is_missing(connect, monkeypatch):
    monkeypatch.setattr(membership, "LATE", 1.0)
    for elastic in (False, True):
        heard = attend(connect, member(1), member(2), timeout=patient(1.0), elastic=elastic)
        for text in heard:
            assert text.startswith("WireError: rank 0 did not come to there"), heard


def test_a_rank_that_comes_after_two_of_one_number_hears_of_them(connect):
    heard = []

    def late():
        time.sleep(0.5)  # by then the twins have told each other
        heard.extend(attend(connect, member(2)))

    third = threading.Thread(target=late, daemon=True)
    began = time.monotonic()
    third.start()
    both = attend(connect, member(0), member(0))
    assert time.monotonic() - began > 0.4  # the store ends with one of them
    third.join(10)
    assert len({*both, *heard}) == 1 and "was started twice" in heard[0]


def test_what_an_earlier_round_left_is_not_taken_for_this_one(connect):
    """torchrun's store outlives its workers; hosts that join or leave begin a new round."""
    gone = [member(0), member(1)]  # of three: they were ended before the third came
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(membership, "LATE", 0.1)
        patched.setattr(membership, "incomplete", died)
        attend(connect, *gone, timeout=1, elastic=True)
    one_comes_early(connect)  # it finds the old round, and no decision in it
    assert attend(connect, *COMPLETE, elastic=True) == ["gloo"] * 3  # and after a complete one


def test_an_error_ends_an_attempt_and_not_the_next(connect, monkeypatch):
    monkeypatch.setattr(membership, "LINGER", 0.5)  # for the third, which never comes
    wrong = member(1, error="no interface nothing7")
    assert all("nothing7" in text for text in attend(connect, wrong, member(0), elastic=True))
    one_comes_early(connect)  # it finds the old round, and the error in it


def one_comes_early(connect):
    """A rank of a new attempt comes before the others do; all meet."""
    early = []
    first = threading.Thread(
        target=lambda: early.extend(attend(connect, member(2), elastic=True)), daemon=True
    )
    first.start()
    first.join(0.3)
    assert attend(connect, member(0), member(1), elastic=True) == ["gloo"] * 2
    first.join(10)
    assert early == ["gloo"]


def died(*_):
    raise WireError("the process was ended here")
