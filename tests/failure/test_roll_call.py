"""The roll call of ranks that a library connects: who is to blame, and that all say the same."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from weft.base._torch import NoDevice
from weft.failure import control
from weft.rendezvous import store as store_module

roll_call = functools.partial(control.RollCall, step="join the control links", patience=5.0)


@pytest.mark.parametrize("error", [NoDevice("no such device"), OSError(24, "Too many open files")])
def test_a_rank_that_cannot_take_the_step_is_named_at_once_by_all(error):
    """Whatever the others meet meanwhile."""
    store = dist.HashStore()
    store.set("read 1", "")
    failing, other = [roll_call(store, rank, 2) for rank in range(2)]

    def fails():
        raise error

    with pytest.raises(control.NotJoinedError) as caught:
        failing.hold(fails, time.monotonic() + 5.0)
    told = other.explain(RuntimeError("wait timeout"))
    assert str(told) == str(caught.value) == f"rank 0 did not join the control links ({error})"
    assert told.culprit == caught.value.culprit == 0


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


def fails():
    """A step that a rank is too late for."""
    raise RuntimeError("connection closed by peer")


def test_nobody_waits_for_an_answer_of_who_knows_already_what_came_of_it(short_of_pauses):
    """A store that is hosted there would end meanwhile, and its error be all that others have."""
    store = dist.HashStore()
    first, second = [roll_call(store, rank, 3) for rank in range(2)]
    store.set("read 2", "")  # by one that has not answered
    with ThreadPoolExecutor(1) as pool:
        concluded = pool.submit(first.hold, fails, time.monotonic() - 6.0)
        store.wait(["outcome"])
        heard = second.explain(RuntimeError("connection closed by peer"))
        told = concluded.exception()
    text = "rank 0 came 6 s too late to join the control links: was it stopped?"
    assert (str(heard), heard.culprit) == (str(told), told.culprit) == (text, 0)
    assert store.check(["here 0", "here 1"]) and not store.check(["here 2"])
    # who hears of it before anybody calls the roll, and who says that all are joined
    told = dist.PrefixStore("told", store)
    told.set("read 1", "")
    with pytest.raises(control.NotJoinedError):
        roll_call(told, 0, 2).hold(fails, time.monotonic() - 6.0)
    with pytest.raises(control.NotJoinedError):
        roll_call(told, 1, 2).check()
    assert told.check(["here 1"])
    alone = roll_call(dist.PrefixStore("alone", store), 0, 1)
    alone.wait_for_all(time.monotonic())
    assert store.check(["alone/here 0"])


def test_a_rank_that_is_connected_and_gives_up_waiting_names_those_that_are_not(short_of_pauses):
    store = dist.HashStore()
    first, second = [roll_call(store, rank, 2) for rank in range(2)]

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
    late, told = [roll_call(store, rank, 2) for rank in range(2)]
    with pytest.raises(control.NotJoinedError, match="rank 0 came 6 s too late to join") as caught:
        late.hold(lambda: None, time.monotonic() - 6.0)
    assert caught.value.culprit == 0
    with pytest.raises(control.NotJoinedError, match="rank 0 came 6 s too late to join"):
        told.check()
    # the others were joined, and may be there still
    joined = dist.PrefixStore("joined", store)
    joined.set("connected 1", "")
    joined.set("outcome", '{"text": "", "culprit": null, "absent": []}')
    assert roll_call(joined, 0, 2).hold(lambda: "joined", time.monotonic() - 6.0) == "joined"


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

    calls = roll_call(Held(), 1, 3, patience=0.1)
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
    roll = roll_call(Slow(), 0, 2, patience=0.1)
    assert roll.hold(lambda: "joined", time.monotonic() + 0.05) == "joined"
