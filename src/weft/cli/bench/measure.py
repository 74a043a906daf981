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

Where a case has many tables, weft gets them as a list in one call, and a peer is called for each.

All start from the same rows. What only brings them into the form a call takes (int64 indices in a
COO tensor) is not timed.

* Checked first: each contender runs once; rank 0 (every rank, where rounding enters) compares the
  result with the right answer, and all ranks compare digests. Whoever is wrong is not timed. A case
  with a `wire_dtype` is weft's alone to round: peers send values as they are, and must be as exact
  as without it.
* Interleaved: an iteration is one call of every contender, so that a noisy neighbour hits all
  alike; in an order drawn anew each time, since what one leaves in caches and memory is paid for by
  the next. A barrier goes before each call; a call's time is that of its slowest rank.
* After the last iteration the results are digested once more: memory that is used again must not
  have changed them.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import Group
from weft.base.cores import cores_of_process
from weft.schedules.hosts import Hosts, hosts_of

from ..wording import mib, versions
from .cases import Answer, Case, answer, answer_of_weft, differs, digest, indices, sizes, values
from .results import OWN, Found, Status, compared, summary

DENSE_LIMIT = 64 << 20
"""Bytes of a table up to which the dense way is worth trying."""


_OK: Status = ("ok", "")
_HERE = bytes(1 << 12)  # what a rank says when it meets the others


Table = weft.Rows | Tensor
"""What a call returns: rows, a COO tensor, or a dense one."""

Result = Table | list[Table]
"""The same of a case of one table, or of many."""


@dataclass(slots=True)
class Timed:
    """What a rank tells the others of its calls to a contender.

    Attributes:
        seconds: of each iteration.
        busy: seconds of a core that this rank's threads were busy in each.
        record: what weft noted of the last call; None for a peer.
        changed: the last result is not the first.
    """

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    record: Any = None
    changed: bool = False


@dataclass(slots=True)
class Contender:
    """One way to do the job, and how it fared on this rank.

    Attributes:
        name: `weft:` and the algorithm asked for, or the peer's.
        prepare: brings the rows into the form that `call` takes; before every call, not timed.
        call: does it.
        status: "ok", "refused" or "wrong", and why; the same on every rank.
        digest: of the first result.
        timed: its calls.
    """

    name: str
    prepare: Callable[[], Any]
    call: Callable[[Any], Result]
    status: Status = _OK
    digest: str = ""
    timed: Timed = field(default_factory=Timed)

    @property
    def own(self) -> bool:
        """weft itself, not a peer."""
        return self.name.startswith(OWN)


def contender(name: str, case: Case, indices: Tensor, values: Tensor) -> Contender:
    """Who has that name; refused, where it cannot take part in this case."""
    tables = tables_of(case, indices, values)

    def by_weft(rows: weft.Rows | list[weft.Rows]) -> Result:
        algorithm = name.removeprefix(OWN)
        found = weft.sparse_all_reduce(
            rows, case.op, algorithm=algorithm, wire_dtype=case.torch_wire_dtype
        )
        return cast(Result, found)

    def by_peer(coos: list[Tensor]) -> Result:
        totals: list[Table] = [of_one(coo) for coo in coos]
        return totals[0] if len(totals) == 1 else totals

    def of_one(coo: Tensor) -> Tensor:
        total = PEERS[name](coo)
        return total.div_(dist.get_world_size()) if case.op == "avg" else total

    def new_coos() -> list[Tensor]:
        """New ones each time, since `all_reduce` changes those it is given."""
        return [coo_of(rows) for rows in tables]

    if name not in PEERS:
        return Contender(name, lambda: tables[0] if len(tables) == 1 else tables, by_weft)
    one = Contender(name, new_coos, by_peer)
    nbytes = case.height * case.row_bytes
    if case.op not in ("sum", "avg"):
        one.status = "refused", f"{name} has no {case.op} of sparse tensors"
    elif name == "dense" and nbytes > DENSE_LIMIT:
        why = (
            f"the table has {mib(nbytes)}, dense takes up to {mib(DENSE_LIMIT)}: to time it, "
            "give a smaller --height, --width or --size"
        )
        one.status = "refused", why
    return one


def tables_of(case: Case, indices: Tensor, values: Tensor) -> list[weft.Rows]:
    """The rows of each table of a case."""
    if len(case.heights) == 1:
        return [weft.Rows(indices, values, case.height)]
    tables = []
    start = 0
    for height in case.heights:
        is_here = (indices >= start) & (indices < start + height)
        tables.append(weft.Rows(indices[is_here] - start, values[is_here], height))
        start += height
    return tables


def coo_of(rows: weft.Rows) -> Tensor:
    """Rows as a COO tensor; duplicates stay."""
    assert rows.height is not None  # every table of a case has one
    shape = (rows.height, *rows.row_shape)
    where = rows.indices[None].long()
    return torch.sparse_coo_tensor(where, rows.values, shape, check_invariants=False)


