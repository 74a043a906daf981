"""Wires by name, and how one is made on every rank at once."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weft
from weft.base.memory import Pool
from weft.failure.detector import EXCHANGED
from weft.testing import round_wire
from weft.wire import mpi, torch_gloo
from weft.wire.factory import Start, make_wire
from weft.wire.in_process.threads import thread_wires
from weft.wire.interface import Failure, Features
from weft.wire.registry import register_wire, unregister_wire, wire_named, wire_names
from weft.wire.tcp import wire as tcp

# Names -------------------------------------------------------------------------------------------


def make_mine(start):
    raise NotImplementedError


def make_other(start):
    raise NotImplementedError


@pytest.fixture
def mine():
    register_wire("mine", make_mine)
    yield "mine"
    unregister_wire("mine")


def test_a_registered_wire_is_found_by_its_name(mine):
    assert wire_named(mine) is make_mine
    assert mine in wire_names()


def test_the_error_about_an_unknown_name_lists_the_names_there_are(mine):
    with pytest.raises(weft.WeftError, match=r"wire 'theirs' is unknown: use one of .*\bmine\b"):
        wire_named("theirs")


def test_every_error_about_a_name_lists_the_names_there_are(mine):
    known = "there are mine, mpi, tcp, torch$"
    with pytest.raises(weft.WeftError, match=rf"wire 'theirs' was not registered; {known}"):
        unregister_wire("theirs")
    with pytest.raises(weft.WeftError, match=rf"'tcp' is one of weft's own, which stay; {known}"):
        unregister_wire("tcp")
    with pytest.raises(weft.WeftError, match=rf"already, one of weft's own: .*; {known}"):
        register_wire("torch", make_mine)
    with pytest.raises(weft.WeftError, match=rf"already, that of {__name__}: .*; {known}"):
        register_wire(mine, make_other)
    with pytest.raises(weft.WeftError, match=rf"'a b' cannot be the name of a wire: .*; {known}"):
        register_wire("a b", make_other)
    assert wire_named(mine) is make_mine


@pytest.mark.parametrize(
    "name",
    ["", " ", "x y", "-x", ".x", "x/y", "x,y", "é", 3, None],
)
def test_what_cannot_be_a_name_is_refused(name):
    with pytest.raises(weft.WeftError, match=r"cannot be the name of a wire: use letters and dig"):
        register_wire(name, make_mine)


@pytest.mark.parametrize("name", ["x", "X9", "9", "my-wire", "my_wire", "my.wire-2"])
def test_what_can_be_a_name(name):
    register_wire(name, make_mine)
    assert wire_named(name) is make_mine
    unregister_wire(name)


@pytest.mark.parametrize("factory", [3, None, "weft.wire.tcp.wire:make"])
def test_what_is_no_factory_is_refused(factory):
    with pytest.raises(weft.WeftError, match=f"'mine' needs a factory.* {factory!r} cannot be ca"):
        register_wire("mine", factory)
    assert "mine" not in wire_names()


def test_a_wire_that_was_replaced_comes_back(mine):
    register_wire(mine, make_other, replace=True)
    assert wire_named(mine) is make_other
    unregister_wire(mine)
    assert wire_named(mine) is make_mine


def test_weft_s_own_are_found():
    found = [wire_named(name) for name in ("mpi", "tcp", "torch")]
    assert found == [mpi.make, tcp.make, torch_gloo.make]


def test_one_of_weft_s_own_is_replaced_and_comes_back():
    register_wire("tcp", make_mine, replace=True)
    assert wire_named("tcp") is make_mine
    unregister_wire("tcp")
    assert wire_named("tcp") is tcp.make


def test_what_weft_brings_for_tests_is_registered_as_any_other():
    register_wire("rounds", round_wire)
    unregister_wire("rounds")
    assert "rounds" not in wire_names()


EARLY = """
import sys, weft
sys.modules.pop("weft.wire.torch_gloo", None)  # which the template has imported
def make(start): raise NotImplementedError
for change in (lambda: weft.register_wire("tcp", make), lambda: weft.wire.unregister_wire("zz")):
    try:
        change()
    except weft.WeftError as error:
        print(error)
assert "weft.wire.torch_gloo" not in sys.modules
with weft.init() as group:
    print(group.size)
