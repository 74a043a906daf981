"""The process-group group beyond the contract: groups of the caller's, leaks, forks, signals."""

from __future__ import annotations

import bisect
import copy
import functools
import gc
import json
import math
import os
import pickle
import random
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import weft
from weft import WeftError, WireError
from weft.base.pace import patient
from weft.failure.detector import Detector
from weft.group import joining, process_group
from weft.group.joining import connect
from weft.group.process_group import of, of_group
from weft.schedules import dense_all_reduce
from weft.testing import processes, run, spmd
from weft.testing.pace import START
from weft.wire.interface import WireFailed
from weft.wire.tcp import shm
from weft.wire.tcp import wire as tcp

of_two, of_three = (spmd(size, on=("processes",)) for size in (2, 3))
"""What makes a test of the program of one of so many processes."""


def until(condition):
    """Wait until something is so."""
    late = time.monotonic() + patient(20.0)
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.002)


def talk(group):
    """Everybody hears everybody."""
    assert group.all_gather_bytes(bytes([group.rank + 1]), ord) == [*range(1, group.size + 1)]


@contextmanager
def default_group(group, folder, backend="gloo", **options):
    """A default group of torch's among the ranks of `group`."""
    place = f"file://{folder}/store"
    dist.init_process_group(
        backend, init_method=place, rank=group.rank, world_size=group.size, **options
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@of_two
def test_the_programs_random_numbers_are_its_own(group, tmp_path):
    random.seed(7)
    before = random.getstate()
    if group.rank:
        time.sleep(0.2)  # so that the other one waits for it, in pauses
    with default_group(group, tmp_path, "cpu:weft"):
        pair = dist.new_group([0, 1])
        for each in (None, pair):
            dist.all_reduce(torch.ones(1), group=each)
    weft.barrier(group=group.split([0, 1]))
    assert random.getstate() == before


# groups of the caller's


@of_three
def test_groups_of_every_kind_have_a_wire(group, tmp_path):
    with default_group(group, tmp_path, timeout=timedelta(seconds=17)):
        world = of_group(None)
        assert (world.rank, world.size, world.timeout) == (group.rank, group.size, 17.0)
        assert of_group(None) is world and of(dist.group.WORLD) is world
        talk(world)

        pairs = [[0, 1], [1, 2], [0, 1]]  # overlapping, and one of them twice
        made = [dist.new_group(pair) for pair in pairs]
        for pair, each in zip(pairs, made, strict=True):
            if group.rank in pair:
                assert of_group(each).size == 2
                talk(of_group(each))
            else:
                with pytest.raises(WeftError, match=f"rank {group.rank}: .*not in this group"):
                    of(each)
        if group.rank < 2:
            assert of_group(made[0]) is not of_group(made[2])

        mesh = DeviceMesh("cpu", torch.arange(group.size))
        talk(of(mesh))
        assert of(mesh) is of(mesh)
        with pytest.raises(WeftError, match=r"shape \(3, 1\) has 2 dimensions"):
            of(DeviceMesh("cpu", torch.arange(group.size).view(-1, 1)))


@of_three
def test_groups_that_their_members_make_alone_have_wires(group, tmp_path):
    """Groups that their members make alone.

    There are no others: torch 2.15 counts them in the names of groups that all ranks make later,
    which then have different names; and torch 2.13 waits for ever for one that is made after others
    of the same ranks.
    """
    with default_group(group, tmp_path, timeout=timedelta(seconds=17)):
        if group.rank < 2:
            made = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)]
            for each in made:
                talk(of_group(each))
        talk(of_group(None))  # nobody leaves before all are through


@of_three
def test_ranks_are_those_of_the_group(group, tmp_path):
    """Ranks of a group are numbered as the group numbers them."""
    with default_group(group, tmp_path):
        turned = dist.new_group([2, 0, 1])
        part = of_group(turned)
        assert part.rank == dist.get_group_rank(turned, group.rank)
        talk(part)


