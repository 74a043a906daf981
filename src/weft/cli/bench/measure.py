"""One rank's program: check every contender, then time them in turn.

Contenders are weft's algorithms and the peers, what a user would call instead:
* `torch`: `torch.distributed.all_reduce` on the (uncoalesced) sparse COO tensor, which gloo serves
  by gathering everything everywhere and adding it up one rank after the other;
* `horovod`: Horovod's way in torch (Horovod itself is not run), `sparse_allreduce_async` in
  `horovod/torch/mpi_ops.py`: all-gather lengths (which are equal here), values and indices as they
  are, join them to a COO tensor. Duplicates are summed by `coalesce()` at the end, as any optimizer
  would have to;
* `dense`: make the rows dense and `torch.distributed.all_reduce` that; only for tables of at most
  64 MiB. Making it dense is part of the time, taking the rows out again is not.

All start from the same rows. What only brings them into the form a call takes (a COO tensor) is not
timed.

* Checked first: each contender runs once; rank 0 compares the digest of its result with that of the
  right answer, and all ranks compare digests. Whoever is wrong is not timed.
* Interleaved: an iteration is one call of every contender, so that a noisy neighbour hits all
  alike; in an order drawn anew each time, since what one leaves in caches and memory is paid for by
  the next. All ranks meet before each call; a call's time is that of its slowest rank.
* After the last iteration the results are digested once more: memory that is used again must not
  have changed them.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import Group

from .cases import Case, answer, indices, values

DENSE_LIMIT = 64 << 20
"""Bytes of a table up to which the dense way is worth trying."""

_HERE = bytes(1 << 12)  # what a rank says when it meets the others


@dataclass(slots=True)
class Result:
    """How one contender fared in one case, on one rank; once all have agreed, on all.

    Attributes:
        case: its name.
        by: the contender.
        status: "ok"; "refused": a peer, or an algorithm that was named, does not serve the case;
            "failed": weft does not; "wrong".
        why: of what is not ok.
        digest: of the first result.
        seconds: of each iteration; of the slowest rank.
        algorithm: that weft ran.
        sent_bytes: by this rank; by the average rank.
        bound_bytes: that the average rank must receive, an index counted as 4 bytes.
    """

    case: str
    by: str
    status: str = "ok"
    why: str = ""
    digest: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    algorithm: str = ""
    sent_bytes: float = 0
    bound_bytes: int = 0


Contender = tuple[Result, Callable[[], Any], Callable[[Any], Any]]
"""One way to do the job: how it fares, what makes its input before every call, untimed, and it."""


def contender(name: str, case: Case, rows: weft.Rows) -> Contender:
    """Who has that name; refused, where it cannot take part in this case."""
    result = Result(case.name, name)
    if name not in PEERS:
        algorithm = name.removeprefix("weft:")
        return result, lambda: rows, partial(weft.sparse_all_reduce, algorithm=algorithm)
    if name == "dense" and case.nbytes > DENSE_LIMIT:
        result.status, result.why = "refused", f"the table has more than {DENSE_LIMIT >> 20} MiB"
    return result, lambda: coo_of(rows), PEERS[name]  # a new one each time: it is changed


def coo_of(rows: weft.Rows) -> Tensor:
    """Rows as a COO tensor; duplicates stay."""
    shape = rows.height, *rows.row_shape
    return torch.sparse_coo_tensor(rows.indices[None], rows.values, shape, check_invariants=False)


def _torch(coo: Tensor) -> Tensor:
    dist.all_reduce(coo)
    return coo


def _horovod(coo: Tensor) -> Tensor:
    def gathered(tensor: Tensor) -> Tensor:
        out = tensor.new_empty((dist.get_world_size() * len(tensor), *tensor.shape[1:]))
        dist.all_gather_single(out, tensor.contiguous())
        return out

    gathered(torch.tensor([coo._nnz()]))
    everybody, where = gathered(coo._values()), gathered(coo._indices()[0])
    total = torch.sparse_coo_tensor(where[None], everybody, coo.shape, check_invariants=False)
    return total.coalesce()


def _dense(coo: Tensor) -> Tensor:
    table = torch.zeros(coo.shape)
    table.index_add_(0, coo._indices()[0], coo._values())
    dist.all_reduce(table)
    return table


PEERS = {"torch": _torch, "horovod": _horovod, "dense": _dense}
"""What a user would call instead of weft, by name: a COO tensor in, the sum out."""


def digest(result: Any) -> list[str]:
    """A fingerprint of the bits of rows, of a COO tensor, or of a dense one."""
    if isinstance(result, Tensor) and result.is_sparse:
        result = weft.Rows.from_coo(result.coalesce())
    parts = [result.indices, result.values] if isinstance(result, weft.Rows) else [result]
    return [hashlib.blake2b(part.contiguous().numpy().data).hexdigest() for part in parts]


def run(
    cases: Sequence[Case],
    names: Sequence[str],
    iters: int,
    show: Callable[[list[Result]], object],
    unprivileged: bool = False,
) -> list[Result]:
    """Measure on this rank of the group that the launcher made; the same on all ranks.

    Args:
        cases: in this order.
        names: of contenders: `weft:` and an algorithm, or a peer.
        iters: timed calls of each contender.
        show: called by rank 0 with the results of each case.
        unprivileged: ranks keep other processes of the same user out of their memory, as those of
            an ordinary user do on stock Ubuntu.
    """
    # PR_SET_DUMPABLE: no process without CAP_SYS_PTRACE reads this one's memory from now on
    if unprivileged and ctypes.CDLL(None).prctl(4, 0, 0, 0, 0):
        raise OSError("prctl(PR_SET_DUMPABLE) failed")
    found = []
    with weft.init() as group:
        for case in cases:
            rows = weft.Rows(indices(case, group.rank), values(case, group.rank), case.height)
            contenders = [contender(name, case, rows) for name in names]
            right = _right_digests(case, group.size) if group.rank == 0 else []
            starters = [one for one in contenders if one[0].status == "ok" and _try(one, right)]
            _time(starters, iters, group)
            for result, _, _ in starters:
                _agree(result)
            results = [result for result, _, _ in contenders]
            if group.rank == 0:
                show(results)
            found += results
    return found


def _right_digests(case: Case, ranks: int) -> list[list[str]]:
    """Of the right answer, as rows and, where there is room for it, as a dense tensor."""
    right = answer(case, ranks)
    dense = [digest(right.dense())] if case.nbytes <= DENSE_LIMIT else []
    return [digest(right), *dense]


def _try(one: Contender, right: Sequence[list[str]]) -> bool:
    """Call it once, and see whether all is well; rank 0 knows which digests are right."""
    result, prepare, call = one
    try:
        result.digest = digest(call(prepare()))
    except (RuntimeError, ValueError, TypeError) as error:
        # a peer's death lands here too, and then in the exchange below, which raises
        serves_some = isinstance(error, weft.WeftError) and result.by != "weft:auto"
        result.status = "refused" if serves_some or result.by in PEERS else "failed"
        result.why = " ".join(str(error).split())
    else:
        if right and result.digest not in right:
            result.status, result.why = "wrong", "the result on rank 0 is not the sum"
    _agree(result)
    return result.status == "ok"


def _agree(result: Result) -> None:
    """All ranks take the status of the first that is not well, and the figures of all."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, result)
    first = next((each for each in told if each.status != "ok"), result)
    result.status, result.why = first.status, first.why
    others = [rank for rank, each in enumerate(told) if each.digest != told[0].digest]
    if others and first is result:
        result.status, result.why = "wrong", f"the bits on ranks {others} are not those on rank 0"
    result.seconds = torch.tensor([each.seconds for each in told]).amax(0).tolist()
    result.sent_bytes = fmean(each.sent_bytes for each in told)


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


def _time(starters: Sequence[Contender], iters: int, group: Group) -> None:
    """Have them take turns; the first is not timed."""
    gc.collect()
    gc.disable()  # a collection would hit one contender and not the others
    try:
        for turn in range(-1, iters):
            # in an order that is the same on all ranks
            for result, prepare, call in random.Random(f"0 {turn}").sample(starters, len(starters)):
                given = prepare()
                meet(group)
                began = time.perf_counter()
                total = call(given)
                took = time.perf_counter() - began
                if turn >= 0:
                    result.seconds.append(took)
                if turn == iters - 1:
                    _note(result, digest(total))
                del total, given  # its pages go back before the next one's clock runs
    finally:
        gc.enable()


def _note(result: Result, last: list[str]) -> None:
    """What is to be said of the last call."""
    if last != result.digest:
        result.status, result.why = "wrong", "the last result differs from the first"
    if result.by not in PEERS and (stats := weft.sparse.last_call()):
        result.algorithm, result.bound_bytes = stats.algorithm, stats.bound_bytes
        result.sent_bytes = stats.sent_bytes
