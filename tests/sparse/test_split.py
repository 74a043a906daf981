"""split in stages, on groups of several hosts; flat it is under the tests of all algorithms."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

import weft
from weft.schedules.hosts import Hosts
from weft.sparse import ALGORITHMS, Load, factors, last_call, stages
from weft.sparse.header import Header
from weft.sparse.link import set_link
from weft.sparse.owners import balanced_bounds, bounds_of_equal_sums, header_of_blocks
from weft.sparse.stream import SUMS, VALUES
from weft.testing import expected, processes, round_wire, run, simulated, spmd
from weft.testing.pace import patient
from weft.testing.simulation import simulate
from weft.wire.link import MERGE, Link

HOSTS = {  # by name of each rank's host
    2: ("ab", "aa"),
    3: ("abb", "aba", "abc"),
    4: ("aabb", "abba", "abcd", "aaab"),
    7: ("aaaabbb", "aaaaabc", "abababa", "aabbccc"),
    8: ("aaaabbbb", "abcabcab", "aabbccdd"),
    13: ("aaaabbbbccccd", "abcdefghijklm", "aaaaaaabbbbbb"),
}
SLOW = Link(50e-6, 8e-9, 0.35e-9, 50e-6)
BETWEEN = sorted(set(ALGORITHMS) - {"doubling", "dense_tail"})
LOCKSTEP = Load(2, 8, 4, 4, 6, 9, 4, 4, 4, staying=True, lengths_known=True)
LOCK = threading.Lock()


def rows_of(rank, dtype=torch.float32, height=200, count=150):
    draw = torch.Generator().manual_seed(rank)
    values = torch.randint(-4, 5, (count, 3), generator=draw).to(dtype)
    return weft.Rows(torch.randint(height, (count,), generator=draw), values, height)


@functools.cache
def world(size, op, dtype):
    parts = [rows_of(rank, dtype, count=0 if rank == 1 else 150) for rank in range(size)]
    return parts, expected(parts, op)


IN_ROUNDS = ("rounds", "device")  # the latter is the way of tensors on an accelerator
MIDDLES = sorted(name for name in BETWEEN if ALGORITHMS[name].applies(LOCKSTEP) is None)


def reduced(group, names, parts, op="sum", **options):
    """By hosts of these names; the group is given back as it was."""
    before = group.session.hosts
    group.session.hosts = tuple(names)
    try:
        return weft.sparse_all_reduce(parts[group.rank], op, algorithm="split", **options)
    finally:
        group.session.hosts = before


@pytest.fixture
def asked(monkeypatch):
    """Sets the factors that a call of threads or of simulated ranks takes."""
    return lambda text: monkeypatch.setenv("WEFT_FACTORS", text)


@pytest.fixture
def between_blocks(monkeypatch):
    """Sets what runs between blocks, whatever is quickest."""

    def take(name):
        def middle(load):
            return ALGORITHMS[name], factors.load_between_blocks(load)

        monkeypatch.setattr("weft.sparse.stages.middle", middle)

    return take


def real_parts():
    draw = torch.Generator().manual_seed(7)
    return [
        weft.Rows(torch.randint(300, (500,), generator=draw), torch.randn(500, 5, generator=draw))
        for _ in range(8)
    ]


def parsed(text):
    return tuple(map(int, text.split("x")))


def named(text):
    """What ran, with these factors."""
    return f"split {text}" if "x" in text else "split"


def factors_of(names):
    """Those of these hosts."""
    counts = [names.count(name) for name in dict.fromkeys(names)]
    several = 1 < len(counts) < len(names)
    return f"{min(counts)}x{len(counts)}" if several else str(len(names))


@pytest.mark.parametrize(
    ("size", "names"), [(size, each) for size in HOSTS for each in HOSTS[size]]
)
def test_it_equals_the_definition(size, names, asked):
    asked(factors_of(names))

    def program(group):
        set_link(group, SLOW)
        for op, dtype in (("sum", torch.float32), ("avg", torch.bfloat16), ("min", torch.int8)):
            with LOCK:  # ranks that are threads would each make them
                parts, want = world(size, op, dtype)
            total = reduced(group, names, parts, op)
            assert torch.equal(total.indices, want.indices), (op, dtype)
            torch.testing.assert_close(total.values, want.values)
            assert last_call().algorithm == "split"
            assert last_call().name == named(factors_of(names))
        group.session.hosts = tuple(names)
        rows = world(size, "sum", torch.float32)[0][group.rank]
        return weft.explain(rows, algorithm="split").load.factors

    wanted = parsed(factors_of(names))
    assert set(run(size, program)) == {wanted if len(wanted) > 1 else ()}


@pytest.mark.parametrize(
    ("names", "text", "on"),
    [
        *((names, factors_of(names), "device") for names in HOSTS[4]),
        *((names, factors_of(names), "rounds") for size in (7, 8) for names in HOSTS[size]),
        ("abcdefgh", "2x4", "device"),
        ("aabbccdd", "2x2x2", "rounds"),
        # blocks of two, two, and three ranks, of which one sums nothing
        ("abcdefg", "2x3", "device"),
    ],
)
def test_its_stages_run_in_rounds(names, text, on, asked):
    """The schedule is right only if every rank posts both ends before it waits: see there."""
    asked(text)
    size = len(names)

    def program(group):
        set_link(group, SLOW)
        found = []
        for op, dtype in (("sum", torch.float32), ("avg", torch.bfloat16), ("min", torch.int8)):
            with LOCK:
                parts, want = world(size, op, dtype)
            total = reduced(group, names, parts, op)
            assert torch.equal(total.indices, want.indices), (op, dtype)
            torch.testing.assert_close(total.values, want.values)
            found.append(total.values)
        group.session.hosts = tuple(names)
        rows = world(size, "sum", torch.float32)[0][group.rank]
        return found, weft.explain(rows, algorithm="split").load.factors

    (first, taken), *others = run(size, program, on=on)
    assert taken == (parsed(text) if "x" in text else ())
    for found, same in others:
        assert same == taken
        assert all(map(torch.equal, found, first))


@pytest.mark.parametrize(("names", "on"), [("aabbcca", "rounds"), ("abcabcab", "device")])
@pytest.mark.parametrize("between", MIDDLES)
def test_whatever_runs_in_rounds_may_run_between_blocks_there(
    between, names, on, between_blocks, asked
):
    between_blocks(between)
    asked(factors_of(names))
    size = len(names)
    parts = [[rows_of(rank), rows_of(rank + 9, count=40 * (rank % 3))] for rank in range(size)]
    of_one = [tables[1] for tables in parts]

    def program(group):
        return reduced(group, names, parts), reduced(group, names, of_one)

    wanted = [expected([tables[number] for tables in parts]) for number in range(2)]
    for several, one in run(size, program, on=on):
        for total, want in zip([*several, one], [*wanted, wanted[1]], strict=True):
            assert torch.equal(total.indices, want.indices)
            assert torch.equal(total.values, want.values)


@pytest.mark.parametrize("text", ["4x2", "2x2x2"])
def test_in_rounds_real_numbers_have_the_bits_that_they_have_elsewhere(text, between_blocks, asked):
    asked(text)
    between_blocks("split")  # `auto` would take another one there
    parts = real_parts()

    def program(group):
        return reduced(group, "aaaabbbb", parts).values

    first, *others = [*run(8, program), *run(8, program, on="rounds")]
    assert all(torch.equal(each, first) for each in others)


@contextmanager
def told(text):
    """Ranks that are threads or processes take these factors in this block."""
    os.environ["WEFT_FACTORS"] = text
    try:
        yield
        weft.barrier()  # threads share the variable: all have read it
    finally:
        os.environ.pop("WEFT_FACTORS", None)
    weft.barrier()  # before one of them sets it again


@spmd(4, 7)
def test_it_equals_the_definition_on_every_wire(group):
    for names in HOSTS[group.size]:
        text = factors_of(names)
        with told(text):
            with LOCK:
                parts, want = world(group.size, "sum", torch.float32)
            total = reduced(group, names, parts)
            assert last_call().name == named(text)
        assert torch.equal(total.indices, want.indices), names
        assert torch.equal(total.values, want.values), names


def summed_over_gloo(names, texts):
    """In a process of its own."""
    weft.register_wire("rounds", round_wire)
    with weft.init(timeout=60, wire="rounds") as group:
        for text in texts:
            os.environ["WEFT_FACTORS"] = text
            for op, dtype in (("sum", torch.float32), ("avg", torch.bfloat16), ("min", torch.int8)):
                parts, want = world(group.size, op, dtype)
                total = reduced(group, names, parts, op)
                assert last_call().name == named(text)
                assert torch.equal(total.indices, want.indices), (text, op)
                torch.testing.assert_close(total.values, want.values)
        return group.on(torch.device("cpu")).route


def test_a_device_s_wire_over_gloo_sums_flat_and_in_stages():
    found = processes(5, summed_over_gloo, "aabba", ("5", "2x2"))
    assert found == ["cpu (rounds)"] * 5


@pytest.mark.parametrize("text", ["3x4", "2x2x3"])
def test_a_prime_number_of_ranks_has_blocks_of_unequal_sizes(text, asked):
    asked(text)
    parts, _ = world(13, "sum", torch.float32)

    def right(left, right):
        return right

    def program(group):
        set_link(group, SLOW)
        group.session.hosts = tuple("abcdefghijklm")
        for op in ("sum", right):
            want = expected(parts, op)
            total = weft.sparse_all_reduce(parts[group.rank], op, algorithm="split")
            assert torch.equal(total.indices, want.indices)
            assert torch.equal(total.values, want.values)
        return weft.explain(parts[group.rank], algorithm="split").load.factors

    assert set(run(13, program)) == {parsed(text)}


@pytest.mark.parametrize("text", ["2x4", "4x2", "2x2x2", "8"])
def test_a_variable_sets_factors(text, asked):
    asked(text)

    def program(group):
        set_link(group, SLOW)
        group.session.hosts = tuple("aaaabbbb")
        parts, want = world(8, "sum", torch.float32)
        total = reduced(group, "aaaabbbb", parts)
        assert torch.equal(total.values, want.values)
        ran = last_call().name
        said = weft.explain(parts[group.rank], algorithm="split")
        return said.load.factors, said.lines[0].name, ran

    wanted = parsed(text) if "x" in text else ()
    assert run(8, program) == [(wanted, named(text), named(text))] * 8


def test_factors_that_do_not_fit_a_group_are_not_taken_there(asked):
    asked("2x4")

    def program(group):
        parts, want = world(4, "sum", torch.float32)
        return torch.equal(reduced(group, "aabb", parts).values, want.values)

    assert run(4, program) == [True] * 4


@pytest.mark.parametrize("text", ["4x", "two", "0x4", "-2x-4"])
def test_a_variable_that_says_no_factors_is_an_error_on_every_rank(text, asked):
    asked(text)

    def program(group):
        with pytest.raises(weft.WeftError, match=f"WEFT_FACTORS='{text}' is not a list of factors"):
            reduced(group, "aabb", world(4, "sum", torch.float32)[0])

    run(4, program)


@pytest.mark.parametrize("between", BETWEEN)
def test_any_algorithm_may_run_between_blocks(between, between_blocks, asked):
    between_blocks(between)
    cases = (torch.float32, 200, (150, 150)), (torch.float16, 30, (0, 1)), (torch.int8, 9, (0, 0))
    for dtype, height, counts in cases:
        parts = [rows_of(rank, dtype, height, counts[rank % 2]) for rank in range(6)]
        want = expected(parts)
        for names, text in (("aabbca", "1x3"), ("aabbcc", "2x3")):
            asked(text)
            for total in run(6, reduced, names, parts):
                assert torch.equal(total.indices, want.indices)
                assert torch.equal(total.values, want.values)


@pytest.mark.parametrize("text", ["2x4", "4x2", "2x2x2"])
def test_real_numbers_have_the_same_bits_on_all_ranks_and_again(text, asked):
    asked(text)
    parts = real_parts()

    def program(group):
        return [reduced(group, "aaaabbbb", parts).values for _ in range(2)]

    (first, _), *_ = found = run(8, program)
    assert all(torch.equal(each, first) for both in found for each in both)


@pytest.mark.parametrize(
    ("between", "names", "text"),
    [
        ("gather", "aaabbcca", "2x3"),
        ("holders", "abcdefgh", "2x4"),
        ("holders", "aabbccdd", "2x4"),
        ("mask", "abcdefgh", "4x2"),
        ("ring", "aabbccdd", "2x4"),
        ("split", "abcdefgh", "2x4"),
        ("split", "aaabbcca", "2x3"),
    ],
)
def test_sums_of_many_chunks_are_shared_once_they_are_complete(
    names, text, between, between_blocks, asked
):
    """Also where ranks of a block do not share a host, and so hand nothing on early."""
    asked(text)
    between_blocks(between)
    parts = []
    for rank in range(8):
        draw = torch.Generator().manual_seed(rank)
        indices = torch.randperm(12_000, generator=draw)[:6000]
        values = torch.randint(-4, 5, (6000, 64), generator=draw).float()
        parts.append(weft.Rows(indices, values, 12_000))
    want = expected(parts)

    def program(group):
        set_link(group, SLOW)
        total = reduced(group, names, parts)
        assert last_call().name == f"split {text}"
        return total

    for total in run(8, program):
        assert torch.equal(total.indices, want.indices)
        assert torch.equal(total.values, want.values)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize(
    ("given", "op"), [(torch.bfloat16, "sum"), (torch.bfloat16, "avg"), (torch.float32, "sum")]
)
def test_sums_of_some_ranks_travel_unrounded(given, op, between, between_blocks, asked):
    """1 and 1/512 many times: rounded to bfloat16 between the stages, the small ones would go."""
    asked("2x2")
    between_blocks(between)
    parts = []
    for rank, value in enumerate([1.0, 2**-9, 2**-9, 2**-9]):
        own = torch.arange(5000, 5100) + 100 * rank
        indices = torch.cat([torch.arange(5000), own])
        parts.append(weft.Rows(indices, torch.full((5100, 2), value, dtype=given), 6000))
    wire_dtype = None if given is torch.bfloat16 else torch.bfloat16
    ranks = 4 if op == "avg" else 1
    for total in run(4, reduced, "aabb", parts, op, wire_dtype=wire_dtype):
        assert total.values[:5000].eq((1 + 2**-7) / ranks).all()  # of 1 + 3/512, rounded once
        assert total.values[5000:5100].eq(1 / ranks).all()
        assert total.values[5100:].eq(2**-9 / ranks).all()


@pytest.mark.parametrize("between", ["split", "ring"])  # whose sums are shared range by range
def test_the_largest_index_there_is_on_uneven_hosts(between, between_blocks, asked):
    """The range of the rank without a place begins behind it, at no int64."""
    asked("3x2")
    between_blocks(between)
    network = Link(50e-6, 8e-9, MERGE, work=1e-9, within=2 * MERGE)  # so each message is worth it
    parts = [rows_of(rank) for rank in range(7)]
    last = 2**63 - 1
    parts = [weft.Rows(last - part.indices, part.values) for part in parts]
    want = expected(parts)

    def program(group):
        set_link(group, network)
        return reduced(group, "aaaabbb", parts)

    for total in run(7, program):
        assert torch.equal(total.indices, want.indices)
        assert torch.equal(total.values, want.values)


def test_lists_of_tables(asked):
    asked("2x2")
    parts = [[rows_of(rank), rows_of(rank + 9, count=rank)] for rank in range(4)]

    def program(group):
        total = reduced(group, "aabb", parts)
        assert last_call().name == "split 2x2"
        return total

    for found in run(4, program):
        for table, total in enumerate(found):
            assert torch.equal(total.values, expected([part[table] for part in parts]).values)


@pytest.mark.parametrize("on", ["threads", *IN_ROUNDS])
def test_some_ranks_of_some_hosts_are_a_group(on, asked):
    asked("2x2")
    some = [0, 3, 4, 6, 7]  # of hosts aabab
    want = expected([rows_of(rank) for rank in some])

    def program(group):
        set_link(group, SLOW)
        group.session.hosts = tuple("abcabcab")
        if group.rank not in some:
            return None
        part = group.subset(some)
        rows = rows_of(group.rank)
        total = weft.sparse_all_reduce(rows, algorithm="split", group=part)
        assert torch.equal(total.indices, want.indices)
        assert torch.equal(total.values, want.values)
        return weft.explain(rows, algorithm="split", group=part).load.factors

    found = run(8, program, on=on)
    assert [each for each in found if each is not None] == [(2, 2)] * 5


@pytest.mark.parametrize(("wire_dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("names", ["aaaabbb", "aaaaabc", "abababa", "aabbccdd"])
def test_values_that_travel_narrow_are_rounded_twice_in_all_stages(names, wire_dtype, unit, asked):
    asked(factors_of(names))
    draw = torch.Generator().manual_seed(3)
    given = torch.zeros(len(names), 400, 4)
    parts = []
    for own in given:
        indices = torch.randperm(400, generator=draw)[:300]
        own[indices] = torch.rand(300, 4, generator=draw) + 0.5  # so that float32 adds exactly
        parts.append(weft.Rows(indices, own[indices], 400))
    rounded = given.to(wire_dtype).float().sum(0).to(wire_dtype).float()
    exact = given.double().sum(0)
    bound = unit * exact + unit * (1 + unit) * exact  # of docs/wire-dtype.md

    def program(group):
        return reduced(group, names, parts, wire_dtype=wire_dtype)

    for found in run(len(names), program):
        assert torch.equal(found.values, rounded[found.indices])
        error = found.values.double() - exact[found.indices]
        assert (error.abs() <= bound[found.indices]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_filled_where_the_caller_wants_it(dtype, asked):
    asked("2x2")
    parts = [rows_of(rank, dtype) for rank in range(4)]
    want = expected(parts, "avg")

    def program(group):
        out = torch.full((200,), -1), torch.full((200, 3), 7.0, dtype=dtype)
        total = reduced(group, "aabb", parts, "avg", out=out)
        assert last_call().name == "split 2x2"
        assert total.values.data_ptr() == out[1].data_ptr()
        assert torch.equal(out[0][: len(want)], want.indices)
        assert torch.equal(out[1][: len(want)], want.values)

    run(4, program)


def factors_of_a_right_sum(names, parts, op):
    """What factors ranks on hosts of these names take for an op, once their result is right."""
    want = expected(parts, op)

    def program(group):
        set_link(group, SLOW)
        assert torch.equal(reduced(group, names, parts, op).values, want.values)
        group.session.hosts = tuple(names)
        return weft.explain(parts[group.rank], op, algorithm="split").load.factors

    return set(run(len(parts), program))


@pytest.mark.parametrize("names", ["aaaabbbb", "aaabbbbb", "abababab"])
def test_a_function_gets_its_operands_in_rank_order(names, asked):
    """Where the ranks of a host are no neighbours the split is flat."""
    asked(factors_of(names))

    def last(left, right):
        return right

    parts = [rows_of(rank) for rank in range(8)]
    in_order = Hosts.named(names).in_order
    taken = parsed(factors_of(names)) if in_order else ()
    assert factors_of_a_right_sum(names, parts, last) == {taken}


@pytest.mark.parametrize(
    ("names", "text", "is_taken"),
    [
        ("aaaabbbb", "2x2x2", True),
        ("abcdefgh", "2x2x2", True),
        ("abababab", "2x2x2", True),  # pairs, then pairs of these, whatever hosts they are on
        ("aabbaabb", "2x2x2", False),  # the second stage would join blocks 0 and 2, of one host
        ("aabbaabb", "2x4", True),
        ("abababab", "4x2", False),
    ],
)
def test_a_function_whose_order_matters_gets_its_operands_in_rank_order(
    names, text, is_taken, asked
):
    asked(text)

    def product(left, right):
        """Of 2x2 matrices: associative, not commutative."""
        return left @ right

    parts = []
    for rank in range(8):
        draw = torch.Generator().manual_seed(rank)
        values = torch.randint(-3, 4, (150, 2, 2), generator=draw)
        parts.append(weft.Rows(torch.randperm(200, generator=draw)[:150], values, 200))
    assert factors_of_a_right_sum(names, parts, product) == {parsed(text) if is_taken else ()}


@pytest.mark.parametrize("text", ["2x4", "4x2", "2x2x2", "3x2", "2x3"])
def test_the_blocks_of_all_stages_keep_the_order_where_the_op_needs_it(text):
    taken = 0
    for names in itertools.product("ab", repeat=8):
        load = factors.factored(load_of(names, in_order=True), parsed(text))
        added = [[rank] for rank in range(8)]  # by each block, in order
        for blocks in load.stages:
            added = [[*itertools.chain(*(added[each] for each in block))] for block in blocks]
        assert [*itertools.chain(*added)] == [*range(8)], names
        taken += load.factors == parsed(text)
    assert taken


def test_a_function_that_raises_is_everybodys_error(asked):
    asked("2x2")

    def last(left, right):
        return right

    def fails(left, right):
        raise KeyError("no")

    fails.__module__, fails.__qualname__ = last.__module__, last.__qualname__
    parts = [rows_of(rank) for rank in range(4)]

    def program(group):
        with pytest.raises(weft.WeftError, match=r"rank 2: KeyError: 'no'"):
            reduced(group, "aabb", parts, last if group.rank != 2 else fails)
        reduced(group, "aabb", parts, last)
        assert last_call().name == "split 2x2"

    run(4, program)


def test_a_rank_that_dies_is_everybodys_error(asked):
    asked("2x2")
    parts = [rows_of(rank) for rank in range(4)]

    def program(group):
        def allocate(count, row_shape, dtypes):
            if group.rank == 2:  # when the others of its place and of its host await it
                group.abort("gone")
            return torch.empty(count, dtype=dtypes[0]), torch.empty(count, *row_shape)

        reduced(group, "aabb", parts)
        assert last_call().name == "split 2x2"
        with pytest.raises(weft.WireError, match="rank 2 gave up: gone"):
            reduced(group, "aabb", parts, out=allocate)

    run(4, program)


RANK = """
import json, os, signal, sys, time, torch, weft
from weft.testing import round_wire
place, victim, stage = sys.argv[1:]
weft.register_wire("rounds", round_wire)
group = weft.init(rendezvous=f"file://{place}", timeout=30.0, wire="rounds")
calls = 0
def dies_in(here):
    if calls == 2 and here == stage and group.rank == int(victim):
        print(json.dumps({"at": time.monotonic()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
def add(left, right):  # as a block's rows are summed: ranks of other blocks wait for the sums
    dies_in("the first")
    return left + right
def allocate(count, row_shape, dtypes):  # as a block is told its sums, before they come
    dies_in("the last")
    return torch.empty(count, dtype=dtypes[0]), torch.empty(count, *row_shape, dtype=dtypes[1])
rows = weft.Rows(torch.arange(50_000), torch.ones(50_000, 8), 50_000)
try:
    while calls < 5:
        calls += 1
        weft.sparse_all_reduce(rows, add, algorithm="split", out=allocate)
        if calls == 1:
            print(json.dumps({"factors": weft.explain(rows, add, algorithm="split").load.factors}))
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit, "at": time.monotonic()}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(("victim", "stage"), [(0, "the first"), (3, "the last")])
def test_survivors_name_who_was_killed_in_a_stage_of_rounds(survivors, tmp_path, victim, stage):
    """Ranks 0 and 1 are a block, and 2 and 3; who waits for whom depends on the stage."""
    given = str(tmp_path / "place"), str(victim), stage
    ranks = [{"WEFT_FACTORS": "2x2", "WEFT_HOST": name} for name in "aabb"]
    began, printed = survivors(RANK, given, ranks, victim)
    for rank, (first, said) in printed.items():
        assert first["factors"] == [2, 2]
        assert said["culprit"] == victim, said
        assert said["text"].startswith(f"rank {rank}: rank {victim} died while"), said
        assert said["at"] - began < patient(5.0), said


@spmd(8, on=("threads",))
def test_only_sums_of_hosts_leave_them(group):
    """The same rows everywhere: what leaves a host is that of one rank, whatever ranks it has."""
    set_link(group, SLOW)
    rows = weft.Rows(torch.arange(4000), torch.ones(4000, 8), 4000)
    names = "aaaabbbb"
    group.traffic.reset()
    reduced(group, names, [rows] * group.size)
    leaves = sum(
        group.traffic.to.get(peer, 0) for peer in range(8) if names[peer] != names[group.rank]
    )
    opening = 4 * 8192  # to all ranks of the other host
    assert leaves <= opening + 1.1 * 4000 * (8 * 4 + 4) / 4


@pytest.mark.parametrize(("names", "kind"), [("aaaabbbb", "disjoint"), ("aabbccdd", "identical")])
def test_workspace_is_what_was_predicted(names, kind, asked):
    asked(factors_of(names))
    count, opening = 12_000, 416 << 10  # bytes of a statement and of two lists' first messages

    def program(group):
        set_link(group, SLOW)
        group.session.hosts = tuple(names)
        draw = torch.Generator().manual_seed(group.rank)
        indices = torch.randperm(count, generator=draw)
        if kind == "disjoint":
            indices = indices * 8 + group.rank
        rows = weft.Rows(indices, torch.ones(count, 80), count * 8)
        load = weft.explain(rows, algorithm="split").load
        pool = group.memory
        pool.peak = pool.lent
        total = weft.sparse_all_reduce(rows, algorithm="split")
        assert pool.lent == 0, "a lease was not given back"
        cost = ALGORITHMS["split"].cost(load.but(union=len(total)))
        assert pool.peak <= cost.memory + count * load.row + opening * 7

    run(8, program)


# Simulated -------------------------------------------------------------------------------------

NETWORK = Link(50e-6, 8e-9, MERGE, 10e-6)
WITHIN = dataclasses.replace(NETWORK, beta=4 * MERGE)


def spread(rank, count=6000, height=60_000):
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randperm(height, generator=draw)[:count].sort().values
    return weft.Rows(indices, torch.ones(count, 64), height)


def test_a_call_is_opened_once_and_each_stage_sends_what_it_must(asked):
    """2 hosts x 4: lists and values to 3 owners, to the other host, and sums to 3 ranks."""
    asked("4x2")
    done = simulate("split", lambda rank: spread(rank, 100, 1000), 8, NETWORK,
                    hosts="aaaabbbb", within=WITHIN)  # fmt: skip
    assert done.messages == 3 * 2 + 2 + 3 * 2  # a second opening would be seven more


class Watched:
    """What a wire has under way; notes the simulated time at which it was waited for."""

    def __init__(self, group, pending, times):
        self.group, self.pending, self.times = group, pending, times

    def wait(self):
        found = self.pending.wait()
        self.times.append(simulated.clock(self.group))
        return found

    def __getattr__(self, name):
        return getattr(self.pending, name)


@pytest.fixture
def watched(monkeypatch):
    """One call: when some messages left this rank, and when others came, and its result.

    Both are told by the peer and the channel, whichever ranks post them as a group: those of a
    stage do, too. The times of those that came are those at which they were waited for.
    """
    calls = {}  # by session: what is sent and received, and its times
    post = weft.Group.post

    def watching(of, sends=(), recvs=(), channel=0):
        pending = post(of, sends, recvs, channel)
        if of.session not in calls:
            return pending
        group, is_sent, is_received, sent, received = calls[of.session]
        for peer, tensor in sends:
            if is_sent(of.rank_in_errors(peer), channel) and tensor.numel():
                sent.append(simulated.clock(group))
        if any(is_received(of.rank_in_errors(peer), channel) for peer, _ in recvs):
            return Watched(group, pending, received)
        return pending

    def call(group, rows, is_sent, is_received):
        sent, received = [], []
        calls[group.session] = group, is_sent, is_received, sent, received
        total = weft.sparse_all_reduce(rows, algorithm="split")
        return sent, received, total

    monkeypatch.setattr(weft.Group, "post", watching)
    return call


def has_place(names):
    """For each rank whether it has a place in its host: as many ranks as the smallest have one."""
    blocks = Hosts.named(names).ranks
    places = min(map(len, blocks))
    return [any(rank in block[:places] for block in blocks) for rank in range(len(names))]


@pytest.mark.parametrize(
    ("between", "names", "gbit"),
    [
        ("gather", "aaaabbbb", 1),
        # a rank begins with the range of its neighbour, which may be the last: on slow links, where
        # chunks are short, that one is not complete at once, either
        ("ring", "aabbccdd", 0.25),
        ("split", "aabbccdd", 0.25),
        ("holders", "aaabbccc", 0.25),
    ],
)
def test_the_second_stage_begins_before_the_first_has_ended(
    between, names, gbit, between_blocks, asked, watched
):
    asked(factors_of(names))
    between_blocks(between)
    link = dataclasses.replace(NETWORK, beta=8e-9 / gbit)

    def program(group):
        def is_near(peer):
            return names[peer] == names[group.rank]

        set_link(group, link)
        found = watched(
            group,
            spread(group.rank, 30_000, 200_000),
            lambda peer, channel: channel == VALUES and not is_near(peer),
            lambda peer, channel: channel == VALUES and is_near(peer),
        )
        assert last_call().name == named(factors_of(names))
        return found

    found = simulated.run(8, link, program, hosts=names, within=WITHIN)
    for (sent, received, _), leads in zip(found, has_place(names), strict=True):
        assert bool(sent) == bool(received) == leads
        if leads:
            assert min(sent) < max(received)


@pytest.mark.parametrize(
    ("between", "names"),
    [
        ("gather", "aaaabbbb"),
        ("ring", "aabbccdd"),
        ("split", "aabbccdd"),
        ("split", "abcdabcd"),
        ("split", "aaabbccc"),
    ],
)
def test_a_block_shares_its_first_sums_before_the_last_have_come(
    between, names, between_blocks, asked, watched
):
    asked(factors_of(names))
    between_blocks(between)
    rows = spread(0)  # the same everywhere

    def program(group):
        def is_near(peer):
            return names[peer] == names[group.rank]

        set_link(group, NETWORK)
        found = watched(
            group,
            rows,
            lambda peer, channel: channel == SUMS and is_near(peer),
            lambda peer, channel: channel in (VALUES, SUMS) and not is_near(peer),
        )
        assert last_call().name == named(factors_of(names))
        return found

    found = simulated.run(len(names), NETWORK, program, hosts=names, within=WITHIN)
    for (sent, received, total), leads in zip(found, has_place(names), strict=True):
        assert torch.equal(total.indices, rows.indices)
        assert torch.equal(total.values, len(names) * rows.values)
        assert bool(received) == leads
        if leads:
            assert sent and min(sent) < max(received)


@pytest.mark.parametrize(("ranks", "each"), [(16, 8), (61, 1)])
def test_it_takes_what_was_predicted(ranks, each):
    hosts = [f"{rank // each}" for rank in range(ranks)]
    done = simulate("split", lambda rank: spread(rank, 1000, 20_000), ranks, NETWORK,
                    hosts=hosts, within=WITHIN)  # fmt: skip
    assert done.predicted == pytest.approx(done.seconds, rel=0.15)
    assert done.messages == pytest.approx(done.cost.messages, rel=0.1)
    assert done.bytes == pytest.approx(done.cost.bytes, rel=0.05)


def test_on_a_fast_link_it_takes_what_was_predicted():
    """Where the stages within a host take about as long as the bytes that leave it."""
    link = dataclasses.replace(NETWORK, beta=0.8e-9)
    done = simulate("split", lambda rank: spread(rank, 5000, 100_000), 8, link,
                    hosts="aabbccdd", within=WITHIN)  # fmt: skip
    assert len(done.load.factors) == 2
    assert done.predicted == pytest.approx(done.seconds, rel=0.15)
    assert done.messages == pytest.approx(done.cost.messages, rel=0.1)
    assert done.bytes == pytest.approx(done.cost.bytes, rel=0.05)


@pytest.mark.parametrize(
    ("between", "names", "gbit"), [("holders", "aaaabbbb", 10), ("ring", "aabbccdd", 1)]
)
def test_what_runs_between_hosts_takes_what_was_predicted(
    between, names, gbit, between_blocks, asked, watched
):
    asked(factors_of(names))
    between_blocks(between)
    link = dataclasses.replace(NETWORK, beta=8e-9 / gbit, within=WITHIN.beta)
    done = simulate("split", lambda rank: spread(rank, 4000, 80_000), 8, link,
                    hosts=names, within=WITHIN)  # fmt: skip
    assert done.load.factors == parsed(factors_of(names))
    assert done.predicted == pytest.approx(done.seconds, rel=0.15)
    assert done.messages == pytest.approx(done.cost.messages, rel=0.1)
    assert done.bytes == pytest.approx(done.cost.bytes, rel=0.05)


@pytest.mark.parametrize(
    ("given", "wire_dtype", "names", "gbit"),
    [(torch.bfloat16, None, "aaaabbbb", 1), (torch.float32, torch.bfloat16, "aabbccdd", 10)],
)
def test_where_sums_of_some_ranks_travel_wider_it_takes_what_was_predicted(
    given, wire_dtype, names, gbit, asked
):
    asked(factors_of(names))

    def rows(rank):
        part = spread(rank, 4000, 80_000)
        return dataclasses.replace(part, values=part.values.to(given))

    link = dataclasses.replace(NETWORK, beta=8e-9 / gbit, within=WITHIN.beta)
    done = simulate("split", rows, 8, link, wire_dtype=wire_dtype, hosts=names, within=WITHIN)
    assert done.load.partial == 2 * done.load.row
    assert done.load.factors == parsed(factors_of(names))
    assert done.predicted == pytest.approx(done.seconds, rel=0.15)
    assert done.messages == pytest.approx(done.cost.messages, rel=0.1)
    assert done.bytes == pytest.approx(done.cost.bytes, rel=0.05)


# The choice ------------------------------------------------------------------------------------


def load_of(hosts, link=NETWORK, **changes):
    load = Load(
        len(hosts), len(hosts) * 50_000, 50_000, 50_000, 300_000, 1_000_000, 256, 256, 4,
        places=1_000_000, link=link, hosts=Hosts.named(hosts),
    )  # fmt: skip
    return load.but(**changes)


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [("aaaabbbb", (4, 2)), ("aabbccdd", (2, 4)), ("aaaabbb", (3, 2)), ("aaaaabc", (1, 3)),
     ("abcdefgh", ()), ("aaaaaaaa", ())],
)  # fmt: skip
def test_factors_are_those_of_the_hosts(hosts, wanted):
    slow = dataclasses.replace(NETWORK, beta=32e-9)
    load = factors.factored(load_of(hosts, slow))
    assert load.factors == wanted
    blocks = factors.blocks_of(load)
    assert sorted(rank for block in blocks for rank in block) == list(range(len(hosts)))
    if wanted:
        assert [len(block) for block in blocks] == [hosts.count(name) for name in sorted({*hosts})]


@pytest.mark.parametrize("ranks", [61, 62, 1021, 10_007])
def test_many_ranks_have_factors_whatever_their_number_is(ranks):
    link = dataclasses.replace(NETWORK, beta=0.8e-9)
    few = {"total": 500 * ranks, "most": 500, "fewest": 500, "union": 20_000}
    load = factors.factored(load_of([*range(ranks)], link, **few))
    blocks = factors.blocks_of(load)
    assert [*itertools.chain(*blocks)] == [*range(ranks)]
    sizes = {len(block) for block in blocks}
    assert min(sizes) == load.factors[0] and max(sizes) <= load.factors[0] + 1
    assert len(blocks) == math.prod(load.factors[1:])
    assert max(load.factors) <= 2 * math.isqrt(ranks)  # no ring goes round all ranks


def test_two_hosts_gather_between_and_a_few_take_holders():
    for hosts, name in (("aaaabbbb", "gather"), ("aabbccdd", "holders")):
        load = factors.factored(load_of(hosts))
        assert stages.middle(load)[0].name == name


@pytest.mark.parametrize(
    "changes", [{"lengths_known": True}, {"staying": True, "lengths_known": True}]
)
def test_wires_in_rounds_and_accelerators_are_flat_unless_factors_are_asked_for(changes):
    load = load_of("aaaabbbb", chunk=1 << 48, **changes)
    assert factors.factored(load).factors == ()
    found = factors.factored(load, (4, 2))
    assert found.factors == (4, 2)
    # a message of a round is not cut, in no stage
    assert (
        factors.load_in_block(found).chunk == factors.load_between_blocks(found).chunk == load.chunk
    )


def test_ranges_of_a_place_are_those_of_its_header():
    parts = [rows_of(rank, height=5000, count=800).indices.unique() for rank in range(8)]
    header = Header.together([Header.of(part, rank) for rank, part in enumerate(parts)])
    union = torch.cat(parts).unique()
    bounds = bounds_of_equal_sums(header, 8, 4)
    assert bounds[0] == 0 and bounds[-1] == header.highest + 1 and len(bounds) == 5
    sums = torch.searchsorted(union, torch.tensor(bounds)).diff()
    assert sums.max() <= 1.15 * sums.float().mean()
    for low, high in pairwise(bounds):
        inner = header_of_blocks(header, 8, 2, (low, high))
        assert balanced_bounds(inner, 2)[-1] == high
        assert low < balanced_bounds(inner, 2)[1] < high
        rows = sum(((part >= low) & (part < high)).sum() for part in parts)
        assert 0.6 * rows <= inner.weights.sum() <= 1.2 * rows


def test_the_old_name_says_what_to_write():
    with pytest.raises(weft.WeftError, match="'hierarchical' is gone: use split, whose first"):
        run(2, reduced_by, "hierarchical")


def reduced_by(group, name):
    return weft.sparse_all_reduce(rows_of(group.rank), algorithm=name)
