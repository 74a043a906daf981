"""Ranks that are processes, several on one GPU: over NCCL where it lets them, or over gloo.

    ranks.py BODY SIZE [gloo]

starts them; each runs the body, and says "> " before what is to be shown.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import weft
import weft.ddp
import weft.nn
from weft.verbs.group import GroupVerbs

CPU = os.environ.get("WEFT_GPU_CHECK", "cpu") == "cpu"
DEVICE = torch.device("cpu") if CPU else torch.device("cuda", 0)
BODY, SIZE = sys.argv[1], int(sys.argv[2])
GLOO = CPU or "gloo" in sys.argv
FAULTS = {"kill": signal.SIGKILL, "kill_first": signal.SIGKILL, "stop": signal.SIGSTOP}
TIMEOUT = 4.0 if BODY == "stop" else 60.0


def start():
    """Start the ranks; the status: 0 if all ended well but, in a fault, the last one."""
    place = os.path.join(tempfile.mkdtemp(), "store")
    ranks = []
    for rank in range(SIZE):
        # NCCL refuses two ranks of one GPU, unless they seem to be on two hosts
        own = {"RANK": f"{rank}", "NCCL_HOSTID": f"rank{rank}", "GLOO_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, **own, "NCCL_SOCKET_IFNAME": "lo", "PLACE": place}
        environment.setdefault("OMP_NUM_THREADS", "1")
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    must = ranks[:-1] if BODY in FAULTS else ranks
    statuses = [each.wait() for each in must]
    for each in ranks[len(must) :]:
        each.kill()
        each.wait()
    return int(any(statuses))


def show(*words):
    if os.environ["RANK"] == "0":
        print(">", *words, flush=True)


def begin(rank):
    """The process group, and weft's."""
    kinds = "gloo" if GLOO else "cpu:gloo,cuda:nccl"
    options = {} if GLOO or BODY == "kill_first" else {"device_id": DEVICE}
    if not CPU:
        torch.cuda.set_device(DEVICE)
    place = f"file://{os.environ['PLACE']}"
    limit = timedelta(seconds=120)
    dist.init_process_group(kinds, place, limit, SIZE, rank, **options)
    return weft.init(wire="group" if CPU else None, timeout=TIMEOUT)


def late():
    """Keep the stream busy: what does not wait for it then finds what is not there yet."""
    if not CPU:
        torch.cuda._sleep(1_000_000)  # about half a millisecond


def given(kind, rank):
    """Rows on the CPU, and the options of a call."""
    draw = torch.Generator().manual_seed(rank)
    count, height, width = {"small": (50, 60, 8), "wide": (300, 6000, 600)}.get(
        kind, (2000, 6000, 16)
    )
    ids = torch.randint(height, (count,), generator=draw)
    ids = ids[
        : 0 if kind == "empty" and rank % 2 == 0 else 1 + 700 * rank if kind == "uneven" else count
    ]
    values = torch.randint(-9, 9, (len(ids), width), generator=draw)  # so that sums are exact
    dtype = {"bfloat16": torch.bfloat16, "min": torch.int64}.get(kind, torch.float32)
    op = {"min": "min", "max": "max", "function": torch.add, "avg": "avg"}.get(kind, "sum")
    return weft.Rows(ids, values.to(dtype), height), {"op": op}


KINDS = ("uniform", "empty", "uneven", "wide", "small", "bfloat16", "min", "max", "avg", "function")


def expected(kind):
    """The result, made here of all ranks' rows."""
    rows = [given(kind, rank)[0] for rank in range(SIZE)]
    ids = torch.cat([each.indices for each in rows])
    values = torch.cat([each.values for each in rows]).double()
    indices, where = ids.unique(return_inverse=True)
    how = {"min": "amin", "max": "amax"}.get(kind, "sum")
    found = torch.zeros(len(indices), values.shape[1], dtype=torch.float64)
    found.scatter_reduce_(0, where[:, None].expand_as(values), values, how, include_self=False)
    found = found / SIZE if kind == "avg" else found
    return indices, found.to(rows[0].values.dtype)


