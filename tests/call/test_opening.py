"""The opening exchange: directly and by recursive doubling, the same conclusion on every rank."""

from __future__ import annotations

import pytest

import weft
from weft.call.bundle import bundle, swaps
from weft.call.fingerprint import fingerprint
from weft.call.opening import opened
from weft.call.statement import BODY, CAP, DIRECT, Statement, unpack
from weft.testing import run, spmd
from weft.wire.interface import MEETS


def number(*values):
    return sum(values).to_bytes(8, "little")


def fields_of(group, fields=(), error=None, name="test"):
    """What a call agrees on."""
    return opened(group, name, dict(fields), number(0), error=error).fields


@spmd(1, 2, 3, 7, DIRECT, DIRECT + 1, 20, 32, 33, on=("threads",))
def test_bodies_arrive_in_rank_order(group):
    for _ in range(2):
        body = bytes([group.rank])
        opening = opened(group, "test", {"what": "same"}, body)
        assert opening.read(bytes) == [bytes([rank]) for rank in range(group.size)]
        assert opening.fields["what"] == "same"


@spmd(DIRECT + 1, 24, 32, on=("threads",))
def test_many_ranks_open_a_call_with_few_partners_each(group):
    fields_of(group)
    assert {*group.traffic.to} == {peer for peer, _ in swaps(group.rank, group.size)}


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


@spmd(2, 18, on=("threads",))
def test_the_largest_body(group):
    """Of many ranks in several messages: also where one of two that swap has more to tell."""
    for is_long in ([True] * group.size, [rank % 5 == 1 for rank in range(group.size)]):
        lengths = [BODY if each else 1 for each in is_long]
        body = bytes([group.rank]) * lengths[group.rank]
        heard = opened(group, "test", {}, body).read(bytes)
        assert [len(each) for each in heard] == lengths
        assert [each[-1] for each in heard] == [*range(group.size)]


@spmd(1, 3, 18)
def test_what_is_said_in_private_comes_to_whom_it_is_for(group):
    said = [[b"%d to " % group.rank, b"%d" % to * to] for to in range(group.size)]
    opening = opened(group, "test", {}, b"all", private=said)
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
            return opened(group, "test", {}, number(0)).number

        assert group.worker.call("test", number_of) == group.worker.calls == count


GARBAGE = {  # what becomes of a message, and what is not understood of it
    "nothing": (lambda raw: raw[:0], "unpack_from requires"),
    "its beginning": (lambda raw: raw[:20], "unpack_from requires"),
    "another magic": (lambda raw: b"x" + raw[1:], "78656674"),
    "more than there is": (lambda raw: raw[:4] + b"\xff" * 3 + raw[7:], "bytes"),
    "a statement and something else": (lambda raw: raw + bytes(48), "0000, of 48 bytes"),
    "no fingerprint": (lambda raw: raw.replace(b"call\x1e", b"mall\x1e"), "it states"),
}


def check_blame(size, liar, change, text):
    """Whatever a rank makes of what it tells, all ranks name it, and what it sent."""

    def program(group):
        tell = group.tell
        if group.rank == liar:
            group.tell = lambda raw, *given, **named: tell(bytearray(change(raw)), *given, **named)
        match = f"rank {liar} sent a statement that .*{text}"
        with pytest.raises(weft.WireError, match=match) as caught:
            for _ in range(2):  # who had all it needs hears of it in its next call
                fields_of(group, {"x": 1})
        assert caught.value.culprit == liar

    run(size, program)


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("size", [3, 18])
def test_who_tells_no_statement_is_named(size, what):
    change, text = GARBAGE[what]
    check_blame(size, 1, change, text)


def test_a_statement_of_another_rank_is_refused():
    def forged(raw):
        (statement,) = unpack(memoryview(raw), ()).values()
        return statement._replace(rank=2).pack()

    check_blame(3, 1, forged, r"ranks \[2\], and not of \[1\]")


def test_a_bundle_with_the_statements_of_other_ranks_is_refused():
    def forged(raw):
        statements = [*unpack(memoryview(raw), ()).values()]
        if len(statements) != 2:
            return raw
        return bundle(statements[0], [statements[1]._replace(rank=5)])

    check_blame(18, 2, forged, r"ranks \[2, 5\], and not of \[2, 3\]")


def test_a_fingerprint_that_many_state_is_in_a_bundle_once():
    alike = fingerprint("test", "all", {"x": "x" * 100})
    other = fingerprint("test", "all", {"x": None})
    some = [
        Statement(rank, 4, other if rank % 3 else alike, b"", memoryview(b"%d" % rank))
        for rank in range(1024)
    ]
    message = bundle(some[0], some[1:])
    assert message.count(b"x" * 100) == 2  # with that of the rank that tells it
    found = unpack(memoryview(message), alike)
    assert [found[rank] for rank in range(1024)] == some


def test_a_statement_fits_in_a_meeting():
    assert CAP <= MEETS
