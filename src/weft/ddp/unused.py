"""Tables that a batch leaves unused take part in its backward all the same.

That removes a limit of DistributedDataParallel (pytorch#80496): a sparse table that a batch did not
use, on some ranks or on all, gets a gradient without rows.

Which tables a backward comes to is known when it has come to its end, and not before: a block under
reentrant checkpointing begins a backward of its own, and one backward may be that of two forwards.
So outputs stay as they are. Hooks tell which of them, and which tables, a backward has come to, and
at the end of the outermost one the others are reached, without a gradient.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..base._torch import is_run, leaves_of, uncompiled
from ..comm.gradients import without_rows
from .outermost import Outermost
from .parameters import is_table, places_of


def keep_tables_used(module: nn.Module) -> RemovableHandle:
    """Let every sparse table take part in every backward, used or not.

    DistributedDataParallel fails when a batch does not use a table with sparse gradients. This
    hooks the model: a table (`nn.Embedding` or `nn.EmbeddingBag` with `sparse=True`) that a
    backward from its outputs does not come to gets a gradient without rows at the end of that
    backward, if it has none; other tensor hooks on it see None. `register` does the same.

    Args:
        module: a DistributedDataParallel, after it was made, or a module that has no
            `static_graph` and no `find_unused_parameters` around it.

    Example:
        >>> import torch
        >>> tables = torch.nn.ModuleList(torch.nn.Embedding(9, 2, sparse=True) for _ in "ab")
        >>> tables.forward = lambda index: tables[0](index)  # never uses the other one
        >>> handle = keep_tables_used(tables)
        >>> tables(torch.tensor([4])).sum().backward()
        >>> [table.weight.grad._nnz() for table in tables]
        [1, 0]
    """
    return module.register_forward_hook(UnusedTables.of(module).watch)


class UnusedTables:
    """The tables of a model that its next backward does not come to.

    Attributes:
        tables: the weights, each once.
        reached: the numbers of those that a backward has come to since the last forward.
        outputs: from which a backward may begin; each lives as long as the graph behind it.
        leaves: the hooks of outputs that are leaves, which outlive their forward.
        lent: frozen tables with the empty gradients that they have until the backward ends; if it
            fails, until the next forward.
        outermost: the backward at whose end the others are reached.
    """

    def __init__(self, tables: list[Tensor]) -> None:
        self.tables = tables
        self.reached: set[int] = set()
        self.outputs: weakref.WeakSet[_Output] = weakref.WeakSet()
        self.leaves: list[RemovableHandle] = []
        self.lent: list[tuple[Tensor, Tensor]] = []
        self.outermost = Outermost()
        for number, table in enumerate(tables):
            # weakly: a hook that holds its tensor keeps it for ever
            come = functools.partial(_come, self.reached, number, weakref.ref(table))
            table.register_hook(come)  # type: ignore[no-untyped-call]  # as torch has it

    @classmethod
    def of(cls, module: nn.Module) -> UnusedTables:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        return cls(
            [
                weight
                for weight, places in places_of(module).items()
                if is_table(places[0].part) and places[0].part.weight is weight
            ]
        )

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model has its own
        return UnusedTables, (self.tables,)

    @uncompiled
    def watch(self, module: nn.Module, args: object, output: Any) -> None:
        """A hook behind the forward."""
        if not (self.tables and torch.is_grad_enabled()):
            return
        self.take_back()
        if self.reached:  # a step has been made
            self.reached.clear()
            self.outputs.clear()
            while self.leaves:
                self.leaves.pop().remove()
        is_static = getattr(module, "static_graph", False)
        marks_unused = getattr(module, "find_unused_parameters", False) and not is_static
        for tensor in differentiable(output):
            if not isinstance(tensor, nn.Parameter):  # which would keep the hook for ever
                found = _Output(tensor)
                begin = functools.partial(self.begin, found, marks_unused)
                # the base: where a view is changed in place, backward does not come to its own node
                handle = _base_of(tensor).register_hook(begin)  # type: ignore[no-untyped-call]
                self.outputs.add(found)
                if tensor.is_leaf:
                    self.leaves.append(handle)

    def begin(self, output: _Output, marks_unused: bool, gradient: Tensor | None) -> None:
        """A hook of an output, which a backward has come to."""
        if not output.accumulates():
            return
        output.is_reached = True
        if marks_unused:
            # DistributedDataParallel takes what is in no output's graph as ready, and will soon
            for number, table in self.missing().items():
                if not is_run(get_gradient_edge(table).node):
                    _reach(self.reached, number, table, None)
            for table in self.tables:  # one that was frozen later is awaited like the others
                if not table.requires_grad and table.grad is None:
                    table.grad = without_rows(table)
                    self.lent.append((table, table.grad))
        self.outermost.at_end(self.end)

    def end(self) -> None:
        """At the end of the outermost backward: come to the tables that no other comes to."""
        self.take_back()
        tables = [*self.missing().values()]
        if tables and not all(output.is_reached for output in self.outputs):
            tables = _left_behind(tables, [*self.outputs])
        if tables:
            with torch.enable_grad():
                come_to: Callable[..., Tensor] = _ComeTo.apply
                nothing = come_to(*tables)
            nothing.backward()  # type: ignore[no-untyped-call]  # as torch has it

    def take_back(self) -> None:
        """Take the gradients that were lent, where nothing has been put there or added."""
        while self.lent:
            table, empty = self.lent.pop()
            if table.grad is empty and not empty._nnz():
                table.grad = None

    def missing(self) -> dict[int, Tensor]:
        """The tables that no backward has come to, by number."""
        return {
            number: table
            for number, table in enumerate(self.tables)
            if table.requires_grad and number not in self.reached
        }


def _come(
    reached: set[int], number: int, kept: weakref.ref[Tensor], gradient: Tensor | None
) -> None:
    """A hook of a table, which a backward has come to; `torch.autograd.grad` comes to it, too."""
    table = kept()
    # it may have been frozen since the forward
    if table is not None and table.requires_grad and is_run(get_gradient_edge(table).node):
        _reach(reached, number, table, gradient)


def _reach(reached: set[int], number: int, table: Tensor, gradient: Tensor | None) -> None:
    """Before a gradient is accumulated: where there is none, let there be an empty one."""
    reached.add(number)
    if gradient is None and table.grad is None:
        table.grad = without_rows(table)


class _ComeTo(torch.autograd.Function):
    """In backward its arguments are reached, without a gradient."""

    @staticmethod
    def forward(ctx: Any, *tables: Tensor) -> Tensor:
        ctx.tables = len(tables)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (*[None] * ctx.tables,)


class _Output:
    """An output, and what is behind it in the graph.

    Attributes:
        before: the nodes before its own, which keeps this object, so this must not keep it.
        function: the id of its own, if that is of a function in Python; else nothing.
        is_reached: whether a backward has come to it.
    """

    def __init__(self, tensor: Tensor) -> None:
        node = _base_of(tensor).grad_fn
        self.before: list[Any] = [] if node is None else _before(node)
        self.function = _functions([node])
        self.is_reached = False

    def accumulates(self) -> bool:
        """Whether the backward that is here accumulates gradients; `torch.autograd.grad` does not.

        The nearest leaf knows.
        """
        leaf = next((node for node in _nodes(self.before) if _is_leaf(node)), None)
        return leaf is None or is_run(leaf)


def _left_behind(tables: list[Tensor], outputs: list[_Output]) -> list[Tensor]:
    """Those of the tables that no later backward comes to, from an output that none came to yet."""
    reached = [output for output in outputs if output.is_reached]
    ahead = [output for output in outputs if not output.is_reached]
    passed = {*_nodes_before(reached)}
    nodes = [node for node in _nodes_before(ahead) if node not in passed]
    functions = _functions(nodes).union(*(output.function for output in ahead))
    if functions.difference(*(output.function for output in reached)):
        return []  # its backward may begin another one, as that of a reentrant block does
    awaited = {id(node.variable) for node in nodes if _is_leaf(node)}
    return [table for table in tables if id(table) not in awaited]


def _functions(nodes: Iterable[Any]) -> set[int]:
    """The ids of nodes that are of functions in Python, and stay the same as long as these live."""
    return {id(node) for node in nodes if isinstance(node, BackwardCFunction)}


def _nodes_before(outputs: Iterable[_Output]) -> Iterator[Any]:
    return _nodes(node for output in outputs for node in output.before)


def _nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes of a graph and all before them, the nearest first."""
    waiting = collections.deque(nodes)
    seen = {*waiting}
    while waiting:
        node = waiting.popleft()
        yield node
        for before in _before(node):
            if before not in seen:
                seen.add(before)
                waiting.append(before)


def _before(node: Any) -> list[Any]:
    """The nodes of a graph right before one."""
    return [before for before, _ in node.next_functions if before is not None]


def _is_leaf(node: Any) -> bool:
    """Whether a node accumulates a gradient, that of its `variable`."""
    return bool(node.name().endswith("AccumulateGrad"))


def _base_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, if that has a node in the graph; else the tensor."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def differentiable(output: Any) -> list[Tensor]:
    """The tensors of a module's output that a backward may begin at."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    parts: Iterable[Any] = ()
    if isinstance(output, list | tuple):
        parts = output
    elif isinstance(output, Mapping):
        parts = output.values()
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:  # of a class that is registered with torch's pytree, or nothing to take apart
        parts = [each for each in leaves_of(output) if each is not output]
    return [tensor for part in parts for tensor in differentiable(part)]
