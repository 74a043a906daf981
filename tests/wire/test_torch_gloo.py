"""What is special of the group over a process group of torch's; the rest is in `test_contract`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.base import _torch
from weft.base._torch import NoDevice
from weft.base.pace import patient
from weft.failure import control
from weft.group.joining import connect
from weft.rendezvous import store as store_module
from weft.schedules import dense_all_reduce
from weft.testing import RankFailure, processes, run
from weft.wire import torch_gloo


def wire_of(group):
    names = {each.name for each in threading.enumerate()}
    return "torch" if f"weft receive {group.rank}-{1 - group.rank}" in names else "tcp"


def summed(**options):
    with weft.init(timeout=60, **options) as group:
        kind = wire_of(group)
        total = torch.tensor([group.rank + 1.0])
        dist.all_reduce(total)
        turned = dist.new_group([1, 0])  # also a group of the program's own goes over it
        indices, values = weft.sparse_all_reduce(
            (torch.tensor([group.rank, 9]), torch.ones(2)), group=turned
        )
        with pytest.raises(weft.WeftError, match="running already, with wire="):
            weft.init(wire="tcp" if kind == "torch" else "torch")
    return kind, total.item(), indices.tolist(), values.tolist()


def asked():
    return summed(wire="torch")


@pytest.mark.parametrize(("body", "env"), [(asked, {}), (summed, {"WEFT_WIRE": "torch"})])
def test_a_wire_is_chosen(body, env):
    assert processes(2, body, env=env) == [("torch", 3.0, [0, 1, 9], [1.0, 1.0, 2.0])] * 2


SAFE = """
import weft, weft.group.process_group
weft.init()
print(weft.group.choice.chosen(), weft.kernels.describe())
"""


def test_to_be_safe_is_that_and_the_reference_kernels(programs):
    said, errors = programs(SAFE, env={**os.environ, "WEFT_SAFE": "1"}).communicate()
    assert said.startswith("torch torch operations (WEFT_SAFE=1)"), errors


def refusal(wire):
    if os.environ["RANK"] == "0":
        wire = None
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=20, wire=wire)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (
            "torch",
            "rank 0 was asked for wire 'tcp', and rank 1 for 'torch': give all ranks the same",
        ),
        ("smoke", "wire 'smoke' is unknown: use one of mpi, tcp, torch"),
    ],
)
def test_ranks_that_differ_are_told_alike(wire, text):
    first, second = processes(2, refusal, wire)
    assert first == second
    assert text in first


def large(group):
    """Frames of a long message, and what the detector says between them."""
    peer = 1 - group.rank
    for length in (999, 1000, 1001, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17):
        sent = (torch.arange(length) + group.rank).to(torch.uint8)
        pending = group.post([(peer, sent)], [(peer, length + 5)])
        assert torch.equal(pending.wait()[0][:length], (torch.arange(length) + peer).byte())
        pending.release()


def test_messages_of_any_length():
    run(2, large, on="torch")


def too_long(group):
    if group.rank == 0:
        with pytest.raises(weft.WireError) as caught:
            group.post([(1, torch.zeros(9, dtype=torch.uint8))], [(1, 8)]).wait()
    else:
        with pytest.raises(weft.WireError) as caught:
            group.post((), [(0, 8)]).wait()
    assert caught.value.culprit == 0
    return str(caught.value)


def test_who_sends_more_than_was_asked_for_is_named():
    for text in run(2, too_long, on="torch"):
        assert "rank 0 sent 9 bytes for a receive of 8" in text


def of_groups():
    names = [each.name for each in threading.enumerate() if each.name.startswith("weft ")]
    return sorted(name for name in names if name != "weft gloo")  # it makes a wire, and ends


def nothing_left(group):
    before = of_groups()
    with group.split([0, 1]) as part:
        assert len(of_groups()) == len(before) + 5  # two receive, two send, one watches
        large(part)
    assert of_groups() == before


def test_a_closed_wire_has_no_threads():
    run(2, nothing_left, on="torch")


def beside_a_frozen_peer():
    """Rank 1 is stopped in the middle. What rank 0 has left of that group, once it is closed."""
    with weft.init(timeout=60, wire="torch") as group:
        pids = [0] * group.size
        dist.all_gather_object(pids, os.getpid())
        before = held()
        group.set_timeout(patient(3.0))
        with group.split([0, 1]) as part:
            if group.rank == 1:
                part.post((), [(0, 8)]).wait()  # rank 0 has its end
                os.kill(os.getpid(), signal.SIGSTOP)
                return None
            part.post([(1, torch.tensor([0]))]).wait()
            with pytest.raises(weft.WireError) as caught:
                part.post((), [(1, 8)]).wait()
        until = time.monotonic() + patient(15.0)
        while held() != before and time.monotonic() < until:
            time.sleep(0.05)
        left = held()
        os.kill(pids[1], signal.SIGCONT)
        return str(caught.value), before, left


def held():
    """weft's threads, and how many files are open."""
    return of_groups(), len(os.listdir("/proc/self/fd"))


