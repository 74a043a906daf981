"""One rank fails, over wires without sockets of weft's, where control links are carried.

The wires are that of the tutorial (`examples/wire_streams`) and that in rounds of `weft.testing`.
With WEFT_SAFE=1 no rank opens control links of its own: a process group of torch's carries them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "wire_streams"
SAFE = {"WEFT_SAFE": "1"}

RANK = """
import json, os, signal, sys, threading, time, torch, weft
place, wire, fault, victim, example = sys.argv[1:]
if wire == "streams":
    sys.path.insert(0, example)
    from weft_streams import make_wire
else:
    from weft.testing import round_wire as make_wire
weft.register_wire(wire, make_wire)
group = weft.init(rendezvous=f"file://{place}", timeout=60.0, wire=wire)
threads = {thread.name for thread in threading.enumerate()}
assert any(name.startswith("weft hear ") for name in threads), threads  # of a carrier
rows = torch.arange(5_000), torch.ones(5_000, 8)
on = group.on(torch.device("cpu"))
peer = (group.rank + 1) % group.size

def fail():
    print(json.dumps({"at": time.monotonic()}), flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise KeyError("a fault of this test")
    if fault == "interrupt":  # in a wait that nobody ends
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        on.post((), [(peer, torch.empty(2))]).wait()
    if fault == "close":
        weft.shutdown()
        sys.exit(0)

try:
    for step in range(20):
        if step == 5 and group.rank == int(victim):
            fail()
        weft.sparse_all_reduce(rows, algorithm="split")
except weft.WireError as error:
    print(json.dumps({"text": str(error), "culprit": error.culprit}), flush=True)
"""


@pytest.mark.parametrize("wire", ["streams", "rounds"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("kill", "died"),
        ("raise", "left, after it raised (KeyError: 'a fault of this test')"),
        ("interrupt", "was interrupted (SIGINT)"),
        ("close", "left"),
    ],
)
def test_all_survivors_name_who_failed(survivors, tmp_path, wire, fault, text):
    victim = 1
    given = str(tmp_path / "place"), wire, fault, str(victim), str(EXAMPLE)
    _, printed = survivors(RANK, given, [SAFE] * 3, victim)
    for rank, [said] in printed.items():
        assert said["culprit"] == victim, said
        assert said["text"].startswith(f"rank {rank}: rank {victim} {text}"), said
