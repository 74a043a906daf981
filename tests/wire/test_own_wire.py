"""A wire that a program registers: groups run over it, and who gets what wrong is named by all."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import weft
from weft.group.process_group import connect, store_of
from weft.testing import RankFailure, launch, processes, send
from weft.testing.pace import patient
from weft.wire import torch_gloo
from weft.wire.registry import register_wire
from weft.wire.tcp import wire as tcp

BROKEN = 1
"""The rank whose factory does something wrong."""


class Mine:
    """A wire of a program's own, which passes everything on to another."""

    def __init__(self, inside):
        self.inside = inside
        self.rank = inside.rank
        self.size = inside.size
        self.device = inside.device
        self.features = inside.features
        for name in ("post", "abort", "failure", "close"):
            setattr(self, name, getattr(inside, name))

    def lease(self, nbytes):
        return None


def make_mine(start):
    assert start.host and start.timeout > 0
    # the group sets whatever a factory may use
    assert None not in [getattr(start, field.name) for field in dataclasses.fields(start)]
    assert start.exchange(bytes([start.rank])) == [bytes([rank]) for rank in range(start.size)]
    return Mine(tcp.make(start))


def raising(start):
    if start.rank == BROKEN:
        raise OSError("there is no such network here")
    return make_mine(start)


def nothing(start):
    return None if start.rank == BROKEN else make_mine(start)


def killed(start):
    if start.rank == BROKEN:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_mine(start)


def killed_among_connections(start):
    """The others wait for its connection then."""

    def exchange(data):
        messages = start.exchange(data)
        if start.rank == BROKEN:
            os.kill(os.getpid(), signal.SIGKILL)
        return messages

    return tcp.make(dataclasses.replace(start, exchange=exchange))


def killed_in_gloo(start):
    if start.rank == BROKEN:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch_gloo.make(start)


def stopped(start):
    """The others wait for its connection then."""

    def exchange(data):
        messages = start.exchange(data)
        if start.rank == BROKEN:
            send(os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        return messages

    return tcp.make(dataclasses.replace(start, exchange=exchange))


def raising_among_connections(start):
    def exchange(data):
        messages = start.exchange(data)
        if start.rank == BROKEN:
            raise KeyError("no such device")
        return messages

    return tcp.make(dataclasses.replace(start, exchange=exchange))


def silent(start):
    if start.rank == BROKEN:
        time.sleep(4.0)
    return make_mine(start)


def summed(**options):
    with weft.init(**options) as group:
        rows = torch.tensor([group.rank, 9]), torch.ones(2, 3)
        indices, values = weft.sparse_all_reduce(rows)
        large = weft.all_reduce(torch.full((300_000,), float(group.rank + 1)))
        return indices.tolist(), values[-1].tolist(), large[0].item(), large.unique().numel()


def over_mine():
    register_wire("mine", make_mine)
    return summed(timeout=30, wire="mine")


def expected(size):
    return [*range(size), 9], [float(size)] * 3, size * (size + 1) / 2, 1


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_group_runs_over_a_registered_wire(size):
    assert processes(size, over_mine) == [expected(size)] * size


def after_a_broken(factory):
    register_wire("mine", factory)
    with pytest.raises(weft.Error) as caught:
        weft.init(timeout=30, wire="mine")
    return str(caught.value), summed(timeout=30)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (raising, "on rank 1 its factory raised OSError: there is no such network here"),
        (nothing, "on rank 1 its factory returned NoneType, which is no Wire"),
        (
            raising_among_connections,
            "on rank 1 its factory raised KeyError: 'no such device'",
        ),
    ],
)
def test_what_goes_wrong_in_a_factory_raises_on_all_and_the_next_init_works(factory, text):
    for said, result in processes(3, after_a_broken, factory):
        assert said == (
            f"wire 'mine' cannot be used: {text}; mend it there, or give all ranks another "
            "weft.init(wire=) or WEFT_WIRE; there are mine, mpi, tcp, torch"
        )
        assert result == expected(3)


def during_a_death(factory):
    register_wire("mine", factory)
    began = time.monotonic()
    with pytest.raises(weft.WireError) as caught:
        weft.init(timeout=2 if factory is silent else 30, wire="mine")
    return caught.value.culprit, str(caught.value), time.monotonic() - began < 20.0


