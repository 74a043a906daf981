"""Who waits to be joined hears what becomes of the others: a split, and a line."""

from __future__ import annotations

import re

import pytest

import weft
from weft.testing import processes
from weft.testing.pace import patient

RANK = """
import json, os, signal, sys, weft
place, how, joins = sys.argv[1:]
group = weft.init(rendezvous=f"file://{place}", timeout=1000.0)
weft.barrier()
try:
    if group.rank == 2:
        print(json.dumps({"at": 0.0}), flush=True)
        if how == "died":
            os.kill(os.getpid(), signal.SIGKILL)
        weft.shutdown()
    elif joins == "add_line":
        group.add_line()
    else:
        group.split([2, 1, 0])
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("joins", ["split", "add_line"])
@pytest.mark.parametrize("how", ["died", "left"])
def test_who_waits_for_a_rank_that_is_gone_is_told_at_once(survivors, tmp_path, how, joins):
    _, printed = survivors(RANK, (str(tmp_path / "place"), how, joins), [{}] * 3, 2)
    for rank, (said,) in printed.items():
        assert said["text"].startswith(f"rank {rank}: rank 2 {how}"), said
        assert said["culprit"] == 2


def splits_unlike_the_other():
    with weft.init(timeout=patient(5.0)) as group:
        said = ""
        if group.rank > 0:
            with pytest.raises(weft.WireError) as caught:
                group.split([1, 2] if group.rank == 1 else [2, 1])
            said = str(caught.value)
        weft.barrier()  # the group itself goes on
        return said


def test_who_is_split_otherwise_is_told_where_the_other_is():
    _, *said = processes(3, splits_unlike_the_other)
    for other, text in zip((2, 1), said, strict=True):
        assert re.search(
            rf"rank 1 did not join .*: rank {other} has been .*{__file__}:\d+ in", text
        )
        assert "see that all ranks make their calls in the same order" in text