def _torch(coo: Tensor) -> Tensor:
    dist.all_reduce(coo)
    return coo


def _horovod(coo: Tensor) -> Tensor:
    size = dist.get_world_size()
    lengths = torch.empty(size, dtype=torch.int64)
    dist.all_gather_single(lengths, torch.tensor([coo._nnz()]))
    counts: list[int] = lengths.tolist()
    longest = max(counts)

    def gathered(tensor: Tensor) -> Tensor:
        if len(tensor) < longest:
            padding = (0, 0) * (tensor.dim() - 1) + (0, longest - len(tensor))
            tensor = torch.nn.functional.pad(tensor, padding)
        out = tensor.new_empty((size * longest, *tensor.shape[1:]))
        dist.all_gather_single(out, tensor.contiguous())
        if min(counts) == longest:
            return out
        return torch.cat([out[r * longest :][:count] for r, count in enumerate(counts)])

    everybody, where = gathered(coo._values()), gathered(coo._indices()[0])
    total = torch.sparse_coo_tensor(where[None], everybody, coo.shape, check_invariants=False)
    return total.coalesce()


def _dense(coo: Tensor) -> Tensor:
    table = torch.zeros(coo.shape, dtype=coo.dtype)
    table.index_add_(0, coo._indices()[0], coo._values())
    dist.all_reduce(table)
    return table


PEERS = {"torch": _torch, "horovod": _horovod, "dense": _dense}
"""What a user would call instead of weft, by name, for each table: a COO tensor in, the sum out."""


def parts(result: Result) -> tuple[Tensor, ...]:
    """A result as tensors that can be compared: indices and values, or a dense table.

    Many tables are one then, each behind the one before it.
    """
    if isinstance(result, list):
        return _joined(result)
    if isinstance(result, weft.Rows):
        return result.indices, result.values
    if not result.is_sparse:
        return (result,)
    whole = result.coalesce()
    return whole.indices()[0], whole.values()


def _joined(tables: list[Table]) -> tuple[Tensor, ...]:
    """The parts of one table in which each of these lies behind the one before it."""
    start = 0
    found = []
    for table in tables:
        one = parts(table)
        if len(one) == 2:
            one = one[0].long() + start, one[1]
        found.append(one)
        start += _height_of(table)
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


def _height_of(table: Table) -> int:
    height = table.height if isinstance(table, weft.Rows) else table.shape[0]
    assert height is not None  # every table of a case has one
    return height


def fault(parts: tuple[Tensor, ...], answer: Answer) -> str | None:
    """In what a result differs from the answer, or None if it does not."""
    if len(parts) == 1:
        (table,) = parts
        if table.index_fill(0, answer.indices, 0).any():
            return "rows that no rank has are not zero"
        return differs(table[answer.indices], answer)
    indices, values = parts
    if not torch.equal(indices.long(), answer.indices):
        count = len(answer.indices)
        return f"the {len(indices)} indices of the result are not the {count} of the union, sorted"
    return differs(values, answer)


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure; the same on every rank.

    Attributes:
        cases: in this order.
        algorithms: of weft, `"auto"` among them or not.
        peers: names of peers.
        iters, warmup: timed and untimed calls of each contender.
        checked: compare results with the oracle.
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
    checked: bool = True
    seed: int = 0
    link: float | None = None
    timeout: float | None = None
    unprivileged: bool = False


def run(job: Job, emit: Callable[[Found], None]) -> bool:
    """Measure on this rank of the group that the launcher made; True if no result was wrong.

    Rank 0 passes what it finds to `emit`.
    """
    # PR_SET_DUMPABLE: no process without CAP_SYS_PTRACE reads this one's memory from now on
    if job.unprivileged and ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    with weft.init(timeout=job.timeout) as group:
        hosts = hosts_of(group)
        speak = emit if group.rank == 0 else lambda found: None
        speak(("head", _head(job, hosts)))
        right, done, whole = [], 0.0, sum(map(_effort, job.cases))
        for case in job.cases:
            share = _effort(case) / whole
            right.append(_measure(job, case, group, done, share, speak))
            done += share
        return all(right)


def _effort(case: Case) -> float:
    """How long a case takes beside others, about: bytes of a rank, and what any call takes."""
    return case.rows * (case.row_bytes + 64) + 1e6


