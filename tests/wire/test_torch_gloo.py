"""What is special of the wire over a process group of torch's; the rest is in `test_contract`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import processes, run
from weft.wire.process_group import connect


def transport_of(wire):
    names = {each.name for each in threading.enumerate()}
    return "torch" if f"weft receive {wire.rank}-{1 - wire.rank}" in names else "tcp"


def summed(**options):
    with weft.init(timeout=20, **options) as wire:
        kind = transport_of(wire)
        total = torch.tensor([wire.rank + 1.0])
        dist.all_reduce(total)
        group = dist.new_group([1, 0])  # also a group of the program's own goes over it
        indices, values = weft.sparse_all_reduce(
            (torch.tensor([wire.rank, 9]), torch.ones(2)), group=group
        )
        with pytest.raises(weft.WeftError, match="running already, with transport="):
            weft.init(transport="tcp" if kind == "torch" else "torch")
    return kind, total.item(), indices.tolist(), values.tolist()


def asked():
    return summed(transport="torch")


@pytest.mark.parametrize(("body", "env"), [(asked, {}), (summed, {"WEFT_TRANSPORT": "torch"})])
def test_a_transport_is_chosen(body, env):
    assert processes(2, body, env=env) == [("torch", 3.0, [0, 1, 9], [1.0, 1.0, 2.0])] * 2


SAFE = """
import weft, weft.wire.process_group
weft.init()
print(weft.wire.process_group.chosen(), weft.kernels.describe())
"""


def test_to_be_safe_is_that_and_the_reference_kernels():
    environment = {**os.environ, "WEFT_SAFE": "1"}
    line = [sys.executable, "-c", SAFE]
    said = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("torch torch operations (WEFT_SAFE=1)")


def refusal(transport):
    if os.environ["RANK"] == "0":
        transport = None
    with pytest.raises(weft.WeftError) as caught:
        weft.init(timeout=20, transport=transport)
    return str(caught.value)


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        (
            "torch",
            "rank 0 was asked for wire 'tcp', and rank 1 for 'torch': give all ranks the same",
        ),
        ("smoke", "wire 'smoke' is unknown: use one of 'mpi', 'tcp', 'torch'"),
    ],
)
def test_ranks_that_differ_are_told_alike(transport, text):
    first, second = processes(2, refusal, transport)
    assert first == second
    assert text in first


def large(wire):
    """Frames of a long message, and what the detector says between them."""
    peer = 1 - wire.rank
    for length in (999, 1000, 1001, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17):
        sent = (torch.arange(length) + wire.rank).to(torch.uint8)
        pending = wire.post([(peer, sent)], [(peer, length + 5)])
        assert torch.equal(pending.wait()[0][:length], (torch.arange(length) + peer).byte())
        pending.release()


def test_messages_of_any_length():
    run(2, large, on="torch")


def too_long(wire):
    if wire.rank == 0:
        with pytest.raises(weft.WireError) as caught:
            wire.post([(1, torch.zeros(9, dtype=torch.uint8))], [(1, 8)]).wait()
    else:
        with pytest.raises(weft.WireError) as caught:
            wire.post((), [(0, 8)]).wait()
    assert caught.value.culprit == 0
    return str(caught.value)


def test_who_sends_more_than_was_asked_for_is_named():
    for text in run(2, too_long, on="torch"):
        assert "rank 0 sent 9 bytes for a receive of 8" in text


def of_wires():
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("weft "))


def nothing_left(wire):
    before = of_wires()
    with wire.sub([0, 1]) as part:
        assert len(of_wires()) == len(before) + 5  # two receive, two send, one watches
        large(part)
    assert of_wires() == before


def test_a_closed_wire_has_no_threads():
    run(2, nothing_left, on="torch")


def leaving(wire):
    """Rank 0 goes while its peer sends what it never asks for, and tells it that it gives up."""
    before = of_wires()
    for _ in range(5):
        part = wire.sub([0, 1])
        sent = part.post([(0, torch.ones(1 << 20))]) if wire.rank == 1 else None
        wire.dense_all_reduce(torch.ones(1), "sum").wait()
        if sent is not None:
            sent.wait()
            part.abort("it had enough")
        part.close()
    assert of_wires() == before


def test_who_leaves_waits_for_nobody():
    run(2, leaving, on="torch")


def test_one_rank_alone_opens_nothing():
    with connect(dist.HashStore(), 0, 1, 5.0, wire="torch") as wire:
        assert wire.post().wait() == []
        assert wire.sub([0]).size == 1


def test_threads_make_groups_at_once_over_one_store():
    """gloo blocks in the connection to the store; in another order on each rank it must not."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port), dist.TCPStore("127.0.0.1", server.port)]

    def joined(rank, name):
        with connect(clients[rank], rank, 2, 20, name=name, wire="torch") as wire:
            total = torch.tensor([rank + 1.0])
            wire.dense_all_reduce(total, "sum").wait()
            return total.item()

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(joined, *first) for first in ((0, "a"), (1, "b"))]
        time.sleep(1.0)  # until each waits for the other rank
        rest = ((0, "b"), (1, "a"), (0, "c"), (1, "c"))
        calls += [pool.submit(joined, *each) for each in rest]
        assert [call.result() for call in calls] == [3.0] * 6


def test_a_group_of_wefts_own_has_one_thread():
    """Two of gloo's threads corrupt memory where a sparse all-reduce is under way (docs/ddp.md)."""
    of_torch = 2  # those of the default group
    # a wire, and control links; the group inside the backend, and its wire and links
    of_weft = 2 + 1 + 2
    counts = processes(2, threads_of_gloo, env={"WEFT_TRANSPORT": "torch"})
    assert counts == [of_torch + of_weft] * 2


def threads_of_gloo():
    with weft.init(timeout=20):
        group = dist.new_group(backend="weft")
        weft.barrier()
        weft.barrier(group=group)
        time.sleep(1.0)  # a thread names itself when it first runs
        tasks = Path("/proc/self/task").glob("*/comm")
        return sum(task.read_text() == "pt_gloo_runloop\n" for task in tasks)