@of_two
def test_a_group_goes_with_its_group(group, tmp_path):
    with default_group(group, tmp_path):
        pair = dist.new_group([0, 1])
        kept, world = of_group(pair), of_group(None)
        dist.destroy_process_group(pair)
        with pytest.raises(WeftError, match="was destroyed"):
            of_group(pair)
        with pytest.raises(WireError, match="closed"):
            kept.post()
        world.close()  # as weft.shutdown does
        again = of_group(None)  # and weft.init, later
        assert again is not world
        talk(again)
        made = [weakref.ref(each) for each in (again, world, kept)]
        del again, world, kept, pair
    gc.collect()
    assert [each() for each in made] == [None] * 3, "the group outlives its process group"
    with pytest.raises(WeftError, match=r"call weft.init\(\) first"):
        of_group(None)


@of_two
def test_a_group_may_be_destroyed_while_another_thread_joins_it(group, tmp_path):
    """A thread destroys a group that another one is joining."""
    with default_group(group, tmp_path), ThreadPoolExecutor(1) as other:
        talk(of_group(None))
        for comes in (True, False):
            pair = dist.new_group(timeout=timedelta(seconds=patient(20.0 if comes else 3.0)))
            if group.rank == 0:
                joined = other.submit(of_group, pair)
                store, key = process_group.store_of(pair), f"weft/{pair.group_name}/0"
                until(functools.partial(store.check, [key]))
                dist.destroy_process_group(pair)
            talk(of_group(None))
            if group.rank == 1 and comes:
                with pytest.raises(WireError, match="rank 0"):
                    talk(of_group(pair))
            if group.rank == 0:
                error = WeftError if comes else WireError
                with pytest.raises(error, match="this process group was destroyed"):
                    joined.result(patient(60.0))
            talk(of_group(None))


@of_three
def test_a_barrier_that_is_the_first_call_joins_within_the_deadline_of_the_group(group, tmp_path):
    """Rank 2 comes to no barrier on a pair, whose deadline joining has, and not the call's."""
    with default_group(group, tmp_path):
        pair = dist.new_group([1, 2], timeout=timedelta(seconds=patient(2.0)))
        if group.rank == 1:
            with pytest.raises(WireError, match="rank 1 did not join before the timeout"):
                weft.barrier(0.1, group=pair)
        talk(of_group(None))


def refuse(*_, **__):
    raise RuntimeError("can't start new thread")


@of_two
def test_who_can_start_no_thread_as_it_joins_is_missed_at_once(group):
    """So is who raises anything else until it has its wire."""
    for owner, step in ((Detector, "start"), (shm, "exchange"), (tcp.TcpWire, "__init__")):
        with pytest.MonkeyPatch.context() as patch:
            if group.rank == 0:
                patch.setattr(owner, step, refuse)
            with pytest.raises((RuntimeError, WireError)) as caught:
                group.split([0, 1])
        if group.rank == 0:
            assert str(caught.value) == "can't start new thread"
        else:
            left = "rank 1: rank 0 left, after it raised (RuntimeError: "
            assert str(caught.value).startswith(left)
        talk(group)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@of_two
def test_a_group_cannot_be_copied(group, copied):
    """A second group over the same connections would mix up the messages of both."""
    for each in (group, group.split([0, 1])):
        with pytest.raises(WeftError, match=rf"^rank {group.rank}: a group cannot be copied"):
            copied(each)
    talk(group)


def test_what_is_no_group_is_refused():
    with pytest.raises(WeftError, match=r"str is no group: pass None, a weft\.Group, a torch"):
        of("world")


# groups that ranks call in different orders