def _measure(
    job: Job,
    case: Case,
    group: Group,
    before: float,
    share: float,
    speak: Callable[[Found], None],
) -> bool:
    """Check and time all contenders in one case; True, on every rank, if no result was wrong.

    The case is so large a share of the whole, of which another was done before.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    steps, number = 2 + job.warmup + job.iters, itertools.count()  # as large as an iteration each

    def doing(words: str) -> None:
        speak(("doing", (case.name, words, before + share * next(number) / steps)))

    doing("making the data")
    own = indices(case, rank, job.seed), values(case, rank, job.seed)
    names = *(OWN + name for name in job.algorithms), *job.peers
    contenders = [contender(name, case, *own) for name in names]

    doing("checking the results")
    right = right_of_weft = None
    # where rounding enters, ranks of a peer may differ, so that everyone must look for itself
    if job.checked and (rank == 0 or (case.rounds and job.peers)):
        right = answer(case, ranks, job.seed)
        if rank == 0:  # weft's ranks have the same bits, or are wrong
            right_of_weft = answer_of_weft(right, ranks, job.seed)
    for one in contenders:
        if one.status == _OK:
            _try(one, job, case, right_of_weft if one.own else right)
    del right, right_of_weft

    starters = [one for one in contenders if one.status == _OK]
    _time(starters, job, group.on(torch.device("cpu")), doing)
    mine = {one.name: one.timed for one in starters}
    everybody = [mine] * ranks
    dist.all_gather_object(everybody, mine)
    rows = []
    for one in contenders:
        seen = [of_rank[one.name] for of_rank in everybody if one.name in of_rank]
        if any(timed.changed for timed in seen):
            why = "the result of the last iteration differs from that of the first"
            one.status, seen = ("wrong", why), []
        seconds = [max(each) for each in zip(*(timed.seconds for timed in seen), strict=True)]
        busy = [fmean(each) for each in zip(*(timed.busy for timed in seen), strict=True)]
        records = [timed.record for timed in seen if timed.record is not None]
        rows.append((one.name, one.status, seconds, records, busy))
    if rank == 0:
        counted = sizes(case, ranks, job.seed, hosts_of(group))
        beta = None if job.link is None else 8 / job.link
        for row in compared([summary(case, counted, beta, *row) for row in rows]):
            speak(("row", row))
    return all(one.status[0] != "wrong" for one in contenders)


def _try(one: Contender, job: Job, case: Case, right: Answer | None) -> None:
    """Call it once: its status, and the digest of its result."""
    status = _OK
    try:
        found = parts(one.call(one.prepare()))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        # a peer's death lands here too, and then in the exchange below, which raises
        status = "refused", " ".join(str(error).split())
    else:
        one.digest = digest(found)
        if right is not None and (why := fault(found, right)) is not None:
            status = "wrong", f"rank {dist.get_rank()}: {why}"
    everybody = [(status, one.digest)] * dist.get_world_size()
    dist.all_gather_object(everybody, (status, one.digest))
    others = [rank for rank, (_, seen) in enumerate(everybody) if seen != everybody[0][1]]
    if others and job.checked and (one.own or not case.rounds):
        one.status = "wrong", f"the bits on ranks {others} are not those on rank 0"
    for worst in ("wrong", "refused"):
        one.status = next((said for said, _ in everybody if said[0] == worst), one.status)


def meet(group: Group) -> None:
    """Wait until all ranks have come, and go on at the same time.

    Not by gloo's barrier, which waits for earlier works, too, and may raise what one of them has
    raised before. From a reduction of gloo ranks come some latencies apart, and who comes first
    would wait for the last in the call that is timed. Then each rank tells all others that it is
    here: who was late has heard of all already, and goes on a latency ahead. Done again, all go on
    together, but for a group of two. A message is longer than a packet: after a pause one that is
    shorter keeps BBR from renewing the round trip that it knows, and makes it pause for 200 ms.
    """
    dist.all_reduce(torch.zeros(1))

    def together() -> None:
        for _ in range(2):
            group.all_gather_bytes(_HERE, len)

    group.worker.call("meeting", together)


def _time(starters: list[Contender], job: Job, group: Group, doing: Callable[[str], None]) -> None:
    """Have them take turns."""
    gc.collect()
    gc.disable()  # a collection would hit one contender and not the others
    try:
        for turn in range(-job.warmup, job.iters):
            doing(f"iteration {turn + 1} of {job.iters}" if turn >= 0 else "warming up")
            # in an order that is the same on all ranks
            for one in random.Random(f"{job.seed} {turn}").sample(starters, len(starters)):
                given = one.prepare()
                meet(group)
                begin = time.perf_counter()
                before = time.process_time()
                result = one.call(given)
                took = time.perf_counter() - begin
                busy = time.process_time() - before
                if turn >= 0:
                    one.timed.seconds.append(took)
                    one.timed.busy.append(busy)
                if turn == job.iters - 1:
                    one.timed.record = weft.sparse.last_call() if one.own else None
                    one.timed.changed = job.checked and digest(parts(result)) != one.digest
                del result, given  # its pages go back before the next one's clock runs
    finally:
        gc.enable()


def _head(job: Job, hosts: Hosts) -> dict[str, Any]:
    """What the table is headed with."""
    here = {
        "ranks": len(hosts.of),
        "hosts": len(hosts.ranks),
        "wire": weft.config()["wire"],
        "threads": torch.get_num_threads(),
        "cores": cores_of_process(),
    }
    told = ("iters", "warmup", "checked", "seed", "link", "unprivileged")
    return versions() | here | {name: getattr(job, name) for name in told}
