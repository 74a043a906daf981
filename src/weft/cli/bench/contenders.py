"""Who is measured: weft's algorithms, and what a user would call instead.

The peers are
* `torch`: `torch.distributed.all_reduce` on the (uncoalesced) sparse COO tensor, which gloo serves
  by gathering everything everywhere and adding it up one rank after the other;
* `horovod`: Horovod's way, `sparse_allreduce_async` in `horovod/torch/mpi_ops.py`: all-gather the
  indices and the values as they are, join them to a COO tensor. Its all-gather takes uneven
  lengths, gloo's does not, so lengths go first and the rest is padded to the longest. Duplicates
  are summed by `coalesce()` at the end, as any optimizer would have to;
* `dense`: make the rows dense and `torch.distributed.all_reduce` that; only for tables of at most
  64 MiB. Making it dense is part of the time, taking the rows out again is not: its result stays
  dense.

All start from the same rows. What only brings them into the form a call takes (int64 indices in a
COO tensor) is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import Case
from .oracle import Answer, differs
from .results import OWN

__all__ = ["DENSE_LIMIT", "PEERS", "Contender", "peer", "weft_by"]

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
    import weft
    import weft.sparse
    from weft.rows import Rows

    rows = Rows(indices, values, case.height)

    def call(rows: Rows) -> Any:
        return weft.sparse_all_reduce(rows, case.op, algorithm=algorithm)

    def parts(result: Rows) -> Sequence[Tensor]:
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
