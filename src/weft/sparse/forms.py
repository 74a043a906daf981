"""The types of the arguments and results of the sparse calls, for type checkers.

A table has one of three forms, and its result has the same. What only the values of arguments show
(their dtypes, their shapes) is checked in the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from .rows import Rows

Pair = tuple[Tensor, Tensor]
"""Indices and values."""

AnyForm = Tensor | Pair | Rows
"""A sparse COO tensor, `(indices, values)`, or `weft.Rows`."""

Form = TypeVar("Form", Tensor, Pair, Rows)
"""The form of a table, which is that of its result."""

Member = TypeVar("Member", bound=AnyForm)
"""What a list has: tables of one form, or of several."""

Reduction = str | dist.ReduceOp | dist.ReduceOp.RedOpType | Callable[[Tensor, Tensor], Tensor]
"""An `op`: its name, torch's, or a function of two tensors."""
