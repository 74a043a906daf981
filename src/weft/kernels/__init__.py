"""Kernels: local arithmetic on rows. They never communicate.

Each function picks an implementation by device and dtype: machine code for built-in operations on
tensors on the CPU, of the kinds in `values`; else `reference` (torch operations), which is the
definition: the two agree bit for bit.

The vocabulary:

* `distinct(indices)` sorts and finds duplicates, looking at the indices alone.
* `reduce(values, distinct, op)` then sums the values of each distinct index, in input order, in
  the accumulation type, rounded once to the dtype of `out`.
* `union(runs)` merges several sorted, duplicate-free index lists. For each run it gives *slots*:
  the place of each of its indices in the union, as `place` where an earlier run has that
  index too, and as `~place` (so negative) where this run is the first to bring it.
* `combine(out, slots, values, op)` then adds one run: where the slot is negative it copies, else
  it reduces, `out` on the left. Doing that run by run, in rank order, is the merge.
* `finish(values, out, divisor)` rounds an accumulator to its result, dividing first if asked.
* `merge(runs, op)` is union and combine over whole runs.
* `shares(slots, total)` gives each place of a union to one of the runs that have it; `pick` finds
  the rows of a run whose places some run was given, and where it has them.
* `index_code`, `encode`, `decode`: sorted indices in few bits; see `codec`.

`shares`, `pick` and the index codes are machine code alone. Where a rank has none (`is_compiled`),
no rank calls them: the opening of a call tells.

Tensors on an accelerator are reduced and finished without a wait of the host's, if `Distinct.most`
is known; indices are sorted and united on the CPU.

Which of them serves on the host is decided once in a process, at `weft.init` or by the first call
(`jit`): machine code, or torch operations for all of it, where Numba is missing or fails, or where
the environment says `WEFT_KERNELS=reference`. `describe` says which.

Callers have checked their arguments (`Op.refuses` for dtypes); here only that is checked again
which would read or write memory of others. No kernel is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import jit
from .codec import IndexCode, decode, encode, index_code
from .indices import Picked, Shares, ascends, distinct, pick, shares, union
from .ops import OPS, Op
from .reference import Distinct, Union
from .values import combine, finish, merge, reduce, reduce_some

__all__ = [
    "OPS",
    "Distinct",
    "IndexCode",
    "Op",
    "Picked",
    "Shares",
    "Union",
    "ascends",
    "combine",
    "decode",
    "describe",
    "distinct",
    "encode",
    "finish",
    "index_code",
    "is_compiled",
    "merge",
    "on_host",
    "pick",
    "prepare",
    "reduce",
    "reduce_some",
    "shares",
    "union",
]


def prepare() -> None:
    """Load the machine code, or make it, which may take ten seconds once on a machine."""
    jit.loops()


def is_compiled() -> bool:
    """Whether there is machine code, and not torch operations alone."""
    return jit.loops() is not None


def on_host(tensor: Tensor) -> bool:
    """Whether `distinct` and `union` serve a tensor's device; else `kinds` does, and callers read
    from the device how many there are."""
    return tensor.is_cpu


def describe() -> str:
    """Whether machine code or torch operations serve on the CPU, in a line."""
    return f"{jit.describe()}; {torch.get_num_threads()} threads"