"""


def test_weft_s_own_names_are_known_from_the_start(programs):
    """In a process that has used no wire."""
    out, err = programs(EARLY).communicate()
    assert out.splitlines() == [
        "wire 'tcp' is registered already, one of weft's own: use another name, or replace=True to "
        "take its place; there are mpi, tcp, torch",
        "wire 'zz' was not registered; there are mpi, tcp, torch",
        "1",
    ], err


# What packages offer -----------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(module, name, source)` installs a package that offers a wire of that name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(module, name, source):
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[weft.wires]\n{name} = {module}:make\n")

    return install


def test_a_package_is_imported_when_its_wire_is_asked_for(installed):
    installed("offers_a_wire", "offered", "import os; os.environ['OFFERED'] = 'loaded'\nmake = id")
    try:
        assert "offered" in wire_names()
        assert "OFFERED" not in os.environ
        assert wire_named("offered") is id
        assert os.environ["OFFERED"] == "loaded"
    finally:
        os.environ.pop("OFFERED", None)


def test_what_a_program_registers_comes_before_what_a_package_offers(installed, mine):
    installed("offers_mine", mine, "raise OSError")
    assert wire_named(mine) is make_mine


def test_weft_s_own_come_before_what_a_package_offers(installed):
    installed("offers_tcp", "tcp", "raise OSError")
    assert wire_named("tcp") is tcp.make


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("raises", "raise OSError('no licence')", "raises:make raised OSError: no licence"),
        ("makes_none", "", "makes_none:make raised AttributeError"),
        ("no_function", "make = 3", "no_function:make is int, not a function that makes a wire"),
    ],
)
def test_a_package_that_cannot_offer_its_wire_is_told_of(installed, module, source, why):
    installed(module, "faulty", source)
    known = "there are faulty, mpi, tcp, torch$"
    with pytest.raises(weft.WeftError, match=f"wire 'faulty' .* is missing: {why}.*; {known}"):
        wire_named("faulty")


def test_two_packages_that_offer_one_name_are_refused(installed):
    installed("first_of_two", "twice", "make = id")
    installed("second_of_two", "twice", "make = len")
    offers = "as first_of_two:make and second_of_two:make: uninstall all but one"
    with pytest.raises(weft.WeftError, match=f"{offers}; there are mpi, tcp, torch, twice$"):
        wire_named("twice")


# Making one --------------------------------------------------------------------------------------

SIZE = 3


class Exchange:
    """`exchange` of ranks that are threads; a rank that does not come ends it for all."""

    def __init__(self):
        self.meeting = threading.Barrier(SIZE, timeout=10)
        self.messages = [b""] * SIZE

    def of(self, rank):
        def exchange(data):
            assert len(data) <= EXCHANGED
            self.messages[rank] = data
            self.meeting.wait()
            messages = [*self.messages]
            self.meeting.wait()
            return messages

        return exchange


def made_by(factory):
    """What `make_wire` returned or raised on each rank."""
    shared = Exchange()

    def rank_makes(rank):
        start = Start(rank, SIZE, torch.device("cpu"), 10.0, "here", shared.of(rank), Pool())
        try:
            return make_wire("mine", factory, start)
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as ranks:
        return list(ranks.map(rank_makes, range(SIZE)))


def errors_of(factory):
    """The text that every rank raised, which has to be the same, and each rank's error."""
    errors = made_by(factory)
    assert {type(error) for error in errors} == {weft.WeftError}, errors
    assert len({str(error) for error in errors}) == 1, errors
    return str(errors[0]), errors


def test_every_rank_has_its_wire():
    wires = thread_wires(SIZE)

    def make(start):
        assert start.exchange(b"%d" % start.rank) == [b"0", b"1", b"2"]
        return wires[start.rank]

    assert made_by(make) == wires


def test_a_factory_that_raises_on_one_rank_is_named_on_all():
    wires = thread_wires(SIZE)

    def make(start):
        if start.rank == 1:
            raise OSError("no device")
        return wires[start.rank]

    text, errors = errors_of(make)
    assert text == "wire 'mine' cannot be used: on rank 1 its factory raised OSError: no device"
    assert isinstance(errors[1].__cause__, OSError)
    assert wires[0].failure() is not None, "the wire of another rank is closed"


def test_a_factory_that_raises_ends_the_exchange_of_the_others():
    def make(start):
        if start.rank == 1:
            raise OSError("no device")
        try:
            start.exchange(b"")
        except weft.WeftError as error:
            assert "on rank 1 its factory raised OSError" in str(error)
        return start.exchange(b"")  # and does so again

    text, _ = errors_of(make)
    assert text == "wire 'mine' cannot be used: on rank 1 its factory raised OSError: no device"


def test_factories_exchange_equally_often():
    wires = thread_wires(SIZE)

    def make(start):
        if start.rank == 2:
            start.exchange(b"")
        return wires[start.rank]

    text, _ = errors_of(make)
    assert "the factory on rank 0 has returned, while that on rank 2 still exchanges" in text
    assert wires[0].failure() is not None


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError])
def test_who_lost_another_in_its_factory_is_not_to_blame(error):
    def make(start):
        raise KeyError("no such device") if start.rank == 2 else error("rank 2 hung up")

    text, _ = errors_of(make)
    assert (
        text
        == "wire 'mine' cannot be used: on rank 2 its factory raised KeyError: 'no such device'"
    )


@pytest.mark.parametrize("nbytes", [1 << 14, (1 << 14) + 1])
def test_a_factory_exchanges_up_to_16_kib(nbytes):
    wires = thread_wires(SIZE)

    def make(start):
        assert start.exchange(bytes(nbytes)) == [bytes(nbytes)] * SIZE
        return wires[start.rank]

    if nbytes == 1 << 14:
        assert made_by(make) == wires
    else:
        text, _ = errors_of(make)
        assert text.endswith("WeftError: 16385 bytes are too many to exchange at once: 16384 are")