def test_a_wire_to_a_frozen_peer_closes_and_leaves_nothing():
    (text, before, left), _ = processes(2, beside_a_frozen_peer)
    assert "rank 1 does not answer" in text
    assert left == before


def dies_with_a_child(folder):
    """Rank 1 is killed, while a child that it has forked goes on."""
    with weft.init(wire="torch", timeout=300) as group:
        # the first barrier raises, too, where rank 1 is gone before its message there is read
        with pytest.raises(weft.WireError) as caught:
            weft.barrier()
            if group.rank == 1:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
                    child = os.fork()
                if child == 0:
                    os.setsid()
                    time.sleep(30)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            weft.barrier()
        (folder / "said").write_text(str(caught.value))


def test_a_death_is_seen_though_a_forked_child_goes_on(tmp_path):
    """The other rank has some seconds until whoever started it ends it, too."""
    with pytest.raises(RankFailure, match=r"(?s)rank 1 .*SIGKILL"):
        processes(2, dies_with_a_child, tmp_path)
    assert "rank 0: rank 1 died" in (tmp_path / "said").read_text()


def leaving(group):
    """Rank 0 goes while its peer sends what it never asks for, and tells it that it gives up."""
    before = of_groups()
    for _ in range(5):
        part = group.split([0, 1])
        sent = part.post([(0, torch.ones(1 << 20))]) if group.rank == 1 else None
        dense_all_reduce(group, torch.ones(1), "sum").wait()
        if sent is not None:
            sent.wait()
            part.abort("it had enough")
        part.close()
    assert of_groups() == before


def test_who_leaves_waits_for_nobody():
    run(2, leaving, on="torch")


def test_one_rank_alone_opens_nothing():
    with connect(dist.HashStore(), 0, 1, 5.0, wire="torch") as group:
        assert group.post().wait() == []
        assert group.split([0]).size == 1


def test_threads_make_groups_at_once_over_one_store():
    """gloo blocks in the connection to the store; in another order on each rank it must not."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port), dist.TCPStore("127.0.0.1", server.port)]

    def joined(rank, name):
        with connect(clients[rank], rank, 2, 20, name=name, wire="torch") as group:
            total = torch.tensor([rank + 1.0])
            dense_all_reduce(group, total, "sum").wait()
            return total.item()

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(joined, *first) for first in ((0, "a"), (1, "b"))]
        time.sleep(1.0)  # until each waits for the other rank
        rest = ((0, "b"), (1, "a"), (0, "c"), (1, "c"))
        calls += [pool.submit(joined, *each) for each in rest]
        assert [call.result() for call in calls] == [3.0] * 6


def test_a_group_of_wefts_own_has_one_thread():
    """Two of gloo's threads corrupt memory where a sparse all-reduce is under way (docs/ddp.md)."""
    of_torch = 2  # those of the default group
    # a group, and control links; the group inside the backend, and its group and links
    of_weft = 2 + 1 + 2
    right = of_torch + of_weft
    assert processes(2, threads_of_gloo, right, env={"WEFT_WIRE": "torch"}) == [right] * 2


def threads_of_gloo(right):
    with weft.init(timeout=20):
        group = dist.new_group(backend="weft")
        weft.barrier()
        weft.barrier(group=group)
        late = time.monotonic() + patient(20.0)
        while (count := count_of_gloo()) < right and time.monotonic() < late:
            time.sleep(0.01)  # a thread names itself when it first runs
        return count


def count_of_gloo():
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that connected has ended meanwhile
            count += task.read_text() == "pt_gloo_runloop\n"
    return count


