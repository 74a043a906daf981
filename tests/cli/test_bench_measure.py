"""One rank's program of `weft bench`, on real processes: who is right, who is wrong, how long."""

import ctypes
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft.cli.bench import measure
from weft.cli.bench.cases import CASES, Case, answer, indices, sizes, values
from weft.cli.bench.measure import (
    DENSE_LIMIT,
    Job,
    contender,
    fault,
    parts,
    run,
)
from weft.cli.bench.results import Found, Row
from weft.group.group import Group
from weft.testing import processes
from weft.testing import run as in_pool

PEERS = ("torch", "horovod", "dense")
TINY = Case("tiny", 60, 200, width=5, distribution="zipf")


def on(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a rank's program in so many of the processes that all tests share."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        return in_pool(size, _within, meeting, body.__name__, args, on="processes")


def _within(group: Group, meeting: str, body: str, args: tuple[Any, ...]) -> Any:
    """By its name, since a process of the pool has this module, and need not find it by import."""
    dist.init_process_group("gloo", meeting, rank=group.rank, world_size=group.size)
    try:
        return globals()[body](*args)
    finally:
        dist.destroy_process_group()


def measured(
    job: Job, since: float = math.inf, culprit: int | None = None, seconds: float = 0.0
) -> tuple[bool, list[Found]]:
    """What one rank finds.

    From a call on weft adds 1 to a value on the culprit (None: on all); on rank 1 each call takes
    so many seconds more.
    """
    real: Callable[..., Any] = weft.sparse_all_reduce
    numbers = itertools.count(1)

    def changed(*given: Any, **named: Any) -> Any:
        result = real(*given, **named)
        if next(numbers) >= since and culprit in (None, dist.get_rank()):
            result.values[0] += 1
        time.sleep(seconds * (dist.get_rank() == 1))
        return result

    found: list[Found] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weft, "sparse_all_reduce", changed)
        return run(job, found.append), found


def the_rows(found: list[Found]) -> dict[tuple[str, str], Row]:
    return {(row["case"], row["by"]): row for kind, row in found if kind == "row"}


def test_all_contenders_are_right_and_timed() -> None:
    cases = (TINY, *(CASES[name].scaled(0.002) for name in ("scalar", "identical", "full")))
    job = Job(cases, ("auto", "split", "gather"), PEERS, iters=3, warmup=1, link=1e9)
    results = on(3, measured, job)
    assert [right for right, _ in results] == [True] * 3
    assert [found for _, found in results[1:]] == [[], []]  # only rank 0 speaks
    found = results[0][1]
    kind, head = found[0]
    assert (kind, head["ranks"], head["hosts"], head["link"]) == ("head", 3, 1, 1e9)
    rows = the_rows(found)
    done = [share for kind, (*_, share) in found if kind == "doing"]
    assert done == sorted(done) and done[0] == 0 and 0.8 < done[-1] < 1
    assert len(rows) == len(cases) * 6
    for case in cases:
        counted = sizes(case, 3, 0)
        for (name, who), row in rows.items():
            if name == case.name:
                assert row["status"] == "ok", row["why"]
                assert 0 < row["least_seconds"] <= row["median_seconds"] <= row["most_seconds"]
                assert row["core_seconds"] > 0
                assert (row["total"], row["union"]) == (counted.sizes.total, counted.union)
                assert {peer for peer in PEERS if row[f"{peer}_ratio"]} == set(PEERS) - {who}
                assert row["bound_seconds"] == pytest.approx(row["bound_bytes"] * 8e-9)
        split = rows[case.name, "weft:split"]
        assert split["algorithm"] == "split" and split["sent_bytes"] and split["messages"]
        assert rows[case.name, "torch"]["sent_bytes"] is None
        # the bound is what has to be received; the whole group sends what it receives
        assert split["bytes_ratio"] >= 1


@pytest.mark.parametrize(
    ("rank", "since", "words"),
    [
        (None, 1, "rank 0: 5 of"),
        (1, 1, "the bits on ranks [1] are not those on rank 0"),
        (1, 3, "the last iteration differs"),
    ],
)
def test_a_wrong_result_is_seen(rank: int | None, since: int, words: str) -> None:
    job = Job((TINY,), ("gather",), ("torch",), iters=2, warmup=0)
    results = on(2, measured, job, since, rank)
    assert [right for right, _ in results] == [False, False]  # all exit with the same status
    weft_row, torch_row = the_rows(results[0][1]).values()
    assert weft_row["status"] == "wrong" and words in weft_row["why"]
    assert weft_row["median_seconds"] is None and torch_row["status"] == "ok"
    assert torch_row["torch_ratio"] is None


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    job = Job((TINY,), ("gather",), (), iters=2, warmup=0)
    rows = the_rows(on(2, measured, job, math.inf, None, 0.3)[0][1])
    assert rows["tiny", "weft:gather"]["least_seconds"] >= 0.3
    assert 0 < rows["tiny", "weft:gather"]["core_seconds"] < 0.3  # to sleep takes no core