def crossed(group, folder, have_joined):
    """When this rank was told, the text of the error, and its culprit."""
    told = math.inf, "", None
    with default_group(group, folder):
        of_group(None, timeout=START)
        first, second = (dist.new_group(), dist.new_group())[:: 1 - 2 * group.rank]
        if have_joined:
            for each in sorted((first, second), key=lambda each: each.group_name):
                assert of(each).timeout == START
                talk(of(each))
                of(each).set_timeout(patient(3.0))
        of_group(None).set_timeout(patient(3.0))  # also of groups that are joined from now on
        talk(group)
        try:
            weft.all_reduce(torch.ones(2), group=first)
            weft.all_reduce(torch.ones(2), group=second)
        except WireError as error:  # not kept, since its frames hold the groups
            told = time.monotonic(), str(error), error.culprit
        # without a call of weft's, in which the other, which may still ask, would find this rank
        (folder / f"{group.rank} is told").touch()
        until((folder / f"{1 - group.rank} is told").exists)
        talk(group)  # links stay till here
    return told


ORDER = "see that all ranks make their calls in the same order, whichever groups they are on"


def test_a_call_of_another_group_is_named_where_ranks_wait_for_each_other_in_two(tmp_path):
    told = run(2, crossed, tmp_path, True, on="processes")
    for rank, (_, text, _) in enumerate(told):
        assert f"rank {1 - rank} has not entered call 1 (all_reduce): it " in text, text
    # whose peer is in its call still
    _, text, culprit = min(told)
    place = r"is in call 1 \(all_reduce\) of group '.*', and in no call of '.*'"
    assert re.search(rf"{place}, at .*test_process_group.py.*; {ORDER}", text), text
    assert culprit is None


def test_a_group_that_ranks_join_is_named_where_they_wait_for_each_other_in_two(tmp_path):
    """Nobody has links in either. Those of the default group tell."""
    for rank, (_, text, _) in enumerate(run(2, crossed, tmp_path, False, on="processes")):
        assert re.search(
            rf"rank {rank}: group '\d' of 2 ranks: rank {1 - rank} did not join before the timeout "
            rf"of [\d.]+ s: rank {1 - rank} of the job (is|.* after it raised .* is) joining group "
            rf"'\d', and in no call of '.*', at .*test_process_group.py.*; {ORDER}",
            text,
        ), text


# joining


def test_who_did_not_join_is_named():
    began = time.monotonic()
    with pytest.raises(WireError, match="rank 0: group 'x' of 3 ranks: ranks 1 and 2 did not join"):
        connect(dist.HashStore(), 0, 3, 0.5, name="x")
    assert time.monotonic() - began < patient(5.0)


def test_a_wait_for_a_late_rank_counts_against_the_timeout_of_joining(monkeypatch):
    left = {}

    def make(rank, *given):
        left[rank] = given[-1] - time.monotonic()
        raise RuntimeError("it is enough to know that")

    def joined(rank):
        with pytest.raises(RuntimeError, match="it is enough"):
            connect(store, rank, 2, 60.0)

    store = dist.HashStore()
    monkeypatch.setattr(joining, "make", make)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(joined, 0)
        while not store.num_keys() and not first.done():  # its time has begun before
            time.sleep(0.01)
        time.sleep(1.0)
        second = pool.submit(joined, 1)
        first.result()
        second.result()
    assert left[0] <= 59.5


def test_who_gives_up_first_stays_until_the_others_have_read_why(monkeypatch):
    """The store may end with its program."""
    monkeypatch.setattr("weft.group.joining.HELD_UP", 60.0)
    store = dist.HashStore()

    def joining(rank, timeout):
        with pytest.raises(WireError, match="3 ranks: rank 2 did not join before"):
            connect(store, rank, 3, timeout, name="x")
        return store.check(["weft/x/1/read/0", "weft/x/1/read/1"])

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(joining, (0, 1), (3.0, 3.3)))


def test_who_did_not_say_where_it_listens_is_named():
    """It ended, or was stopped, before that."""
    store = dist.HashStore()
    store.set("weft/x/1/statement/2", "{}")
    with pytest.raises(WireError, match="ranks: rank 1 did not join") as caught:
        connect(store, 0, 3, 0.5, name="x")
    assert caught.value.culprit == 1


