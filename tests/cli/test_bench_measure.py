"""One rank's program of `weft bench`, on real processes: who is right, who is wrong, how long."""

import ctypes
import itertools
import math
import sys
import tempfile
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import weft
from weft.cli.bench.cases import CASES, Case, answer, indices, values
from weft.cli.bench.measure import DENSE_LIMIT, contender, digest, run
from weft.testing import processes
from weft.testing import run as in_pool

PEERS = ("torch", "horovod", "dense")
TINY = Case("tiny", 60, 200, width=5, distribution="zipf")


def on(size, body, *args):
    """Run a rank's program in so many of the processes that all tests share."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        return in_pool(size, _within, meeting, body.__name__, args, on="processes")


def _within(group, meeting, body, args):
    """By its name, since a process of the pool has this module, and need not find it by import."""
    dist.init_process_group("gloo", meeting, rank=group.rank, world_size=group.size)
    try:
        return globals()[body](*args)
    finally:
        dist.destroy_process_group()


Shown = list[tuple[str, str]]


def measured(
    cases,
    names,
    iters=1,
    since=math.inf,
    culprit=None,
    seconds=0.0,
    error=None,
):
    """What one rank finds, and what it shows.

    From a call on weft adds 1 to a value on the culprit (None: on all), or raises the error; on
    rank 1 each call takes so many seconds more.
    """
    real = weft.sparse_all_reduce
    numbers = itertools.count(1)

    def changed(*given, **named):
        if error is not None:
            raise error
        result = real(*given, **named)
        if next(numbers) >= since and culprit in (None, dist.get_rank()):
            result.values[0] += 1
        time.sleep(seconds * (dist.get_rank() == 1))
        return result

    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weft, "sparse_all_reduce", changed)
        found = run(
            cases, names, iters, lambda some: shown.extend((one.case, one.by) for one in some)
        )
    return found, shown


def test_all_contenders_are_right_and_timed():
    some = [CASES[name] for name in ("scalar", "identical", "full")]
    cases = TINY, *(replace(each, rows=100, height=1000) for each in some)
    names = "weft:auto", "weft:split", "weft:gather", *PEERS
    (found, shown), *others = on(3, measured, cases, names, 3)
    assert [silent for _, silent in others] == [[], []]  # only rank 0 shows
    assert shown == [(case.name, name) for case in cases for name in names]
    assert [(one.case, one.by) for one in found] == shown
    assert {one.status for one in found} == {"ok"}, found
    for one in found:
        assert len(one.seconds) == 3 and min(one.seconds) > 0
        if one.by in PEERS:
            assert not one.algorithm and not one.bound_bytes
        else:
            # the bound is what has to be received; the whole group sends what it receives
            assert one.sent_bytes >= one.bound_bytes > 0
    assert {one.algorithm for one in found if one.by == "weft:split"} == {"split"}
    # the same rows on all ranks: the dense bound, 2(P-1)/P
    same = next(one for one in found if one.case == "identical" and one.by == "weft:auto")
    assert same.bound_bytes == round(2 * 2 / 3 * 100 * (64 * 4 + 4))
    # every rank has the figures of all
    assert [one.seconds for one in others[0][0]] == [one.seconds for one in found]


@pytest.mark.parametrize(
    ("rank", "since", "words"),
    [
        (None, 1, "the result on rank 0 is not the sum"),
        (1, 1, "the bits on ranks [1] are not those on rank 0"),
        (1, 3, "the last result differs from the first"),
    ],
)
def test_a_wrong_result_is_seen(rank, since, words):
    for found, _ in on(2, measured, (TINY,), ("weft:gather", "torch"), 2, since, rank):
        ours, torchs = found  # all exit with the same status
        assert (ours.status, ours.why) == ("wrong", words)
        assert torchs.status == "ok"


@pytest.mark.parametrize(("name", "status"), [("weft:auto", "failed"), ("weft:gather", "refused")])
def test_a_case_that_weft_does_not_serve_is_its_failure(name, status):
    """An algorithm that was named may refuse a case, as peers may; `auto` has no excuse."""
    error = weft.WeftError("no\nrows")
    for found, _ in on(2, measured, (TINY,), (name, "torch"), 1, math.inf, None, 0.0, error):
        assert [(one.status, one.why) for one in found] == [(status, "no rows"), ("ok", "")]


def test_a_call_takes_as_long_as_its_slowest_rank():
    (one,), _ = on(2, measured, (TINY,), ("weft:gather",), 2, math.inf, None, 0.3)[0]
    assert min(one.seconds) >= 0.3


def ordinary():
    """In a process of its own, since the setting stays."""
    (one,) = run([TINY], ["weft:gather"], 1, list, unprivileged=True)
    return one.status, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_ranks_run_as_an_ordinary_users_do():
    assert processes(2, ordinary) == [("ok", 0)] * 2


def test_what_does_not_serve_is_refused_with_the_reason():
    tall = replace(TINY, height=DENSE_LIMIT // 20 + 1, name="tall")
    found, _ = on(2, measured, (tall,), ("weft:gather", *PEERS))[0]
    assert [one.status for one in found] == ["ok", "ok", "ok", "refused"]
    assert found[-1].why == "the table has more than 64 MiB"


def unchanged(case):
    """Whether the rows are as before after everybody has had them."""
    with weft.init() as group:
        own = indices(case, group.rank), values(case, group.rank)
        before = own[0].clone(), own[1].clone()
        right = answer(case, group.size)
        for name in ("weft:auto", *PEERS):
            result, prepare, call = contender(name, case, weft.Rows(*own, case.height))
            for _ in range(2):
                found = digest(call(prepare()))
                assert found in (digest(right), digest(right.dense())), result.by
        return torch.equal(own[0], before[0]) and torch.equal(own[1], before[1])


def test_nobody_changes_the_data_of_the_next():
    assert on(2, unchanged, TINY) == [True, True]
