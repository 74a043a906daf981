"""Process groups that carry tensors, as programs make them, use them beside, and leave them."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import run
from weft.verbs import group as verbs_of_group
from weft.verbs.group import GroupVerbs
from weft.wire.interface import Failure


def by_gloo(group, place, body):
    """What the body gets with a group whose tensors go by gloo; its store is one over TCP."""
    port = place / "port"
    if group.rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(f"{store.port}")
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        return body(weft.init(wire="group", timeout=60.0))
    finally:
        with contextlib.suppress(weft.WireError):
            weft.barrier(group=group)  # rank 0 has the store
        weft.shutdown()
        dist.destroy_process_group()


@contextlib.contextmanager
def late_by(seconds, group):
    """A block in which rank 1 comes to each verb later by so much."""
    run_verb = GroupVerbs._run

    def run_later(*args):
        time.sleep(seconds * group.rank)
        run_verb(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupVerbs, "_run", run_later)
        yield


def mine(rank):
    return torch.tensor([rank, 7]), torch.tensor([[1.0], [10.0**rank]])


def in_another_order(group):
    """What calls give on a process group whose ranks are not in the order of the job's."""
    order = [2, 0, 1]
    other = dist.new_group(order, sort_ranks=False)
    sums = []
    for is_async in (False, True):
        work = weft.sparse_all_reduce(mine(group.rank), group=other, async_op=is_async)
        indices, values = work.wait() if is_async else work
        sums.append((indices.tolist(), values.view(-1).tolist()))
    assert sums[0] == sums[1] == ([0, 1, 2, 7], [1.0, 1.0, 1.0, 111.0])
    gathered = weft.sparse_all_gather(mine(group.rank), group=other)[0].tolist()
    source = weft.sparse_broadcast(mine(group.rank), group_src=0, group=other)[0].tolist()
    parts = weft.all_to_all([torch.tensor([group.rank, to]) for to in order], group=other)
    return gathered, source, [part.tolist() for part in parts]


def test_the_ranks_of_a_process_group_may_have_any_order(tmp_path):
    for rank, found in enumerate(run(3, by_gloo, tmp_path, in_another_order, on="processes")):
        gathered, source, parts = found
        assert gathered == [2, 7, 0, 7, 1, 7]
        assert source == [2, 7]
        assert parts == [[2, rank], [0, rank], [1, rank]]


def beside_a_new_group(group):
    """The program makes a process group while weft makes one of its own."""
    is_made = threading.Event()
    make = verbs_of_group.new_process_group

    def made_later(*args):
        assert group.rank == 0 or is_made.wait(60.0)
        return make(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs_of_group, "new_process_group", made_later)
        work = weft.sparse_all_reduce(mine(group.rank), async_op=True)
        time.sleep(0.5)  # by then rank 0 waits at the store
        dist.new_group([0, 1])
        is_made.set()
        return work.wait()[0].tolist()


def test_the_program_can_use_its_store_while_weft_makes_a_group(tmp_path):
    assert run(2, by_gloo, tmp_path, beside_a_new_group, on="processes") == [[0, 1, 7]] * 2


class Late(ValueError):
    """What a handler raises."""


def too_late(*_):
    raise Late


def interrupted(group):
    weft.sparse_all_reduce(mine(group.rank))
    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with late_by(2.0, group), pytest.raises((Late, weft.WireError)) as caught:
            signal.alarm(1 - group.rank)
            weft.sparse_all_reduce(mine(group.rank))
    finally:
        signal.signal(signal.SIGALRM, before)
    return f"{caught.type.__name__} {caught.value}"


def test_what_a_handler_raises_leaves_a_verb_as_it_is(tmp_path):
    raised, told = run(2, by_gloo, tmp_path, interrupted, on="processes")
    assert raised == "Late "
    assert told.startswith("WireError rank 1: rank 0 was interrupted (Late)")


