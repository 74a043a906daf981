"""The opening exchange: directly and by combining, the same conclusion on every rank."""

from __future__ import annotations

import functools

import pytest
import torch

import weft
from weft.agree import BODY, DIRECT, agree
from weft.testing import spmd


def total(lower, upper):
    return (lower.view(torch.int64) + upper.view(torch.int64)).view(torch.uint8)


def joined(lower, upper):
    return torch.cat([lower, upper])


def number(value):
    return torch.tensor([value]).view(torch.uint8)


@spmd(1, 2, 3, 7, DIRECT, DIRECT + 1, 20, 32, 33, on=("threads",))
def test_bodies_arrive_in_rank_order(wire):
    for _ in range(2):
        agreement = agree(
            wire,
            "test",
            {"what": "same"},
            None,
            torch.tensor([wire.rank], dtype=torch.uint8),
            joined,
        )
        assert [*b"".join(agreement.read(bytes))] == list(range(wire.size))
        assert agreement.fields["what"] == "same"
        agreement.release()


@spmd(1, 3, 18, on=("threads",))
def test_what_some_do_not_know_the_others_say(wire):
    knows = wire.rank == wire.size - 1
    agreement = agree(wire, "test", {"shape": (4,) if knows else None}, None, number(0), total)
    assert agreement.fields["shape"] == "(4,)"
    agreement.release()


@spmd(3, 18, on=("threads",))
def test_fields_that_only_some_have_are_known_to_all(wire):
    """Ranks in different versions of a call, such as one with a list of tables and one without."""
    mine = {"shape": "(4,)"} if wire.rank else {"tables": 1}
    agreement = agree(wire, "test", mine, None, number(0), total)
    assert {name: agreement.fields[name] for name in ("shape", "tables")} == {
        "shape": "(4,)",
        "tables": "1",
    }
    agreement.release()


@spmd(3, 18, on=("threads",))
def test_who_differs_is_found_behind_the_longest_that_agree(wire):
    """Of which each rank's list has only room for some, where it comes from several."""
    mine = {"x": "x" * 980, "shape": None if wire.rank == 1 else 4, "end": 9 if wire.rank else None}
    wrong = wire.rank == wire.size - 1
    for odd in (False, True):
        fields = mine | ({"end": 8} if odd and wrong else {})
        if odd:
            with pytest.raises(weft.WeftError, match=r"differ in end: .* has 8"):
                agree(wire, "test", fields, None, number(0), total)
        else:
            agreement = agree(wire, "test", fields, None, number(0), total)
            assert (agreement.fields["shape"], agreement.fields["end"]) == ("4", "9")
            agreement.release()


@spmd(3, 18, on=("threads",))
def test_who_differs_is_named(wire):
    value = {1: "b", 2: "c"}.get(wire.rank, "a")
    with pytest.raises(weft.WeftError) as caught:
        agree(wire, "test", {"x": value, "y": 1}, None, number(0), total)
    others = "rank 0 has a" if wire.size == 3 else "ranks 0, 3, 4, 5, 6, 7, 8, 9 and 8 more have a"
    assert str(caught.value) == (
        f"the ranks differ in x: {others}, rank 1 has b, rank 2 has c; pass the same on every rank"
    )


@spmd(3, 18, on=("threads",))
def test_the_lowest_rank_that_erred_is_heard(wire):
    error = "this is wrong" if wire.rank in (1, 2) else None
    with pytest.raises(weft.WeftError, match=r"^rank 1: this is wrong$"):
        agree(wire, "test", {} if error else {"x": 1}, error, number(0), total)
    agree(wire, "test", {}, None, number(0), total).release()


@spmd(3, 18, on=("threads",))
def test_long_texts_are_cut_and_not_lost(wire):
    with pytest.raises(weft.WeftError, match=f"^rank {wire.size - 1}: aaa"):
        agree(
            wire, "test", {}, "a" * 100_000 if wire.rank == wire.size - 1 else None,
            number(0), total,
        )  # fmt: skip


@spmd(18, on=("threads",))
def test_everybody_in_a_call_of_his_own(wire):
    with pytest.raises(weft.WeftError, match="different calls: rank 0 has call 0"):
        agree(wire, f"call {wire.rank} " + "x" * 500, {}, None, number(0), total)
    agree(wire, "test", {}, None, number(0), total).release()


@spmd(2, on=("threads",))
def test_the_largest_body(wire):
    body = torch.full((BODY,), wire.rank, dtype=torch.uint8)
    agreement = agree(wire, "test", {}, None, body, joined)
    assert [body[-1] for body in agreement.read(bytes)] == [0, 1]
    agreement.release()


@spmd(1, 3)
def test_what_is_said_in_private_comes_to_whom_it_is_for(wire):
    said = [[b"%d to " % wire.rank, b"%d" % to * to] for to in range(wire.size)]
    agreement = agree(wire, "test", {}, None, bytearray(b"all"), joined, private=said)
    assert [bytes(body) for body in agreement.read(bytes)] == [b"all"] * wire.size
    for source, heard in enumerate(agreement.private):
        mine = b"" if source == wire.rank else b"%d to " % source + b"%d" % wire.rank * wire.rank
        assert bytes(heard) == mine
    agreement.release()


@spmd(3, 18, on=("threads",))
def test_calls_of_some_ranks_are_counted_by_all_with_the_next_of_all(wire):
    if wire.rank == 2:
        for _ in range(3):
            wire.worker.call("mine", lambda: None)
    for count in (4, 5):
        job = functools.partial(agree, wire, "test", {}, None, number(0), total)
        agreement = wire.worker.call("test", job)
        agreement.release()
        assert agreement.number == wire.worker.calls == count