def ordinary(job: Job) -> tuple[bool, list[Found]]:
    """In a process of its own, since the setting stays."""
    found = measured(job)
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_ranks_run_as_an_ordinary_users_do() -> None:
    job = Job((TINY,), ("gather",), (), iters=1, warmup=0, unprivileged=True)
    (right, ((_, head), *_)), (_, silent) = processes(2, ordinary, job)
    assert right and silent == [] and head["unprivileged"]


def test_no_check_means_no_check() -> None:
    job = Job((TINY,), ("gather",), (), iters=1, warmup=0, checked=False)
    [(right, found)] = on(1, measured, job, 1)
    assert right and the_rows(found)["tiny", "weft:gather"]["status"] == "ok"


def answers(job: Job) -> list[str]:
    """Which right answers one rank makes."""
    made: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(measure, name)

        def make(*given: Any) -> Any:
            made.append(name)
            return real(*given)

        return make

    with pytest.MonkeyPatch.context() as patch:
        for name in ("answer", "answer_of_weft"):
            patch.setattr(measure, name, noted(name))
        measured(job)
    return made


@pytest.mark.parametrize(("peers", "others"), [((), []), (("torch",), ["answer"])])
def test_ranks_make_the_answers_that_they_look_at(
    peers: tuple[str, ...], others: list[str]
) -> None:
    """Where a peer rounds, its ranks may differ; weft's have the bits of rank 0."""
    job = Job((replace(TINY, values="normal"),), ("gather",), peers, iters=1, warmup=0)
    assert on(2, answers, job) == [["answer", "answer_of_weft"], others]


def test_every_kind_of_data() -> None:
    cases = (
        replace(TINY, name="mean", op="avg"),
        replace(TINY, name="real", values="normal"),
        replace(TINY, name="most", op="max", dtype="float64"),
        replace(TINY, name="half", dtype="bfloat16", index_dtype="int32"),
        # sums of a rank that bfloat16 does not hold
        replace(TINY, name="hot", dtype="bfloat16", rows=9_000, height=20),
        replace(TINY, name="rounded", wire_dtype="bfloat16", rows=9_000, height=20),
        replace(TINY, name="once", dtype="bfloat16", wire_dtype="float32", values="normal"),
        replace(TINY, name="sign", op="prod", dtype="int32"),
        replace(TINY, name="bits", op="bxor", dtype="uint8"),
    )
    job = Job(cases, ("auto", "split"), PEERS, iters=1, warmup=0)
    rows = the_rows(on(2, measured, job)[0][1])
    for case in cases:
        for name in ("weft:auto", "weft:split"):
            assert rows[case.name, name]["status"] == "ok", rows[case.name, name]["why"]
        sums = case.op in ("sum", "avg")
        for name in PEERS:
            row = rows[case.name, name]
            assert row["status"] == ("ok" if sums else "refused"), row["why"]
            assert sums or f"{name} has no {case.op}" in row["why"]
    split = rows["rounded", "weft:split"]
    assert split["wire_dtype"] == "bfloat16"
    assert split["bound_bytes"] == 20 * (5 * 2 + 4)


def test_what_does_not_serve_is_refused_with_the_reason() -> None:
    cases = (
        replace(TINY, dtype="float16"),
        replace(TINY, height=DENSE_LIMIT // 20 + 1, name="tall"),
    )
    job = Job(cases, ("gather",), PEERS, iters=1, warmup=0)
    right, found = on(2, measured, job)[0]
    rows = the_rows(found)
    assert right  # refusing is not being wrong
    assert rows["tiny", "weft:gather"]["status"] == rows["tall", "torch"]["status"] == "ok"
    assert rows["tiny", "torch"]["status"] == "refused" and rows["tiny", "torch"]["why"]
    assert rows["tall", "dense"]["status"] == "refused"
    assert "MiB: to time it, give a smaller --height" in rows["tall", "dense"]["why"]
    (head,) = [what for kind, what in found if kind == "head"]
    assert head["wire"] == "tcp"


def unchanged(case: Case) -> bool:
    """Whether the rows are as before after everybody has had them."""
    with weft.init():
        own = indices(case, dist.get_rank(), 0), values(case, dist.get_rank(), 0)
        before = own[0].clone(), own[1].clone()
        right = answer(case, dist.get_world_size(), 0)
        for name in ("weft:auto", *PEERS):
            one = contender(name, case, *own)
            for _ in range(2):
                assert fault(parts(one.call(one.prepare())), right) is None
        return torch.equal(own[0], before[0]) and torch.equal(own[1], before[1])


def test_nobody_changes_the_data_of_the_next() -> None:
    assert on(2, unchanged, TINY) == [True, True]


def uneven(case: Case) -> str | None:
    """Horovod's way with as many rows as the rank's number, so that all are padded but one."""
    with weft.init():
        rank = dist.get_rank()
        own = torch.arange(rank), torch.full((rank, 5), float(rank + 1))
        horovod = contender("horovod", case, *own)
        got = parts(horovod.call(horovod.prepare()))
        dense = torch.zeros(3, 5)
        for other in range(dist.get_world_size()):
            dense[:other] += other + 1
        count = dist.get_world_size() - 1
        right = torch.equal(got[0], torch.arange(count)) and torch.equal(got[1], dense[:count])
        return None if right else str(got)


def test_horovods_way_pads_what_is_uneven() -> None:
    assert on(3, uneven, replace(TINY, height=3)) == [None] * 3