@pytest.fixture
def gloo_connects_for_long(monkeypatch):
    """As it does where a rank has died that had said at the store where it listens; on rank 2 it
    fails at once, with the errors in the list that this gives."""
    released = threading.Event()
    errors = []

    def connecting(store, rank, *_):
        if rank == 2:
            raise errors[0]
        released.wait(patient(60.0))

    monkeypatch.setattr(_torch, "gloo_group", connecting)
    yield errors
    released.set()


def name_rank_2(store, ranks, timeout, text):
    """These ranks of three, as threads, all raise that it was rank 2."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(connect, store, rank, 3, timeout, wire="torch") for rank in ranks]
        for rank, call in zip(ranks, calls, strict=True):
            with pytest.raises(weft.WireError, match=f"^rank {rank}: .*: rank 2 {text}") as caught:
                call.result()
            assert caught.value.culprit == 2


def test_a_rank_that_dies_while_gloo_connects_links_is_named(gloo_connects_for_long, monkeypatch):
    monkeypatch.setattr(control, "PATIENCE", patient(1.0))
    store = dist.HashStore()
    statement = {"wire": "torch", "host": "", "carrier": "torch", "trouble": "", "endpoint": {}}
    dist.PrefixStore("weft/world/1", store).set("statement/2", json.dumps(statement))
    name_rank_2(store, [0, 1], 1.0, r"came, and then did not join the control links \(no answer")


@pytest.mark.parametrize("kind", [NoDevice, OSError])
def test_a_rank_at_which_gloo_cannot_listen_is_named_by_all_at_once(gloo_connects_for_long, kind):
    gloo_connects_for_long.append(kind("there is no such device"))
    text = r"did not join the control links \(there is no such device\)$"
    name_rank_2(dist.HashStore(), [0, 1, 2], patient(300.0), text)


def late(rank, make, monkeypatch):
    """Have a rank begin to connect late, and so answer late."""

    def make_late(start):
        if start.rank == rank:
            time.sleep(1.5)
        return make(start)

    monkeypatch.setattr(torch_gloo, "carrier", make_late)


def test_nobody_is_blamed_where_gloo_fails_and_all_ranks_are_there(
    gloo_connects_for_long, monkeypatch
):
    """It may fail on one rank because of another. Who is slow is there, and all know it in time."""
    monkeypatch.setattr(control, "PATIENCE", patient(5.0))
    gloo_connects_for_long.append(RuntimeError("connection\nclosed by peer"))
    late(1, torch_gloo.carrier, monkeypatch)
    store = dist.HashStore()
    links = dist.PrefixStore("links", dist.PrefixStore("weft/world/1", store))

    def joining(rank):
        with pytest.raises(weft.WireError) as caught:
            connect(store, rank, 3, patient(300.0), wire="torch")
        # a store that ends with this rank's program takes nothing from the others
        assert links.check([f"read {each}" for each in range(3)])
        return str(caught.value), caught.value.culprit

    with ThreadPoolExecutor(3) as pool:
        for rank, (said, culprit) in enumerate(pool.map(joining, range(3))):
            text = "gloo failed on rank 2 (connection closed by peer), though all ranks answer"
            assert said.startswith(f"rank {rank}: group 'world' of 3 ranks: it was not joined")
            assert text in said
            assert culprit is None


@pytest.fixture
def short_of_pauses(monkeypatch):
    """A wait at the store that would last to its end is an error, well before that."""

    def some(*_):
        for _ in range(5000):
            yield
            time.sleep(0.001)
        pytest.fail("it waits for what does not come")

    monkeypatch.setattr(control, "pauses", some)
    monkeypatch.setattr(store_module, "pauses", some)


def test_nobody_waits_for_an_answer_of_who_knows_already_what_came_of_it(short_of_pauses):
    """A store that is hosted there would end meanwhile, and its error be all that others have."""
    store = dist.HashStore()
    first, second = [control.RollCall(store, rank, 3) for rank in range(2)]
    store.set("read 2", "")  # by one that has not answered
    with ThreadPoolExecutor(1) as pool:
        concluded = pool.submit(first.explain, NoDevice("there is no such device"))
        store.wait(["outcome"])
        heard = second.explain(RuntimeError("connection closed by peer"))
        told = concluded.result()
    text = "rank 0 did not join the control links (there is no such device)"
    assert (str(heard), heard.culprit) == (str(told), told.culprit) == (text, 0)
    assert store.check(["here 0", "here 1"]) and not store.check(["here 2"])
    # who hears of it before anybody calls the roll, and who says that all are joined
    told = dist.PrefixStore("told", store)
    told.set("read 1", "")
    with pytest.raises(control.NotJoinedError):
        raise control.RollCall(told, 0, 2).explain(NoDevice("there is no such device"))
    with pytest.raises(control.NotJoinedError):
        control.RollCall(told, 1, 2).check()
    assert told.check(["here 1"])
    alone = control.RollCall(dist.PrefixStore("alone", store), 0, 1)
    alone.wait_for_all(time.monotonic())
    assert store.check(["alone/here 0"])


def test_a_rank_that_is_connected_and_gives_up_waiting_names_those_that_are_not(short_of_pauses):
    store = dist.HashStore()
    first, second = [control.RollCall(store, rank, 2) for rank in range(2)]

    def connecting():
        while True:
            second.check()

    with ThreadPoolExecutor(1) as pool:
        hearing = pool.submit(connecting)
        store.set("connected 0", "")
        error = first.explain(TimeoutError("gloo has not connected all ranks"))
        with pytest.raises(control.NotJoinedError) as caught:
            hearing.result()
    assert str(error) == str(caught.value)
    assert str(error).startswith("gloo has not connected rank 1 in time, though all ranks answer")
    assert error.culprit is None


def test_a_rank_that_stood_still_is_not_joined_by_what_others_wrote_before_they_gave_up():
    store = dist.HashStore()
    store.set("connected 1", "")
    store.set("read 1", "")
    late, told = [control.RollCall(store, rank, 2) for rank in range(2)]
    with pytest.raises(control.NotJoinedError, match="rank 0 came 6 s too late to join") as caught:
        late.hold(lambda: None, time.monotonic() - 6.0)
    assert caught.value.culprit == 0
    with pytest.raises(control.NotJoinedError, match="rank 0 came 6 s too late to join"):
        told.check()
    # the others were joined, and may be there still
    joined = dist.PrefixStore("joined", store)
    joined.set("connected 1", "")
    joined.set("outcome", '{"text": "", "culprit": null, "absent": []}')
    assert control.RollCall(joined, 0, 2).hold(lambda: "joined", time.monotonic() - 6.0) == "joined"


def test_who_was_connected_in_time_is_blamed_for_nothing_that_it_does_late(monkeypatch):
    """Neither by itself nor by others, where the machine is busy; another one is to blame."""
    monkeypatch.setattr(control, "HELD_UP", 0.1)
    store = dist.HashStore()
    store.set("connected 0", "")

    class Held:
        """This rank stands still after it has said that it is connected."""

        has_looked = False

        def __getattr__(self, name):
            return getattr(store, name)

        def check(self, keys):
            if not self.has_looked:
                self.has_looked = True
                time.sleep(1.0)
            return store.check(keys)

    calls = control.RollCall(Held(), 1, 3, patience=0.1)
    with pytest.raises(
        control.NotJoinedError, match="rank 2 came, and then did not join"
    ) as caught:
        calls.hold(lambda: None, time.monotonic() + 0.1)
    assert caught.value.culprit == 2


def test_who_takes_long_to_look_at_all_ranks_did_not_stand_still(monkeypatch):
    monkeypatch.setattr(control, "HELD_UP", 0.1)
    store = dist.HashStore()

    class Slow:
        def check(self, keys):
            time.sleep(0.1)
            return store.check(keys)

        def __getattr__(self, name):
            return getattr(store, name)

    store.set("connected 1", "")
    roll = control.RollCall(Slow(), 0, 2, patience=0.1)
    assert roll.hold(lambda: "joined", time.monotonic() + 0.05) == "joined"


def test_ranks_are_joined_once_gloo_has_connected_all_of_them(monkeypatch):
    """One that is not connected is said to be not, though others are."""
    real = _torch.gloo_group

    def connecting(store, rank, *rest):
        made = real(store, rank, *rest)
        if rank == 1:
            raise RuntimeError("connection closed by peer")
        return made

    monkeypatch.setattr(_torch, "gloo_group", connecting)
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(connect, store, rank, 3, patient(300.0), wire="torch") for rank in range(3)
        ]
        for call in calls:
            with pytest.raises(weft.WireError, match="gloo failed on rank 1") as caught:
                call.result()
            assert caught.value.culprit is None