def left(group):
    """Rank 0 leaves in the middle of a verb, for which rank 1 comes later."""
    weft.sparse_all_reduce(mine(group.rank), async_op=True).wait()
    has_left = threading.Event()
    with late_by(3.0, group):
        work = weft.sparse_all_reduce(mine(group.rank), async_op=True)
        if group.rank == 0:
            time.sleep(0.5)
            leaving = threading.Thread(target=lambda: (group.close(), has_left.set()))
            leaving.start()
            assert has_left.wait(2.0)  # before rank 1 has come
        with pytest.raises(weft.WireError) as caught:
            work.wait()
    return str(caught.value)


def test_who_leaves_waits_for_no_verb(tmp_path):
    closed, told = run(2, by_gloo, tmp_path, left, on="processes")
    assert closed.startswith("rank 0: this group was closed")
    assert told.startswith("rank 1: rank 0 left")


def slow(group):
    """Rank 1 comes within the deadline that there is, not within that of the group's making."""
    group.set_timeout(1.0)
    weft.sparse_all_reduce(mine(group.rank), async_op=True).wait()
    group.set_timeout(60.0)
    with late_by(3.0, group):
        return weft.sparse_all_reduce(mine(group.rank), async_op=True).wait()[0].tolist()


def test_a_later_deadline_holds_for_groups_that_are_made(tmp_path):
    assert run(2, by_gloo, tmp_path, slow, on="processes") == [[0, 1, 7]] * 2


def broken(group):
    """Rank 1 gives up; how many process groups have ended when a rank gets the error."""
    weft.sparse_all_reduce(mine(group.rank))
    ended, end = [], verbs_of_group._end_gloo

    def end_slowly(process_group):
        time.sleep(0.2)
        end(process_group)
        ended.append(process_group)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(weft.WireError):
        patch.setattr(verbs_of_group, "_end_gloo", end_slowly)
        weft.barrier()
        if group.rank == 1:
            group.abort("there is no more data")
        weft.sparse_all_reduce(mine(group.rank))
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    return len(ended)


def test_who_gets_the_error_finds_connections_closed(tmp_path):
    """Gloo may leave a collective waiting for ever that begins while they are being closed."""
    assert run(3, by_gloo, tmp_path, broken, on="processes") == [1, 1, 1]


def test_an_interrupted_end_of_process_groups_is_done_again(monkeypatch):
    """And not once weft has let go of them."""
    ended = []

    def end(process_group):
        ended.append(process_group)
        if len(ended) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(verbs_of_group, "_end_gloo", end)
    monkeypatch.setattr(verbs_of_group, "within", lambda seconds, function: function())
    session = SimpleNamespace(process_group=lambda: "the program's")
    group = SimpleNamespace(rank=0, size=2, session=session, process_group=session.process_group)
    verbs = GroupVerbs(group, torch.device("cpu"), "gloo")
    failure = Failure("aborted", 1, "rank 1 died")
    with pytest.raises(KeyboardInterrupt):
        verbs.abort(failure)
    assert verbs.failure() is failure  # so nobody waits any longer
    for _ in range(2):
        verbs.abort(failure)
    assert ended == ["the program's"] * 2
    closed = GroupVerbs(group, torch.device("cpu"), "gloo")
    closed.close()
    closed.abort(failure)
    assert len(ended) == 2


UNCAUGHT = """
import os, signal, sys
import torch
import torch.distributed as dist
import weft
from weft.verbs.group import GroupVerbs
from weft.wire.interface import Failure

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
weft.init(wire="group", timeout=60.0)
rows = torch.arange(3), torch.ones(3)
weft.sparse_all_reduce(rows)
if rank == 1:
    GroupVerbs._run = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
weft.sparse_all_reduce(rows)
"""


def test_a_survivor_ends_by_its_error(tmp_path):
    """And not by a signal, from threads that end process groups.

    In interpreters of their own: `programs` are forks, which end in another way.
    """
    line = [sys.executable, "-c", UNCAUGHT, f"{tmp_path / 'place'}"]
    ranks = [
        subprocess.Popen([*line, f"{rank}"], stderr=subprocess.PIPE, text=True) for rank in range(3)
    ]
    ends = [(each.communicate(timeout=120)[1], each.returncode) for each in ranks]
    assert [code for _, code in ends] == [1, -signal.SIGKILL, 1]
    for said, _ in (ends[0], ends[2]):
        assert "rank 1 died" in said
