"""The opening exchange: directly and by combining, the same conclusion on every rank."""

from __future__ import annotations

import pytest

import weft
from weft.call.combining import DIRECT, partners
from weft.call.opening import opened
from weft.call.statement import BODY, CAP
from weft.testing import spmd
from weft.wire.interface import MEETS


def total(lower, upper):
    return number(*(int.from_bytes(each, "little") for each in (lower, upper)))


def joined(lower, upper):
    return b"".join((lower, upper))


def number(*values):
    return sum(values).to_bytes(8, "little")


def fields_of(group, fields=(), error=None, name="test"):
    """What a call agrees on."""
    with opened(group, name, dict(fields), error, number(0), total) as opening:
        return opening.fields


@spmd(1, 2, 3, 7, DIRECT, DIRECT + 1, 20, 32, 33, on=("threads",))
def test_bodies_arrive_in_rank_order(group):
    for _ in range(2):
        body = bytes([group.rank])
        with opened(group, "test", {"what": "same"}, None, body, joined) as opening:
            assert [*b"".join(opening.read(bytes))] == list(range(group.size))
            assert opening.fields["what"] == "same"


@spmd(DIRECT + 1, 24, 32, on=("threads",))
def test_many_ranks_open_a_call_with_few_partners_each(group):
    fields_of(group)
    partner, others = partners(group.rank, group.size)
    assert {*group.traffic.to} == {*others} | ({partner} - {None})


@spmd(1, 3, 18, on=("threads",))
def test_what_some_do_not_know_the_others_say(group):
    knows = group.rank == group.size - 1
    assert fields_of(group, {"shape": (4,) if knows else None})["shape"] == "(4,)"


@spmd(3, 18, on=("threads",))
def test_fields_that_only_some_have_are_known_to_all(group):
    """Ranks in different versions of a call, such as one with a list of tables and one without."""
    mine = {"shape": "(4,)"} if group.rank else {"tables": 1}
    fields = fields_of(group, mine)
    assert (fields["shape"], fields["tables"]) == ("(4,)", "1")


@spmd(3, 18, on=("threads",))
def test_who_differs_is_found_behind_the_longest_that_agree(group):
    """Of which each rank's list has only room for some, where it comes from several."""
    mine = {
        "x": "x" * 980,
        "shape": None if group.rank == 1 else 4,
        "end": 9 if group.rank else None,
    }
    wrong = group.rank == group.size - 1
    for odd in (False, True):
        fields = mine | ({"end": 8} if odd and wrong else {})
        if odd:
            with pytest.raises(weft.WeftError, match=r"differ in end: .* has 8"):
                fields_of(group, fields)
        else:
            found = fields_of(group, fields)
            assert (found["shape"], found["end"]) == ("4", "9")


@spmd(3, 18, on=("threads",))
def test_who_differs_is_named(group):
    value = {1: "b", 2: "c"}.get(group.rank, "a")
    with pytest.raises(weft.WeftError) as caught:
        fields_of(group, {"x": value, "y": 1})
    others = "rank 0 has a" if group.size == 3 else "ranks 0, 3, 4, 5, 6, 7, 8, 9 and 8 more have a"
    assert str(caught.value) == (
        f"the ranks differ in x: {others}, rank 1 has b, rank 2 has c; pass the same on every rank"
    )


@spmd(3, 18, on=("threads",))
def test_the_lowest_rank_that_erred_is_heard(group):
    error = "this is wrong" if group.rank in (1, 2) else None
    with pytest.raises(weft.WeftError, match=r"^rank 1: this is wrong$"):
        fields_of(group, {} if error else {"x": 1}, error)
    fields_of(group)


@spmd(3, 18, on=("threads",))
def test_long_texts_are_cut_and_not_lost(group):
    with pytest.raises(weft.WeftError, match=f"^rank {group.size - 1}: aaa"):
        fields_of(group, error="a" * 100_000 if group.rank == group.size - 1 else None)


@spmd(18, on=("threads",))
def test_everybody_in_a_call_of_his_own(group):
    with pytest.raises(weft.WeftError, match="different calls: rank 0 has call 0"):
        fields_of(group, name=f"call {group.rank} " + "x" * 500)
    fields_of(group)


@spmd(2, on=("threads",))
def test_the_largest_body(group):
    with opened(group, "test", {}, None, bytes([group.rank]) * BODY, joined) as opening:
        assert [body[-1] for body in opening.read(bytes)] == [0, 1]


@spmd(1, 3)
def test_what_is_said_in_private_comes_to_whom_it_is_for(group):
    said = [[b"%d to " % group.rank, b"%d" % to * to] for to in range(group.size)]
    with opened(group, "test", {}, None, b"all", joined, private=said) as opening:
        assert opening.read(bytes) == [b"all"] * group.size
        for source, heard in enumerate(opening.private):
            mine = b""
            if source != group.rank:
                mine = b"%d to " % source + b"%d" % group.rank * group.rank
            assert bytes(heard) == mine


@spmd(2, on=("threads",))
def test_only_what_ranks_say_as_they_come_to_a_call_opens_it(group):
    waits = []
    detector = group.session.detector
    begin = detector.begin

    def begins(wait):
        waits.append(wait.opens)
        begin(wait)

    def meets_twice():
        for _ in range(2):
            fields_of(group)
        group.all_gather_bytes(number(0), bytes)

    detector.begin = begins
    group.worker.call("test", meets_twice)
    assert waits == [True, False, False]


@spmd(3, 18, on=("threads",))
def test_calls_of_some_ranks_are_counted_by_all_with_the_next_of_all(group):
    if group.rank == 2:
        for _ in range(3):
            group.worker.call("mine", lambda: None)
    for count in (4, 5):

        def number_of():
            with opened(group, "test", {}, None, number(0), total) as opening:
                return opening.number

        assert group.worker.call("test", number_of) == group.worker.calls == count


def test_a_statement_fits_in_a_meeting():
    assert CAP <= MEETS