def test_a_rank_in_trouble_is_told_of_though_another_has_died_since(monkeypatch):
    """The others wait for a moment until all have read why there is no group."""
    monkeypatch.setattr("weft.rendezvous.store.HELD_UP", 0.2)
    store = dist.HashStore()
    other = {"host": "there", "kind": "", "trouble": "it cannot listen", "endpoint": {}}
    store.set("weft/x/1/statement/1", json.dumps(other))
    store.add("weft/x/1/statement/count", 1)
    with pytest.raises(WeftError, match="rank 1: it cannot listen"):
        connect(store, 0, 2, 60.0, name="x")


@pytest.fixture
def join():
    """Joins ranks in this process; their groups."""
    groups = []

    def join(size, timeout):
        store = dist.HashStore()
        with ThreadPoolExecutor(size) as pool:
            groups.extend(pool.map(lambda rank: connect(store, rank, size, timeout), range(size)))
        return groups

    yield join
    for group in groups:
        group.close()


def test_a_shorter_timeout_counts_from_the_next_wait_on(join):
    """Though the detector sleeps when it changes."""
    groups = join(2, 600.0)
    time.sleep(0.3)
    groups[0].set_timeout(0.5)
    ender = threading.Timer(20.0, groups[1].abort, ["the wait was too long"])
    ender.start()
    with pytest.raises(WireError, match="rank 1 keeps the others waiting"):
        groups[0].post((), [(1, 8)]).wait()
    ender.cancel()


def test_what_came_while_nobody_waited_is_blamed_on_its_sender(join):
    """And not on the rank that got it, for which the others wait until their deadline."""
    groups = join(3, 60.0)
    for group in groups:
        group.set_timeout(0.7)
    place = torch.zeros(1 << 17, dtype=torch.uint8)
    pending = groups[0].post((), [(1, place)])
    groups[1].wire.connections[0].sock.send(b"\xff" * 24)

    def has_read():
        with suppress(TimeoutError, WireFailed):
            pending.receive(0)
        return groups[0].wire.failure()

    until(has_read)
    with pytest.raises(WireError, match="rank 1 sent a frame of kind") as caught:
        groups[2].post((), [(0, 8)]).wait()
    assert caught.value.culprit == 1


@of_two
def test_a_rank_that_waits_for_nothing_can_be_asked(group):
    """As where a peer asks where this rank is, just when it waits for a post without messages."""
    if group.rank == 0:
        asked = []
        pending = group.post()
        wait = pending.receive

        def slow():
            asked.append(group.session.detector.waiting.wait.peer())
            return wait()

        pending.receive = slow
        assert pending.wait() == []
        assert asked == [None]
    talk(group)


def with_few_files(path):
    """The soft limit is raised; a hard limit that is too low on one rank is told to both."""
    import resource

    rank = int(os.environ["RANK"])
    store = dist.FileStore(path, 2)
    connect(store, rank, 2, 20.0).close()  # what is opened once for all wires
    opened, allowed = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    few = opened + 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, allowed[1]))
    with connect(store, rank, 2, 20.0) as group:
        talk(group)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert few < soft <= hard == allowed[1]
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    with pytest.raises(WeftError) as told:
        connect(store, rank, 2, 20.0)
    return few, str(told.value)


def test_the_limit_of_open_files_is_raised_or_said(tmp_path):
    (_, told), (few, same) = processes(2, with_few_files, str(tmp_path / "store"))
    assert told == same
    assert told.startswith("rank 1: 2 connections need ")
    assert f"the hard limit is {few}: raise it (ulimit -Hn " in told


def resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@of_two
def test_fifty_wires_in_a_row_leave_nothing(group, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), group.size)
    connect(store, group.rank, group.size, 20.0).close()  # torch's own threads, made once
    talk(group)
    before = resources()
    for number in range(50):
        other = connect(store, group.rank, group.size, 20.0)  # all of one name
        if number % 2:
            talk(other)
        if number % 3:
            other.close()
        del other  # closes too
    # files and threads of groups of tests before this one may still have been there
    assert all(now <= then for now, then in zip(resources(), before, strict=True))
    talk(group)


