"""One rank fails, over wires without sockets of weft's, where control links are carried.

The wires are that of the tutorial (`examples/wire_streams`) and that in rounds of `weft.testing`.
With WEFT_SAFE=1 no rank opens control links of its own: a process group of torch's carries them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "wire_streams"

RANKS = """
import gc, json, os, signal, sys, threading, time, torch, warnings, weft
from weft.base.pace import patient
from weft.wire.torch_gloo import GlooCarrier

wire, example, *faults = sys.argv[3:]
if wire == "streams":
    sys.path.insert(0, example)
    from weft_streams import make_wire
else:
    from weft.testing import round_wire as make_wire
weft.register_wire(wire, make_wire)
rows = torch.arange(5_000), torch.ones(5_000, 8)
LONG = 300.0

def carried():
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("weft hear"))

def are_carried_by(count):
    # threads end a moment after what they carried was closed
    until = time.monotonic() + patient(15.0)
    while len(carried()) != count and time.monotonic() < until:
        time.sleep(0.02)
    assert len(carried()) == count, (fault, carried())

def wait_for_ever():
    on.post((), [((rank + 1) % 3, torch.empty(2))]).wait()

def in_a_wait(do, *given):
    def watch():
        while group.session.detector.waiting is None:
            time.sleep(0.001)
        do(*given)

    threading.Thread(target=watch, daemon=True).start()

def take(number):
    # as any thread may take a signal, whose handler the main thread runs
    signal.pthread_kill(threading.get_ident(), number)

def leave_a_child():
    warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
    if os.fork() == 0:
        there("over")  # which lives until the others have seen the death of its parent
        os._exit(0)

def garble_frames():
    send = GlooCarrier.send

    def send_garbled(self, tensors, peer, tag):
        tensors[0][8:16] = torch.tensor([-7]).view(torch.uint8)  # the length of its message
        return send(self, tensors, peer, tag)

    GlooCarrier.send = send_garbled

def fail():
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "fork":
        leave_a_child()
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise KeyError("a fault of this test")
    if fault == "interrupt":  # in a wait that nobody ends, nor the signal itself
        in_a_wait(take, signal.SIGINT)
        wait_for_ever()
    if fault == "close":
        weft.shutdown()
        sys.exit(0)
    if fault == "close in a thread":
        in_a_wait(weft.shutdown)
        wait_for_ever()
    if fault == "a garbled message":
        group.session.detector.links.send(0, b'{"bye": ["nobody"]}\\n')
        wait_for_ever()
    if fault == "a garbled frame":
        garble_frames()
        group.session.detector.links.send(0, b'{"ask": 1}\\n')
        wait_for_ever()

def drop_a_group():
    # in a circle of references, which only a collection of garbage ends
    dropped = [group.split([0, 1, 2])]
    are_carried_by(4)
    weft.barrier(group=dropped[0])
    dropped.append(dropped)

def collect_in_a_wait():
    # rank 1 waits for a message that is sent once it has collected its garbage
    gc.disable()
    drop_a_group()
    if rank == 1:
        def collect(*_):
            gc.collect()
            (folder / "collected").touch()

        signal.signal(signal.SIGUSR1, collect)
        in_a_wait(take, signal.SIGUSR1)
        (came,) = on.post((), [(0, torch.empty(2))]).wait()
        assert came.tolist() == [5.0, 5.0]
    else:
        gc.collect()
        there("collected")
        on.post([(1, torch.full((2,), 5.0))] if rank == 0 else []).wait()
    are_carried_by(2)
    gc.enable()

for number, fault in enumerate([*faults, "nothing"]):
    if life not in ("all", str(number)):
        continue
    if rank == 0:
        (folder / f"begun {number}").touch()
    there(f"begun {number}")
    place = f"file://{folder}/place-{number}"
    group = weft.init(rendezvous=place, timeout=LONG, wire=wire)
    on = group.on(torch.device("cpu"))
    are_carried_by(2)  # a thread of each peer
    if fault == "freeze":
        group.set_timeout(patient(1.0))
    try:
        weft.sparse_all_reduce(rows, algorithm="split")
        if fault == "collect":
            collect_in_a_wait()
        elif rank == 1:
            fail()
        for _ in range(1 if fault in ("collect", "nothing") else 20):
            _, sums = weft.sparse_all_reduce(rows, algorithm="split")
        print(json.dumps([None, sums.sum().item()]), flush=True)
    except weft.WireError as error:
        print(json.dumps([error.culprit, str(error)]), flush=True)
    weft.shutdown()
    gc.collect()
    are_carried_by(0)
if rank == 0:
    (folder / "over").touch()
"""
FAULTS = {  # and what the others say of rank 1
    "collect": None,
    "kill": "died",
    "raise": "left, after it raised (KeyError: 'a fault of this test')",
    "interrupt": "was interrupted (SIGINT)",
    "close": "left",
    "close in a thread": "left",
    "a garbled message": 'sent what no detector says: b\'{"bye": ["nobody"]}\'',
    "a garbled frame": "sent what no detector says: b'a frame of -7 bytes for channel 0'",
    "freeze": "does not answer (stopped, cut off, or stuck in foreign code)",
    "fork": "died",
}
IN_ROUNDS = ("kill", "interrupt", "close", "freeze")  # what the links carry is the same there


@pytest.mark.parametrize(("wire", "faults"), [("streams", [*FAULTS]), ("rounds", IN_ROUNDS)])
def test_all_survivors_name_who_failed_and_init_again(lives, wire, faults):
    given = wire, str(EXAMPLE), *faults
    *failed, last = lives(RANKS, given, len(faults) + 1, {"WEFT_SAFE": "1"})
    works = [None, 3 * 5_000 * 8.0]
    for fault, both in zip(faults, failed, strict=True):
        text = FAULTS[fault]
        if text is None:
            assert both == [works] * 2, fault
            continue
        for rank, (culprit, said) in zip((0, 2), both, strict=True):
            assert culprit == 1, (fault, said)
            assert said.startswith(f"rank {rank}: rank 1 {text}"), (fault, said)
            assert said.endswith("; start the group again"), (fault, said)
    assert last == [works] * 2