def tells(folder, factory, timeout):
    """What this rank raises, in a file: of ranks that do not all end there are no results."""
    register_wire("mine", factory)
    with pytest.raises(weft.WireError) as caught:
        weft.init(timeout=timeout, wire="mine")
    (folder / os.environ["RANK"]).write_text(f"{caught.value.culprit} {caught.value}")


def told(folder):
    return {int(each.name): each.read_text() for each in folder.iterdir()}


@pytest.mark.parametrize("factory", [killed, killed_among_connections, killed_in_gloo])
def test_who_dies_in_a_factory_is_named_by_the_others_long_before_the_deadline(factory, tmp_path):
    """They have some seconds until whoever started them ends them."""
    with pytest.raises(RankFailure, match=r"(?s)rank 1 .*SIGKILL"):
        processes(3, tells, tmp_path, factory, 300)
    texts = told(tmp_path)
    assert sorted(texts) == [0, 2]
    for rank, text in texts.items():
        assert text.startswith(f"1 rank {rank}: rank 1 died")


def tells_the_launcher(folder, factory, timeout):
    tells(folder, factory, timeout)
    send("told")


def test_who_is_stopped_in_a_factory_is_named_by_the_others(tmp_path):
    """It is killed once they have told, since a rank that is stopped would never end."""
    heard = []

    def listen(rank, message):
        heard.append(message)
        if heard.count("told") == 2:
            (pid,) = (message for message in heard if message != "told")
            os.kill(pid, signal.SIGKILL)

    arguments, env = (tmp_path, stopped, 3), {"OMP_NUM_THREADS": "1"}
    with pytest.raises(RankFailure, match=r"(?s)rank 1 .*SIGKILL"):
        launch(3, tells_the_launcher, arguments, on_message=listen, timeout=patient(60.0), env=env)
    texts = told(tmp_path)
    assert sorted(texts) == [0, 2]
    for rank, text in texts.items():
        assert text.startswith(f"1 rank {rank}: rank 1 does not answer (stopped, cut off")


def test_who_says_nothing_in_a_factory_is_named_by_all():
    results = processes(3, during_a_death, silent)
    for rank in (0, 2):
        culprit, text, in_time = results[rank]
        assert culprit == BROKEN and in_time
        assert f"rank {rank}: rank 1 did not come to make the wire within 2 s" in text


def differing():
    register_wire("mine", make_mine)
    if os.environ["RANK"] == "1":
        register_wire("other", make_mine)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=30, wire="mine" if os.environ["RANK"] == "2" else "tcp")
    return str(caught.value), summed(timeout=30)


def test_ranks_that_ask_for_different_wires_are_told_alike():
    """Of the names there are they are told those that every rank has."""
    for text, result in processes(3, differing):
        assert text == (
            "rank 0 was asked for wire 'tcp', and rank 2 for 'mine': give all ranks the same "
            "weft.init(wire=), WEFT_WIRE and WEFT_SAFE; there are mine, mpi, tcp, torch"
        )
        assert result == expected(3)


def known_to_one():
    if os.environ["RANK"] == "1":
        register_wire("mine", make_mine)
    with weft.init(timeout=300) as group, pytest.raises(weft.WeftError) as caught:
        connect(store_of(dist.group.WORLD), group.rank, 3, 300, name="x", wire="mine")
    return str(caught.value)


def test_a_wire_that_is_registered_on_one_rank_only_is_refused_by_all():
    (text,) = set(processes(3, known_to_one))
    assert text == (
        "rank 0: wire 'mine' is unknown: use one of mpi, tcp, torch, or register it first, on "
        "every rank"
    )


def in_place_of(replaced, factory):
    """The threads that carry something to or from the peer, over what is called torch."""
    if replaced:
        register_wire("torch", factory, replace=True)
    with weft.init(timeout=30, wire="torch") as group:
        weft.barrier()
        between = f" {group.rank}-{1 - group.rank}"
        return [each.name for each in threading.enumerate() if each.name.endswith(between)]


def test_control_links_go_by_what_a_wire_is_and_not_by_its_name():
    """Over weft's own wire "torch" they are carried by gloo, and so by threads."""
    assert processes(2, in_place_of, True, make_mine) == [[], []]
    assert all(processes(2, in_place_of, False, None))


def unknown():
    register_wire("mine", make_mine)
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=30, wire="yours")
    return str(caught.value)


def test_an_unknown_name_lists_the_names_there_are():
    for text in processes(2, unknown):
        assert "wire 'yours' is unknown: use one of mine, mpi, tcp, torch" in text