def one_group_a_thread():
    """Each rank waits in another order, at the one store that torch has for all groups."""
    dist.init_process_group("gloo")
    one, other = dist.new_group(), dist.new_group()

    def make(group):
        talk(of_group(group, timeout=9.0))

    order = (one, other) if dist.get_rank() else (other, one)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make, order[0])
        time.sleep(0.5)  # until it waits
        pool.submit(make, order[1]).result()
        first.result()
    dist.destroy_process_group()


def test_threads_do_not_keep_each_other_from_the_store():
    processes(2, one_group_a_thread)


# surroundings


def end_by_abort():
    """What a socket still holds of a message is not written to the caller's memory afterwards."""
    os.environ["WEFT_HOST"] = os.environ["RANK"]  # so it comes by a socket
    dist.init_process_group("gloo")
    with of_group(None) as group:
        message = torch.full((1 << 27,), 1 - group.rank, dtype=torch.uint8)
        if group.rank == 1:
            pending = group.post((), [(0, message)])
            while not message[1 << 24]:
                time.sleep(0.0003)
            group.abort("enough")
            with pytest.raises(WireError, match="rank 1 gave up: enough"):
                pending.wait()  # from now on nothing writes; a thread may have been at it before
            came = bisect.bisect(range(len(message)), 0, key=lambda at: 1 - int(message[at]))
            time.sleep(0.1)
            assert not message[came:].any()
        with pytest.raises(WireError, match="rank 1 gave up: enough"):
            while True:  # the first comes whole where rank 1 is held up
                group.post([(1 - group.rank, message)]).wait()
    dist.destroy_process_group()


def test_an_abort_ends_waits_and_receives_that_are_under_way():
    processes(2, end_by_abort)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 on this machine")
def test_ipv6():
    processes(2, end_by_abort, env={"WEFT_INTERFACE": "::1"})


@of_two
def test_a_forked_child_leaves_the_wire_alone(group):
    """It cannot use the group, does not disturb it, and ends."""
    gc.collect()  # another test's gloo group, ended in the child, would wait for its threads
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            group.post([(1 - group.rank, torch.zeros(1))])
        except WireError as error:
            text = str(error)
            status = 0 if "forked process" in text and "not in a DataLoader's" in text else 2
        group.close()
        del group
        gc.collect()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    time.sleep(0.2)  # a goodbye would have come by now
    talk(group)