def test_a_long_error_of_a_factory_is_told_as_far_as_it_fits():
    wires = thread_wires(SIZE)

    def make(start):
        if start.rank == 1:
            raise OSError("no device: " + "\N{EURO SIGN}\udc80" * 10_000)
        return wires[start.rank]

    text, _ = errors_of(make)
    assert text.startswith("wire 'mine' cannot be used: on rank 1 its factory raised OSError: no d")


class Early:
    """What has come early, by rank; each rank's `exchange` is that of others in `Exchange`."""

    def __init__(self):
        self.shared = Exchange()
        self.voted = threading.Event()

    def of(self, rank):
        meets = self.shared.of(rank)

        def exchange(data):
            self.shared.messages[rank] = data
            self.voted.set()
            return meets(data)

        return exchange

    def early(self):
        return [each for each in self.shared.messages if each]


def test_a_factory_that_waits_for_others_hears_that_one_has_raised():
    meeting = Early()

    def make(start):
        if start.rank == 1:
            raise KeyError("no such device")
        assert meeting.voted.wait(10.0)
        start.check()
        raise AssertionError("nothing was heard")

    def rank_makes(rank):
        start = Start(rank, SIZE, torch.device("cpu"), 10.0, "here", meeting.of(rank), Pool())
        with pytest.raises(weft.WeftError) as caught:
            make_wire("mine", make, start, meeting.early)
        return str(caught.value)

    with ThreadPoolExecutor(SIZE) as ranks:
        texts = set(ranks.map(rank_makes, range(SIZE)))
    assert texts == {
        "wire 'mine' cannot be used: on rank 1 its factory raised KeyError: 'no such device'"
    }


class Exchanged(Exception):
    """What an exchange raises where a rank has died."""


def test_what_the_exchange_raises_leaves_as_it_is_and_is_not_asked_again():
    calls = []

    def exchange(data):
        calls.append(data)
        raise Exchanged

    start = Start(0, SIZE, torch.device("cpu"), 10.0, "here", exchange, Pool())
    with pytest.raises(Exchanged):
        make_wire("mine", lambda start: start.exchange(b""), start)
    assert len(calls) == 1


def test_a_factory_that_waits_for_one_that_died_is_told_so():
    """What tells of the death, then and in the vote, is what leaves."""

    def dead(*_):
        raise Exchanged

    def make(start):
        start.check()

    start = Start(0, SIZE, torch.device("cpu"), 10.0, "here", dead, Pool())
    with pytest.raises(Exchanged):
        make_wire("mine", make, start, dead)


def with_features(*features):
    """A factory whose wires have these features, by rank."""
    wires = thread_wires(SIZE)
    for wire, each in zip(wires, features, strict=True):
        wire.features = each
    return lambda start: wires[start.rank]


def test_features_that_differ_are_named_on_all_ranks():
    text, _ = errors_of(with_features(Features(), Features(), Features(exact=True)))
    assert "on rank 2 its features have exact True, on rank 0 False" in text


def test_features_are_compared_whatever_their_order():
    reduces = [("sum", torch.float32), ("max", torch.float32), ("sum", torch.float64)]
    features = [Features(reduces=frozenset(reduces[i:] + reduces[:i])) for i in range(SIZE)]
    wires = thread_wires(SIZE)
    for wire, each in zip(wires, features, strict=True):
        wire.features = each
        wire.all_reduce = lambda tensor, op: wire.post()  # noqa: B023
    assert made_by(lambda start: wires[start.rank]) == wires


def broken(change):
    """A factory whose wire of rank 1 is changed."""
    wires = thread_wires(SIZE)
    change(wires[1])
    return lambda start: wires[start.rank]


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (lambda start: "wire", "on rank 0 its factory returned str, which is no Wire"),
        (
            broken(lambda wire: setattr(wire, "features", {})),
            "on rank 1 the wire's features are dict, not Features",
        ),
        (broken(lambda wire: setattr(wire, "rank", 0)), "rank 1 the wire has rank 0, and .* has 1"),
        (broken(lambda wire: setattr(wire, "size", 9)), "rank 1 the wire has size 9, and .* has 3"),
        (
            broken(lambda wire: setattr(wire, "device", torch.device("meta"))),
            "rank 1 the wire has device meta, and the group has cpu",
        ),
        (
            broken(lambda wire: setattr(wire, "features", Features(lockstep=True))),
            "rank 1 the wire says lockstep, and has no `among`",
        ),
        (
            broken(
                lambda wire: setattr(
                    wire, "features", Features(reduces=frozenset({("sum", torch.float32)}))
                )
            ),
            "rank 1 the wire says what it reduces, and has no `all_reduce`",
        ),
        (
            broken(lambda wire: wire.abort(Failure("broken", None, "no memory"))),
            "rank 1 the wire has failed already: no memory",
        ),
    ],
)
def test_what_is_no_wire_of_the_group_is_refused_on_all_ranks(factory, why):
    text, _ = errors_of(factory)
    assert re.search(why, text), text
