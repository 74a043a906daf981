"""A rank whose calls go by gloo's process group, for test_verbs_faults: one rank fails in a verb.

    fault_program.py PLACE CALL VERB FAULT VICTIM TIMEOUT

In the second call the rank `VICTIM` ends itself ("kill") or stops ("stop") as it comes to a verb:
the first, the middle or the last one. Or it does so in the first call, which makes a process group
of weft's own: as it comes to that ("made"), once all ranks have ("making"), or as it comes to that
group's first collective ("connecting"). In a fault "stop alone" nothing ends the waits of gloo.
Each line that is printed is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import weft
import weft.nn
from weft.sparse import plain
from weft.verbs import group as verbs_of_group
from weft.verbs.group import GroupVerbs

place, name, verb, fault, victim, timeout = sys.argv[1:]
fault, _, is_alone = fault.partition(" ")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(**line):
    print(json.dumps({**line, "at": time.monotonic()}), flush=True)


def fail():
    if rank == int(victim):
        say()
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        signal.pause()  # this thread may be the last that it reaches


class Verbs:
    """How many verbs the call has run, and in which one this rank fails; None: in none."""

    count = 0
    fails_in = None


run, connect = GroupVerbs._run, GroupVerbs._connect
new, reduce = verbs_of_group.new_process_group, dist.all_reduce


def failing_run(self, what, body):
    if Verbs.count == Verbs.fails_in:
        fail()
    Verbs.count += 1
    run(self, what, body)


def failing_connect(self):
    if verb == "made":
        fail()
    connect(self)


def failing_new(*args):
    if verb == "making":
        fail()
    return new(*args)


def failing_reduce(*args, **options):
    if verb == "connecting":
        fail()
    return reduce(*args, **options)


GroupVerbs._run = failing_run
GroupVerbs._connect = failing_connect
verbs_of_group.new_process_group = failing_new
if is_alone:
    verbs_of_group._end_gloo = lambda group: None

dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
group = weft.init(wire="group", timeout=60.0)
plain.WHOLE = 1 << 19  # of rows that are gathered at once: those of a sum go in four parts

rows = weft.Rows(torch.arange(4000), torch.ones(4000, 120 // size), 40_000)
small = weft.Rows(torch.arange(4000), torch.ones(4000, 4), 4000)
parts = [torch.ones(40_000 + to) for to in range(size)]
wanted = [torch.arange(rank, 4000)] * size
sizes = [3000 + to for to in range(size)]
layer = weft.nn.Repartition(weft.Partition((size, 1)), weft.Partition((1, size)))
shard = torch.ones(64, 64 * size, requires_grad=True)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 32, sparse=True), torch.nn.Linear(32, 32))

if name == "ddp":
    ddp = DistributedDataParallel(model)
    weft.ddp.register(ddp)


def sync_grads():
    model(torch.arange(64).view(8, 8)).sum().backward()
    weft.sync_grads(model)


CALLS = {
    "sum": lambda: weft.sparse_all_reduce(rows),
    "sum later": lambda: weft.sparse_all_reduce(rows, async_op=True).wait(),
    "table": lambda: weft.sparse_all_reduce(small),
    "all_to_all": lambda: weft.all_to_all(parts),
    "exchange later": lambda: weft.exchange(rows.values, wanted, async_op=True).wait(),
    "all_gather_v": lambda: weft.all_gather_v(torch.ones(sizes[rank], 9), sizes),
    "reduce_scatter_v": lambda: weft.reduce_scatter_v(torch.ones(sum(sizes), 9), sizes),
    "layer": lambda: layer(shard).sum().backward(),
    "sync_grads": sync_grads,
    "ddp": lambda: ddp(torch.arange(64).view(8, 8)).sum().backward(),
}
is_new = verb in ("made", "making", "connecting")
try:
    if not is_new:
        CALLS[name]()
        last = Verbs.count - 1
        Verbs.fails_in = {"first": 0, "middle": last // 2, "last": last}[verb]
    weft.barrier()
    group.set_timeout(float(timeout))
    say(verbs=Verbs.count)
    Verbs.count = 0
    dist.all_reduce = failing_reduce
    while True:
        CALLS[name]()
except weft.WireError as error:
    say(culprit=error.culprit, text=str(error))
if is_alone:
    os._exit(0)
try:
    reduce(torch.ones(1))
    say(raised="")
except RuntimeError as error:
    say(raised=str(error))
os._exit(0)