def forks_while_it_is_joined(place):
    """A thread of rank 0 waits for rank 1, and a child that is forked then calls on the group."""
    forked, inside = Path(place), threading.Event()

    def connect_and_tell(*args, **options):
        inside.set()
        return connect(*args, **options)

    with weft.init(timeout=60.0) as group:
        pair = dist.new_group([0, 1])
        if group.rank == 1:
            while not forked.exists():
                time.sleep(0.01)
            weft.barrier(group=pair)
            return 0
        process_group.connect = connect_and_tell
        joins = threading.Thread(target=weft.barrier, kwargs={"group": pair})
        joins.start()
        assert inside.wait(30.0)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                weft.barrier(group=pair)
            except WeftError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        forked.touch()
        joins.join(60.0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_that_is_forked_while_a_thread_joins_is_told_so(tmp_path):
    assert processes(2, forks_while_it_is_joined, str(tmp_path / "forked")) == [0, 0]


def exit_without_close():
    dist.init_process_group("gloo")
    group = of_group(None)
    talk(group)
    if group.rank == 0:
        with pytest.raises(WireError, match="rank 1 left") as caught:
            group.post((), [(1, 8)]).wait()
        assert caught.value.culprit == 1
    return group.rank  # rank 1 just ends: no death, since it says goodbye at exit


def test_a_rank_that_ends_without_closing_has_left():
    assert processes(2, exit_without_close) == [0, 1]


# signals


def handled(group):
    """A handler of the program's own runs during the wait, which is not disturbed."""
    store = dist.distributed_c10d._get_default_store()
    before = signal.signal(signal.SIGINT, lambda *_: store.set("handled", ""))
    try:
        if group.rank == 0:
            in_a_wait(group, os.kill, os.getpid(), signal.SIGINT)
            group.post((), [(1, 8)]).wait()
        else:
            store.wait(["handled"], timedelta(seconds=20))  # so not only when the wait is over
            group.post([(0, torch.zeros(1))]).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    talk(group)


def in_a_wait(group, do, *given):
    """Do something in a thread, once the group waits."""

    def watch():
        while group.session.detector.waiting is None:
            time.sleep(0.001)
        do(*given)

    threading.Thread(target=watch, daemon=True).start()


def interrupt(number):
    """Have another thread take a signal, so that the main thread's sleep goes on."""
    signal.pthread_kill(threading.get_ident(), number)


def raised(group):
    """An exception of a handler ends the wait, and breaks the group for all."""
    if group.rank == 0:

        def late(*_):
            raise TimeoutError("enough")

        before = signal.signal(signal.SIGUSR1, late)
        in_a_wait(group, interrupt, signal.SIGUSR1)
        with pytest.raises(TimeoutError, match="enough"):
            group.post((), [(1, 8)]).wait()
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(WireError, match=r"rank 0 was interrupted \(TimeoutError\)") as caught:
        group.post((), [(1 - group.rank, 8)]).wait()
    assert caught.value.culprit == 0


def in_main_thread(body):
    dist.init_process_group("gloo")
    with of_group(None) as group:
        body(group)
    dist.destroy_process_group()


@pytest.mark.parametrize("body", [handled, raised])
def test_a_signal_that_is_handled_breaks_nothing_and_one_that_raises_is_told_to_all(body):
    processes(2, in_main_thread, body)


# closing


def another(group, folder):
    """Another group of the same ranks."""
    store = dist.FileStore(str(folder / "store"), group.size)
    return connect(store, group.rank, group.size, 20.0)


@of_two
def test_closing_ends_a_wait_in_another_thread(group, tmp_path):
    other = another(group, tmp_path)
    talk(other)
    if group.rank == 0:
        in_a_wait(other, other.close)
        began = time.monotonic()
        with pytest.raises(WireError, match="this group was closed while rank 0 awaited"):
            other.post((), [(1, 8)]).wait()
        assert time.monotonic() - began < 10.0
    else:
        with pytest.raises(WireError, match="rank 0 left") as caught:
            other.post((), [(0, 8)]).wait()
        assert caught.value.culprit == 0
    other.close()


@of_two
def test_closing_loses_nothing(group, tmp_path):
    """What was sent before a rank closed arrives, however late it is asked for."""
    other = another(group, tmp_path)
    count = 200_000
    place = torch.zeros(count, dtype=torch.int64)
    if group.rank == 0:
        other.post([(1, torch.arange(count))]).wait()
        other.close()
    else:
        pending = other.post((), [(0, place)])
        time.sleep(0.5)
        assert torch.equal(pending.wait()[0], torch.arange(count))
        other.close()
    talk(group)


@spmd(1, 2, on=("processes",))
def test_messages_to_nobody_are_refused(group):
    for peer in (group.rank, -1, group.size):
        with pytest.raises(WeftError, match=f"rank {peer} is no peer among {group.size} ranks"):
            group.post([(peer, torch.zeros(1))])
        with pytest.raises(WeftError, match=f"rank {peer} is no peer"):
            group.post((), [(peer, 8)])
    talk(group)


def test_alone_nothing_is_opened(nothing_left):
    with nothing_left():
        group = connect(dist.HashStore(), 0, 1, 5.0)
    assert group.split([0]).size == 1 and group.split([]) is None
    group.abort("no memory left")
    for _ in range(2):
        with pytest.raises(WireError, match="rank 0: rank 0 gave up: no memory left; start") as bad:
            group.post()
        assert bad.value.culprit == 0
    group.close()
    with pytest.raises(WireError, match="rank 0: this group is closed"):
        dense_all_reduce(group, torch.zeros(1), "sum")
