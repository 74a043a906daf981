"""Tables that a batch leaves unused take part in its backward all the same.

That removes a limit of DistributedDataParallel (pytorch#80496): a sparse table that a batch did not
use, on some ranks or on all, gets a gradient without rows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..base._torch import uncompiled
from ..comm.gradients import without_rows
from .parameters import is_table, places_of


def keep_tables_used(module: nn.Module) -> RemovableHandle:
    """Let every sparse table take part in every backward, used or not.

    DistributedDataParallel fails when a batch does not use a table with sparse gradients. This
    hooks the module so that its outputs depend on all its tables (`nn.Embedding` and
    `nn.EmbeddingBag` with `sparse=True`), without a copy. An unused table gets a gradient without
    rows; other tensor hooks on it see None. `register` calls this function.

    Example:
        >>> import torch
        >>> tables = torch.nn.ModuleList(torch.nn.Embedding(9, 2, sparse=True) for _ in "ab")
        >>> tables.forward = lambda index: tables[0](index)  # never uses the other one
        >>> handle = keep_tables_used(tables)
        >>> tables(torch.tensor([4])).sum().backward()
        >>> [table.weight.grad._nnz() for table in tables]
        [1, 0]
    """
    lookups = _Lookups()
    for weight, places in places_of(module).items():
        if is_table(places[0].part) and places[0].part.weight is weight:
            lookups.add(weight, [place.part for place in places])
    for weight in lookups.tables:
        # typed by torch as untyped; weakly, since a hook that holds its tensor keeps it for ever
        weight.register_hook(functools.partial(_fill_in, weakref.ref(weight)))  # type: ignore[no-untyped-call]
    module.register_forward_pre_hook(lookups.begin)
    return module.register_forward_hook(lookups.end)


class _Lookups:
    """Which tables a forward looks up in, so that its outputs depend on all the others.

    A table that is looked up inside a block under reentrant checkpointing is not in the graph of
    the outputs: the block's own backward reaches it. Reached from the outputs as well, it would be
    ready twice, which DistributedDataParallel refuses. So would a table of one output that is
    reached from another, where backward is called for each. Both are left as they are.

    Attributes:
        tables: the weights, each once.
        in_graph: the numbers of those that were looked up with gradients, in this forward.
        apart: of those that were looked up without, as inside such a block.
    """

    def __init__(self) -> None:
        self.tables: list[Tensor] = []
        self.in_graph: set[int] = set()
        self.apart: set[int] = set()

    def add(self, weight: Tensor, parts: list[nn.Module]) -> None:
        """Watch a table, and the modules that have it."""
        note = functools.partial(self.note, len(self.tables))
        self.tables.append(weight)
        for part in parts:
            part.register_forward_pre_hook(note)

    def begin(self, module: nn.Module, args: object) -> None:
        """A hook before the forward."""
        self.in_graph.clear()
        self.apart.clear()

    def note(self, number: int, part: nn.Module, args: object) -> None:
        """A hook before a lookup."""
        if torch.is_grad_enabled():
            self.in_graph.add(number)
        else:
            self.apart.add(number)

    def end(self, module: nn.Module, args: object, output: Any) -> Any:
        """A hook behind the forward: the output, depending on the tables too."""
        if not (self.tables and torch.is_grad_enabled()):
            return None
        outputs = differentiable(output)
        left_alone = self.apart - self.in_graph
        reached = _reached_from(outputs) if len(outputs) > 1 else set()
        others = [
            table
            for number, table in enumerate(self.tables)
            if number not in left_alone and id(table) not in reached
        ]
        depend: Callable[..., Tensor] = _Depend.apply
        return _mapped(output, lambda tensor: depend(tensor, *others)) if others else None


def differentiable(output: Any) -> list[Tensor]:
    """The tensors of a module's output that a backward may begin at."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(output, note)
    return found


@uncompiled
def _reached_from(outputs: list[Tensor]) -> set[int]:
    """The ids of the leaves whose gradients backward accumulates from these."""
    nodes = [tensor.grad_fn for tensor in outputs]
    seen: set[Any] = set()
    leaves: set[int] = set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            leaves.add(id(node.variable))
        nodes += [before for before, _ in node.next_functions]
    return leaves


def _fill_in(table: weakref.ref[Tensor], gradient: Tensor | None) -> None:
    """Runs before a gradient is accumulated: where there is none, let there be an empty one."""
    weight = table()
    if gradient is None and weight is not None and weight.grad is None:
        weight.grad = without_rows(weight)


class _Depend(torch.autograd.Function):
    """The first argument as it is; in backward the others are reached, without a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *tables: Tensor) -> Tensor:
        ctx.tables = len(tables)
        return tensor.detach()  # not a view, so that it may be modified in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (*gradients, *[None] * ctx.tables)


def _mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with its differentiable tensors changed; containers are copied."""
    if isinstance(output, Tensor):
        return change(output) if output.requires_grad else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_mapped(part, change) for part in output))
    if type(output) in (list, tuple):
        return type(output)(_mapped(part, change) for part in output)
    if isinstance(output, MutableMapping):
        copied = copy.copy(output)
        for key, part in output.items():
            copied[key] = _mapped(part, change)
        return copied
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        twin = copy.copy(output)
        for field in dataclasses.fields(output):
            object.__setattr__(twin, field.name, _mapped(getattr(output, field.name), change))
        return twin
    return output
