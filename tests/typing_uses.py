"""Right and wrong uses of weft, which mypy reads in tests/test_typing.py; nothing runs this file.

A line that is wrong ends with an error comment, which has the code that mypy has for it.
"""

from __future__ import annotations

from typing import assert_type

import torch
import torch.distributed as dist

import weft

Pair = tuple[torch.Tensor, torch.Tensor]

coo = torch.rand(3, 2).to_sparse(1)
pair = (torch.tensor([1]), torch.rand(1))
rows = weft.Rows(*pair)
later: bool = bool(torch.rand(1) > 0)

# Each form of rows has its own, at once or later.
assert_type(weft.sparse_all_reduce(coo), torch.Tensor)
assert_type(weft.sparse_all_reduce(pair, "max"), Pair)
assert_type(weft.sparse_all_reduce(rows, dist.ReduceOp.SUM), weft.Rows)
assert_type(weft.sparse_all_reduce([coo, coo], torch.add), list[torch.Tensor])
assert_type(weft.sparse_all_reduce([pair]), list[Pair])
assert_type(weft.sparse_all_reduce(pair, async_op=True), weft.Work[Pair])
assert_type(weft.sparse_all_reduce(pair, async_op=True).wait(), Pair)
assert_type(weft.sparse_all_reduce(coo, "sum", None, True).wait(), torch.Tensor)
assert_type(weft.sparse_all_reduce([rows], async_op=True).wait(), list[weft.Rows])

several: list[torch.Tensor | Pair | weft.Rows] = [coo, pair, rows]
assert_type(weft.sparse_all_reduce(several), list[torch.Tensor | Pair | weft.Rows])

# So do the others.
assert_type(weft.sparse_reduce_scatter(rows, ranges=[0, 4]), weft.Rows)
assert_type(weft.sparse_reduce(coo, group_dst=1), torch.Tensor | None)
assert_type(weft.sparse_all_gather(pair), Pair)
assert_type(weft.sparse_all_gather(pair, return_counts=True), tuple[Pair, torch.Tensor])
assert_type(weft.sparse_all_gather(pair, None, True).wait(), Pair)
weft.sparse_all_gather(pair, None, True).wait()
on_every_rank: weft.Rows = weft.sparse_broadcast(rows if later else None)
assert_type(weft.explain(rows).bound, tuple[float, float])

# What the manual names is in weft.
assert_type(weft.config(), weft.Config)
assert_type(weft.init(timeout=3.0), weft.Group)


def hook(call: weft.CallStats) -> None:
    print(call)


weft.on_call(hook)

# Wrong.
weft.sparse_all_reduce("x")  # error: call-overload
weft.sparse_all_reduce(pair, 3)  # error: call-overload
weft.sparse_all_reduce((pair[0], 1.0))  # error: type-var
weft.sparse_all_reduce(pair, algoritm="split")  # error: call-overload
number: int = weft.sparse_all_reduce(pair)  # error: assignment
weft.sparse_all_reduce(coo).wait()  # error: attr-defined
weft.sparse_reduce(coo).to_dense()  # error: union-attr
weft.sparse_all_reduce(coo, async_op=later)  # error: call-overload
weft.init(time_out=3)  # error: call-arg
weft.sparse_reduce_scatter(pair, out=pair)  # error: call-overload
