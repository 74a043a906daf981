"""Who fails in a verb of gloo's is named, and torch's own group raises from then on.

Links that are cut in one are in tests/group/test_faults.py, where each rank has a host.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.base.pace import patient

PROGRAM = Path(__file__).with_name("fault_program.py").read_text()
LONG, SHORT = 120.0, 2.0  # timeouts: one that must not pass, and one that must
VERBS = {  # that a call takes of rows that go in four parts, or of a step
    "sum": 4,
    "sum later": 4,
    "table": 2,
    "all_to_all": 1,
    "exchange later": 1,
    "all_gather_v": 1,
    "reduce_scatter_v": 1,
    "layer": 2,
    "sync_grads": 2,
    "ddp": 2,
}
CASES = [  # the call, the verb, how many ranks there are, and which of them fails
    ("sum", "first", 2, 1),
    ("sum", "middle", 3, 0),
    ("sum", "last", 4, 2),
    ("sum later", "first", 4, 0),
    ("sum later", "middle", 2, 1),
    ("sum later", "last", 3, 1),
    ("table", "last", 3, 0),
    ("all_to_all", "first", 3, 1),
    ("exchange later", "first", 3, 2),
    ("all_gather_v", "first", 3, 0),
    ("reduce_scatter_v", "first", 2, 1),
    ("layer", "first", 4, 1),
    ("layer", "last", 2, 0),
    ("sync_grads", "first", 2, 1),
    ("sync_grads", "last", 3, 0),
    ("ddp", "first", 3, 2),
    ("ddp", "last", 2, 0),
    ("sum later", "made", 3, 1),
    ("sum later", "making", 2, 1),
    ("sum later", "making", 3, 0),
    ("sum later", "connecting", 3, 1),
]


NEW = ("made", "making", "connecting")


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize(("call", "verb", "size", "victim"), CASES)
def test_survivors_name_who_failed(survivors, tmp_path, call, verb, size, victim, fault):
    timeout = LONG if fault == "kill" else SHORT
    given = str(tmp_path / "place"), call, verb, fault, str(victim), str(timeout)
    began, printed = survivors(PROGRAM, given, [{}] * size, victim)
    seen = "died" if fault == "kill" else "does not answer (stopped, cut off, or stuck in foreign"
    for rank, (first, said, torchs) in printed.items():
        assert first["verbs"] == (0 if verb in NEW else VERBS[call])
        assert said["culprit"] == victim, said
        assert said["text"].startswith(f"rank {rank}: rank {victim} {seen}"), said
        late = said["at"] - began
        if fault == "kill":
            assert late < patient(5.0), said
        else:
            assert SHORT - 0.5 < late < SHORT + patient(8.0), said
        assert torchs["raised"], torchs  # and has not waited
        assert torchs["at"] - said["at"] < patient(5.0)


def test_survivors_need_nothing_that_ends_gloos_waits(survivors, tmp_path):
    """It ends none for a message of which a part has come."""
    given = str(tmp_path / "place"), "sum", "middle", "stop alone", "0", str(SHORT)
    began, printed = survivors(PROGRAM, given, [{}] * 3, 0)
    for _, said in printed.values():
        assert said["culprit"] == 0, said
        assert SHORT - 0.5 < said["at"] - began < SHORT + patient(8.0), said
