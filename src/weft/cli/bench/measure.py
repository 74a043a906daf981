"""One rank's program: check every contender, then time them in turn.

* Checked first: each contender runs once; rank 0 (every rank, where rounding enters) compares the
  result with the oracle, and all ranks compare digests. Whoever is wrong is not timed.
* Interleaved: an iteration is one call of every contender, so that a noisy neighbour hits all
  alike; in an order drawn anew each time, since what one leaves in caches and memory is paid for by
  the next. A barrier goes before each call; a call's time is that of its slowest rank.
* After the last iteration the results are digested once more: memory that is used again must not
  have changed them.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .cases import Case, indices, values
from .contenders import Contender, peer, weft_by
from .oracle import Answer, Sizes, answer, digest, sizes
from .results import OWN, Head, Row, summary

__all__ = ["Job", "run"]

Emit = Callable[[Head | Row | str], None]
"""Where rank 0 sends what it finds: the head once, rows, and words on what goes on (`str`)."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure; the same on every rank.

    Attributes:
        cases: in this order.
        algorithms: of weft, `"auto"` among them or not.
        peers: names of peers.
        iters, warmup: timed and untimed calls of each contender.
        check: compare results with the oracle.
        seed: of the data.
        link: bits per second of a rank's link, None if unknown.
        timeout: seconds that any wait may last, None for the group's own.
    """

    cases: tuple[Case, ...]
    algorithms: tuple[str, ...]
    peers: tuple[str, ...]
    iters: int = 10
    warmup: int = 2
    check: bool = True
    seed: int = 0
    link: float | None = None
    timeout: float | None = None


def run(job: Job, emit: Emit) -> bool:
    """Measure on this rank of the group that the launcher made; True if no result was wrong."""
    import weft
    from weft import kernels

    if not kernels.kept() and os.environ.get("RANK", "0") == "0":
        emit("making machine code, once on this machine: it takes ten seconds or so")
    with weft.init(timeout=job.timeout):
        head = _head(job)
        speak = emit if dist.get_rank() == 0 else _silent
        speak(head)
        right = True
        for case in job.cases:
            rows = _measure(job, case, speak)
            for row in rows:
                speak(row)
            right = right and all(row.status != "wrong" for row in rows)
        return right


def _silent(_: Head | Row | str) -> None:
    """What a rank other than 0 has to say."""


def _measure(job: Job, case: Case, speak: Emit) -> list[Row]:
    from weft import kernels
    from weft.kernels.ops import OPS

    rank, ranks = dist.get_rank(), dist.get_world_size()
    speak(f"{case.name}: making the data")
    own = indices(case, rank, job.seed), values(case, rank, job.seed)
    entered: list[Contender] = [weft_by(name, case, *own) for name in job.algorithms]
    refused: dict[str, str] = {}
    for name in job.peers:
        entrant = peer(name, case, *own)
        if isinstance(entrant, str):
            refused[name] = entrant
        else:
            entered.append(entrant)

    speak(f"{case.name}: checking the results")
    if job.algorithms:  # else the first calls would be timed on kernels that serve meanwhile
        kernels.warm([(own[0].dtype, case.torch_dtype, OPS[case.op])])
    # where rounding enters, ranks may differ, so that everyone must look for itself
    rounds = case.values == "normal" or case.torch_dtype.itemsize == 2
    looks = job.check and (rank == 0 or rounds)
    right = answer(case, ranks, job.seed, rounds=rounds) if looks else None
    verdicts = {c.name: _try(c, right, job.check and (c.own or not rounds)) for c in entered}
    del right
    refused |= {name: v.why for name, v in verdicts.items() if v.status == "refused"}
    wrong = {name: v.why for name, v in verdicts.items() if v.status == "wrong"}

    starters = [c for c in entered if verdicts[c.name].status == "ok"]
    local = _times(job, starters, lambda words: speak(f"{case.name}: {words}"))
    for contender in starters:
        name = contender.name
        if _any(job.check and local.digests[name] != verdicts[name].digest):
            wrong[name] = "the result of the last iteration differs from that of the first"
    everybody: list[_Times] = [local] * ranks
    dist.all_gather_object(everybody, local)
    counted = sizes(case, ranks, job.seed) if rank == 0 else Sizes(ranks, 0, 0, 0.0)
    rows = []
    for name in (*(OWN + algorithm for algorithm in job.algorithms), *job.peers):
        if name in refused:
            rows.append(summary(case, counted, name, "refused", refused[name], link=job.link))
        elif name in wrong:
            rows.append(summary(case, counted, name, "wrong", wrong[name], link=job.link))
        else:
            seconds = [
                max(each) for each in zip(*(t.seconds[name] for t in everybody), strict=True)
            ]
            records = [t.records[name] for t in everybody]
            rows.append(summary(case, counted, name, "ok", "", seconds, records, link=job.link))
    return [row.beside(rows) for row in rows]


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: str
    why: str
    digest: str


def _try(contender: Contender, right: Answer | None, compare: bool) -> _Verdict:
    """One call; the same verdict on every rank, though the digest is each rank's own."""
    mine, words = "", ""
    status = "ok"
    _any(False)  # not a barrier: gloo's may raise what the contender before was refused with
    try:
        parts = contender.parts(contender.call(contender.prepare()))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        # a peer's death lands here too, and then in the exchange below, which raises
        status, words = "refused", " ".join(str(error).split())
    else:
        mine = digest(parts)
        fault = contender.fault(parts, right) if right is not None else None
        if fault is not None:
            status, words = "wrong", f"rank {dist.get_rank()}: {fault}"
    everybody: list[tuple[str, str, str]] = [("", "", "")] * dist.get_world_size()
    dist.all_gather_object(everybody, (status, words, mine))
    for worst in ("refused", "wrong"):
        for each, why, _ in everybody:
            if each == worst:
                return _Verdict(worst, why, mine)
    others = [rank for rank, each in enumerate(everybody) if each[2] != everybody[0][2]]
    if compare and others:
        return _Verdict("wrong", f"the bits on ranks {others} are not those on rank 0", mine)
    return _Verdict("ok", "", mine)


