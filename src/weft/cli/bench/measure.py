"""One rank's program: check every contender, then time them in turn.

Contenders are weft's algorithms and the peers, what a user would call instead:
* `torch`: `torch.distributed.all_reduce` on the (uncoalesced) sparse COO tensor, which gloo serves
  by gathering everything everywhere and adding it up one rank after the other;
* `horovod`: Horovod's way in torch (Horovod itself is not run), `sparse_allreduce_async` in
  `horovod/torch/mpi_ops.py`: all-gather the indices and the values as they are, join them to a COO
  tensor. Its all-gather takes uneven lengths, gloo's does not, so lengths go first and the rest is
  padded to the longest. Duplicates are summed by `coalesce()` at the end, as any optimizer would
  have to;
* `dense`: make the rows dense and `torch.distributed.all_reduce` that; only for tables of at most
  64 MiB. Making it dense is part of the time, taking the rows out again is not: its result stays
  dense.

All start from the same rows. What only brings them into the form a call takes (int64 indices in a
COO tensor) is not timed.

* Checked first: each contender runs once; rank 0 (every rank, where rounding enters) compares the
  result with the right answer, and all ranks compare digests. Whoever is wrong is not timed.
* Interleaved: an iteration is one call of every contender, so that a noisy neighbour hits all
  alike; in an order drawn anew each time, since what one leaves in caches and memory is paid for by
  the next. A barrier goes before each call; a call's time is that of its slowest rank.
* After the last iteration the results are digested once more: memory that is used again must not
  have changed them.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft.wire.base import Wire

from .cases import Answer, Case, Sizes, answer, differs, digest, indices, sizes, values
from .results import OWN, Found, Head, Row, summary

DENSE_LIMIT = 64 << 20
"""Bytes of a table up to which the dense way is worth trying."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the job.

    Attributes:
        name: `weft:` and the algorithm asked for, or the peer's.
        prepare: brings the rows into the form that `call` takes; before every call, not timed.
        call: does it.
        parts: the result as tensors, canonical; not timed.
        fault: in what those differ from the answer, or None.
        record: what weft noted of its last call, None for peers.
    """

    name: str
    prepare: Callable[[], Any]
    call: Callable[[Any], Any]
    parts: Callable[[Any], Sequence[Tensor]]
    fault: Callable[[Sequence[Tensor], Answer], str | None]
    record: Callable[[], Any] = lambda: None

    @property
    def own(self) -> bool:
        """weft itself, not a peer."""
        return self.name.startswith(OWN)


def weft_by(algorithm: str, case: Case, indices: Tensor, values: Tensor) -> Contender:
    """weft, by one algorithm or `"auto"`."""
    rows = weft.Rows(indices, values, case.height)

    def call(rows: weft.Rows) -> Any:
        return weft.sparse_all_reduce(rows, case.op, algorithm=algorithm)

    def parts(result: weft.Rows) -> Sequence[Tensor]:
        return result.indices, result.values

    def fault(parts: Sequence[Tensor], answer: Answer) -> str | None:
        # half precision is added in fp32 and rounded once, so whole numbers come out exact
        exact = case.values == "integers" and case.op != "avg"
        return _sparse_fault(parts, replace(answer, slack=None) if exact else answer)

    return Contender(OWN + algorithm, lambda: rows, call, parts, fault, weft.sparse.last_call)


def peer(name: str, case: Case, indices: Tensor, values: Tensor) -> Contender | str:
    """A peer by name, or why it cannot take part in this case."""
    if case.op not in ("sum", "avg"):
        return f"{name} has no {case.op} of sparse tensors"
    return PEERS[name](case, indices, values)


def _torch(case: Case, indices: Tensor, values: Tensor) -> Contender | str:
    def call(coo: Tensor) -> Tensor:
        dist.all_reduce(coo)
        return _mean(coo, case)

    return Contender("torch", lambda: _coo(case, indices, values), call, _coalesced, _sparse_fault)


def _horovod(case: Case, indices: Tensor, values: Tensor) -> Contender | str:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    size = dist.get_world_size()

    def gathered(tensor: Tensor, counts: list[int]) -> Tensor:
        longest = max(counts)
        if len(tensor) < longest:
            padding = tensor.new_zeros((longest - len(tensor), *tensor.shape[1:]))
            tensor = torch.cat([tensor, padding])
        out = tensor.new_empty((size * longest, *tensor.shape[1:]))
        gather(out, tensor.contiguous())
        if min(counts) == longest:
            return out
        return torch.cat([out[r * longest :][:count] for r, count in enumerate(counts)])

    def call(coo: Tensor) -> Tensor:
        mine = coo._values()
        lengths = torch.empty(size, dtype=torch.int64)
        gather(lengths, torch.tensor([len(mine)]))
        counts: list[int] = lengths.tolist()
        everybody = gathered(mine, counts)
        where = gathered(coo._indices().t().contiguous(), counts).t()
        total = torch.sparse_coo_tensor(where, everybody, coo.shape, check_invariants=False)
        return _mean(total.coalesce(), case)

    return Contender(
        "horovod", lambda: _coo(case, indices, values), call, _coalesced, _sparse_fault
    )


def _dense(case: Case, indices: Tensor, values: Tensor) -> Contender | str:
    nbytes = case.height * case.row_bytes
    if nbytes > DENSE_LIMIT:
        return f"the table has {nbytes / 2**20:.0f} MiB, dense takes up to {DENSE_LIMIT >> 20}"

    def call(rows: tuple[Tensor, Tensor]) -> Tensor:
        where, what = rows
        table = what.new_zeros((case.height, *case.row_shape)).index_add_(0, where, what)
        dist.all_reduce(table)
        return table.div_(dist.get_world_size()) if case.op == "avg" else table

    def fault(parts: Sequence[Tensor], answer: Answer) -> str | None:
        return differs(case, parts[0], *answer.dense())

    return Contender("dense", lambda: (indices, values), call, lambda table: (table,), fault)


PEERS: dict[str, Callable[[Case, Tensor, Tensor], Contender | str]] = {
    "torch": _torch,
    "horovod": _horovod,
    "dense": _dense,
}
"""What a user would call instead of weft, by name."""


def _coo(case: Case, indices: Tensor, values: Tensor) -> Tensor:
    """A new COO tensor each time, since `all_reduce` changes the one it is given."""
    shape = (case.height, *case.row_shape)
    return torch.sparse_coo_tensor(indices[None].long(), values, shape, check_invariants=False)


def _mean(total: Tensor, case: Case) -> Tensor:
    return total.div_(dist.get_world_size()) if case.op == "avg" else total


def _coalesced(total: Tensor) -> Sequence[Tensor]:
    whole = total.coalesce()
    return whole.indices()[0], whole.values()


def _sparse_fault(parts: Sequence[Tensor], answer: Answer) -> str | None:
    indices, values = parts
    if not torch.equal(indices.long(), answer.indices):
        count = len(answer.indices)
        return f"the {len(indices)} indices of the result are not the {count} of the union, sorted"
    return differs(answer.case, values, answer.exact, answer.slack)


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
        unprivileged: ranks keep other processes of the same user out of their memory, as those of
            an ordinary user do on stock Ubuntu.
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
    unprivileged: bool = False


def run(job: Job, emit: Callable[[Found], None]) -> bool:
    """Measure on this rank of the group that the launcher made; True if no result was wrong.

    Rank 0 passes what it finds to `emit`.
    """
    if job.unprivileged:
        _keep_others_out()
    with weft.init(timeout=job.timeout) as wire:
        head = _head(job, wire)
        speak = emit if dist.get_rank() == 0 else lambda found: None
        speak(head)
        right = True
        for case in job.cases:
            rows = _measure(job, case, speak)
            for row in rows:
                speak(row)
            right = right and all(row.status != "wrong" for row in rows)
        return right


def _keep_others_out() -> None:
    """PR_SET_DUMPABLE: no process without CAP_SYS_PTRACE reads this one's memory from now on."""
    if ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def _measure(job: Job, case: Case, speak: Callable[[Found], None]) -> list[Row]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    speak(f"{case.name}: making the data")
    own = indices(case, rank, job.seed), values(case, rank, job.seed)
    entered: list[Contender] = [weft_by(name, case, *own) for name in job.algorithms]
    faults: dict[str, tuple[str, str]] = {}  # status and why
    for name in job.peers:
        entrant = peer(name, case, *own)
        if isinstance(entrant, str):
            faults[name] = "refused", entrant
        else:
            entered.append(entrant)

    speak(f"{case.name}: checking the results")
    # where rounding enters, ranks may differ, so that everyone must look for itself
    rounds = case.values == "normal" or case.torch_dtype.itemsize == 2
    looks = job.check and (rank == 0 or rounds)
    right = answer(case, ranks, job.seed, rounds=rounds) if looks else None
    digests = {}
    for one in entered:
        status, why, digests[one.name] = _try(one, right, job.check and (one.own or not rounds))
        if status != "ok":
            faults[one.name] = status, why
    del right

    starters = [one for one in entered if one.name not in faults]
    local = _times(job, starters, lambda words: speak(f"{case.name}: {words}"))
    for one in starters:
        if _any(job.check and local.digests[one.name] != digests[one.name]):
            why = "the result of the last iteration differs from that of the first"
            faults[one.name] = "wrong", why
    everybody: list[_Times] = [local] * ranks
    dist.all_gather_object(everybody, local)
    counted = sizes(case, ranks, job.seed) if rank == 0 else Sizes(ranks, 0, 0, 0.0)
    rows = []
    for name in (*(OWN + algorithm for algorithm in job.algorithms), *job.peers):
        status, why = faults.get(name, ("ok", ""))
        timed = [] if name in faults else everybody
        seconds = [max(each) for each in zip(*(t.seconds[name] for t in timed), strict=True)]
        records = [t.records[name] for t in timed]
        rows.append(summary(case, counted, name, status, why, seconds, records, link=job.link))
    return [row.beside(rows) for row in rows]


def _try(contender: Contender, right: Answer | None, compare: bool) -> tuple[str, str, str]:
    """One call: status and why, the same on every rank, and the digest of this rank's result."""
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
                return worst, why, mine
    others = [rank for rank, each in enumerate(everybody) if each[2] != everybody[0][2]]
    if compare and others:
        return "wrong", f"the bits on ranks {others} are not those on rank 0", mine
    return "ok", "", mine


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


def _head(job: Job, wire: Wire) -> Head:
    """What the table is headed with; collective, since it counts the hosts."""
    hosts = [wire.host] * wire.size
    dist.all_gather_object(hosts, wire.host)
    return Head(
        weft=weft.__version__,
        torch=torch.version.__version__,
        python=platform.python_version(),
        kernels=weft.kernels.describe(),
        ranks=dist.get_world_size(),
        hosts=len(set(hosts)),
        threads=torch.get_num_threads(),
        cores=len(psutil.Process().cpu_affinity()) if psutil.LINUX else psutil.cpu_count(),
        iters=job.iters,
        warmup=job.warmup,
        checked=job.check,
        seed=job.seed,
        link=job.link,
        unprivileged=job.unprivileged,
    )
