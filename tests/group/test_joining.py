"""Who waits to be joined is told if a rank dies: in a split, and with a line."""

from __future__ import annotations

import pytest

import weft
from weft.testing import processes
from weft.testing.pace import patient

RANK = """
import json, os, signal, sys, weft
place, joins = sys.argv[1:]
group = weft.init(rendezvous=place, timeout=1000.0)
try:
    weft.barrier()  # another rank may be in it yet, and is told there
    if group.rank == 2:
        print(json.dumps({"at": 0.0}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
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
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_who_waits_for_a_rank_that_died_is_told_at_once(survivors, tmp_path, port, kind, joins):
    """Also where the store ends with the rank that was told first."""
    place = f"file://{tmp_path}/place" if kind == "file" else f"tcp://127.0.0.1:{port}"
    _, printed = survivors(RANK, (place, joins), [{}] * 3, 2)
    for rank, (said,) in printed.items():
        assert said["text"].startswith(f"rank {rank}: rank 2 died"), said
        assert said["culprit"] == 2


def splits_unlike_the_other():
    with weft.init(timeout=patient(5.0)) as group:
        if group.rank > 0:
            with pytest.raises(weft.WireError, match="rank 1 did not join") as caught:
                group.split([1, 2] if group.rank == 1 else [2, 1])
            return str(caught.value)
        return "and that all ranks make their calls in the same order"


def test_who_is_split_otherwise_is_told_of_the_order():
    remedy, *said = processes(3, splits_unlike_the_other)
    assert all(remedy in each for each in said)