@dataclass(frozen=True, slots=True)
class _Times:
    """What one rank saw: seconds of each iteration, the last record, the last result's digest."""

    seconds: dict[str, list[float]]
    records: dict[str, Any]
    digests: dict[str, str]


def _times(job: Job, starters: list[Contender], speak: Callable[[str], None]) -> _Times:
    seconds: dict[str, list[float]] = {c.name: [] for c in starters}
    seen = _Times(seconds, {}, {})
    gc.collect()
    gc.disable()  # a collection would hit one contender and not the others
    try:
        for turn in range(-job.warmup, job.iters):
            speak(f"iteration {turn + 1} of {job.iters}" if turn >= 0 else "warming up")
            for contender in _drawn(starters, job.seed, turn):
                given = contender.prepare()
                dist.barrier()
                begin = time.perf_counter()
                result = contender.call(given)
                took = time.perf_counter() - begin
                if turn >= 0:
                    seconds[contender.name].append(took)
                if turn == job.iters - 1:
                    seen.records[contender.name] = contender.record()
                    if job.check:
                        seen.digests[contender.name] = digest(contender.parts(result))
                del result, given  # its pages go back before the next one's clock runs
    finally:
        gc.enable()
    return seen


def _drawn(starters: list[Contender], seed: int, turn: int) -> list[Contender]:
    """All of them, in an order that is the same on all ranks."""
    return random.Random(f"{seed} {turn}").sample(starters, len(starters))


def _any(mine: bool) -> bool:
    """Whether it is so on any rank."""
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _head(job: Job) -> Head:
    """What the table is headed with; collective, since it counts the hosts."""
    import weft
    from weft import kernels

    namespace = "/proc/self/ns/net"  # netlab's hosts share a name, not a network
    host = socket.gethostname(), os.readlink(namespace) if os.path.exists(namespace) else ""
    hosts = [host] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    return Head(
        weft=weft.__version__,
        torch=torch.version.__version__,
        python=platform.python_version(),
        kernels=kernels.describe(),
        ranks=dist.get_world_size(),
        hosts=len(set(hosts)),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        iters=job.iters,
        warmup=job.warmup,
        checked=job.check,
        seed=job.seed,
        link=job.link,
    )