def calls(group):
    """Sums of all kinds, made late and changed at once; and each routine."""
    me = group.rank
    for kind in KINDS:
        indices, values = expected(kind)
        for is_async in (False, True):
            rows, options = given(kind, me)
            late()
            there = weft.Rows(rows.indices.to(DEVICE), rows.values.to(DEVICE).clone(), rows.height)
            found = weft.sparse_all_reduce(there, async_op=is_async, **options)
            found = found.wait() if is_async else found
            got = found.indices.clone(), found.values.clone()
            found.values.zero_()  # the caller's, at once
            there.values.fill_(1)
            assert torch.equal(got[0].cpu(), indices), f"{kind}: indices, async {is_async}"
            near = (
                torch.allclose(got[1].cpu(), values)
                if kind == "avg"
                else torch.equal(got[1].cpu(), values)
            )
            assert near, f"{kind}: values, async {is_async}"
    rows = given("uniform", me)[0]
    pair = rows.indices.to(DEVICE), rows.values.to(DEVICE)
    for _, sums in weft.sparse_all_reduce([pair, pair]):
        assert torch.equal(sums.cpu(), expected("uniform")[1])
    late()
    parts = [torch.full((me + to + 1,), me, device=DEVICE) for to in range(SIZE)]
    for peer, part in enumerate(weft.all_to_all(parts)):
        assert part.tolist() == [peer] * (peer + me + 1)
    assert weft.all_reduce(torch.ones(5000, device=DEVICE))[7].item() == SIZE
    x = torch.full((4, 3), float(me), device=DEVICE, requires_grad=True)
    whole = weft.nn.AllGather(weft.Partition((SIZE, 1)), 0)(x)
    whole.sum().backward()
    assert whole.shape == (4 * SIZE, 3) and x.grad.unique().tolist() == [SIZE]
    table = weft.nn.ShardedEmbedding(300, 4, device=DEVICE)
    ids = torch.arange(0, 300, 7, device=DEVICE)
    found = table(ids)
    assert torch.equal(found, table.to_dense()[ids])
    found.sum().backward()
    wrong = weft.Rows(pair[0] - (10_000 if me == 0 else 0), pair[1], 6000)
    try:
        weft.sparse_all_reduce(wrong)
        raise AssertionError("an index out of bounds was taken")
    except weft.WeftError as error:
        show("refused:", error)
    group.check()
    show(len(KINDS), "kinds of sums, sync and async, and routines: ok")


def steps(group):
    """Steps of DistributedDataParallel, against sums that are made here."""
    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.EmbeddingBag(2000, 16, sparse=True), torch.nn.Linear(16, 4)
    ).to(DEVICE)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    weft.ddp.register(model)
    for step in range(6):
        draw = torch.Generator().manual_seed(step)
        batches = [torch.randint(2000, (64, 5), generator=draw).to(DEVICE) for _ in range(SIZE)]
        sum(inner(each).square().mean() for each in batches).div(SIZE).backward()
        wanted = [p.grad.to_dense() for p in inner.parameters()]
        model.zero_grad()
        model(batches[group.rank]).square().mean().backward()
        for p, like in zip(inner.parameters(), wanted, strict=True):
            assert torch.allclose(p.grad.to_dense(), like, rtol=1e-4, atol=1e-6), f"step {step}"
        model.zero_grad()
    show("6 steps of DistributedDataParallel: ok")


def two(group):
    """Asynchronous calls on two groups, in another order on each rank; captures; memory."""
    rows = given("uniform", group.rank)[0]
    there = weft.Rows(rows.indices.to(DEVICE), rows.values.to(DEVICE), rows.height)
    other = dist.new_group()
    for each in (None, other):
        weft.sparse_all_reduce(there, group=each)
    for turn in range(20):
        groups = [None, other] if group.rank % 2 == turn % 2 else [other, None]
        works = [weft.sparse_all_reduce(there, group=each, async_op=True) for each in groups]
        for work in works:
            work.wait()
    show("20 pairs of calls on two groups, in different orders: ok")
    if CPU:
        return
    ones = torch.ones(100, device=DEVICE)
    for _ in range(20):
        weft.sparse_all_reduce(there, async_op=True).wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ones * 2
        graph.replay()
    before = torch.cuda.memory_allocated()
    for _ in range(40):
        weft.sparse_all_reduce(there)
    more = torch.cuda.memory_allocated() - before
    assert more < 1 << 22, more
    show("20 captures behind calls; 40 calls keep", more, "bytes")


def fault(group):
    """The last rank ends or stops itself in a verb: the others name it; torch's group raises."""
    me = group.rank
    rows = given("uniform", me)[0]
    there = weft.Rows(rows.indices.to(DEVICE), rows.values.to(DEVICE), rows.height)
    run, count = GroupVerbs._run, [0 if BODY == "kill_first" else -3]

    def failing(self, what, verb):
        if me == SIZE - 1 and count[0] == 0:
            os.kill(os.getpid(), FAULTS[BODY])
        count[0] += 1
        run(self, what, verb)

    GroupVerbs._run = failing
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            weft.sparse_all_reduce(there)
    except weft.WireError as error:
        show(f"raised after {time.monotonic() - began:.2f} s:", error)
        assert error.culprit == SIZE - 1
    began = time.monotonic()
    try:
        ones = torch.ones(1, device=DEVICE)
        dist.all_reduce(ones)
        ones.cpu()
    except Exception as error:
        show(f"torch's group raised {time.monotonic() - began:.2f} s later:", str(error)[:80])
        sys.stdout.flush()
        os._exit(0)
    raise AssertionError("torch's group raised nothing")


BODIES = {"calls": calls, "steps": steps, "two": two, **dict.fromkeys(FAULTS, fault)}

if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(start())
    BODIES[BODY](begin(int(os.environ["RANK"])))
    weft.shutdown()
    dist.destroy_process_group()
