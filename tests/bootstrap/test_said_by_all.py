"""What ranks say at the store around gloo's connecting: who is to blame, and all say the same."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from weft.base._torch import NoDevice
from weft.base.pace import patient
from weft.bootstrap import gathering
from weft.bootstrap.gathering import NotJoinedError, said_by_all
from weft.rendezvous import store as store_module


def failures(futures):
    """The text and the culprit of what each of these raised."""
    errors = [each.exception(patient(60.0)) for each in futures]
    assert all(isinstance(each, NotJoinedError) for each in errors), errors
    return {(str(each), each.culprit) for each in errors}


def test_every_rank_hears_what_all_say():
    store = dist.HashStore()
    until = time.monotonic() + patient(60.0)
    with ThreadPoolExecutor(3) as pool:
        said = [
            pool.submit(said_by_all, store, rank, 3, 10 * rank, "go on", until) for rank in range(3)
        ]
        assert [each.result() for each in said] == [[0, 10, 20]] * 3


def test_who_does_not_come_is_named_by_all_at_the_first_deadline():
    store = dist.HashStore()
    ends = [time.monotonic() + seconds for seconds in (0.2, 600.0)]
    with ThreadPoolExecutor(2) as pool:
        said = [
            pool.submit(said_by_all, store, rank, 3, "", "connect", ends[rank]) for rank in range(2)
        ]
        ((text, culprit),) = failures(said)
    assert text.startswith("rank 2 came, and then did not connect") and culprit == 2


def test_who_comes_long_after_the_deadline_blames_itself_though_the_others_wait_no_more(
    monkeypatch,
):
    monkeypatch.setattr(store_module, "HELD_UP", 0.1)
    store = dist.HashStore()
    late = 10 * patient(gathering.HELD_UP)
    with pytest.raises(
        NotJoinedError, match=r"rank 0 came \d+ s too late to go on: was it stop"
    ) as caught:
        said_by_all(store, 0, 2, "", "go on", time.monotonic() - late)
    assert caught.value.culprit == 0
    with pytest.raises(NotJoinedError, match=r"rank 0 came \d+ s too late") as caught:
        said_by_all(store, 1, 2, "", "go on", time.monotonic() + 600.0)
    assert caught.value.culprit == 0


@pytest.mark.parametrize("lost", [[], [1]])
def test_who_is_to_blame_is_waited_for_where_it_is_there(monkeypatch, lost):
    """The store may end with the first, and the other would not hear why."""
    monkeypatch.setattr(store_module, "HELD_UP", 600.0)
    store = dist.HashStore()
    failure = "rank 1: it cannot listen", 1
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store_module.first_to_fail, store, 0, 2, failure, lost)
        store.wait(["read/0"])
        if not lost:
            with pytest.raises(TimeoutError):
                first.result(0.2)
            assert store_module.first_to_fail(store, 1, 2, ("another", None)) == failure
        assert first.result(patient(60.0)) == failure


def test_who_stood_still_after_it_had_said_so_is_not_joined(monkeypatch):
    """By what others wrote before they gave up, who could not say so: the store is hosted here."""
    monkeypatch.setattr(gathering, "HELD_UP", 0.1)
    monkeypatch.setattr(store_module, "HELD_UP", 0.1)
    until = time.monotonic() + 0.2

    def exchange(*_):
        time.sleep(0.2 + 2 * patient(0.1))
        return ["", ""]

    monkeypatch.setattr(gathering, "exchange", exchange)
    with pytest.raises(NotJoinedError, match=r"rank 0 came \d+ s too late to connect") as caught:
        said_by_all(dist.HashStore(), 0, 2, "", "connect", until)
    assert caught.value.culprit == 0


@pytest.mark.parametrize(
    ("error", "culprit", "text"),
    [
        (NoDevice("no such device"), 0, "rank 0 did not connect (no such device)"),
        (OSError(24, "Too many open files"), 0, "rank 0 did not connect ([Errno 24] Too many open"),
        (
            RuntimeError("wait timeout"),
            None,
            "gloo failed on rank 0 (wait timeout), though all ranks",
        ),
    ],
)
def test_what_gloo_raises_on_one_rank_all_raise(monkeypatch, error, culprit, text):
    def init_group(spec, store, rank, *_):
        if rank == 0:
            raise error

    monkeypatch.setattr(gathering, "init_group", init_group)
    store = dist.HashStore()
    deadline = time.monotonic() + patient(60.0)
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(gathering.connect_all, store, rank, 2, "gloo", 60.0, deadline, ["lo"])
            for rank in range(2)
        ]
        ((said, blamed),) = failures(ranks)
    assert said.startswith(text) and blamed == culprit
