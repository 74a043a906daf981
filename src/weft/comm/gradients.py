"""`sync_grads`: every rank gets the sum or the average of the gradients of all.

Parameters are matched by name. First all ranks state which of them have a gradient, and whether it
is sparse; one that a rank has none for counts as zero there. Then dense gradients are reduced in a
few large `buckets` and sparse ones in one `sparse_all_reduce`.

`sync_entries` does that for any of a module's parameters; `overlap` calls it while backward runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.profiler import record_function

from .._torch import uncompiled
from ..errors import WeftError
from ..kernels.ops import DTYPES
from ..sparse.api import job_of
from ..sparse.arguments import wrong_wire_dtype
from ..wire import default, dense
from ..wire.base import Wire
from .buckets import reduce_dense
from .named import (
    Manifest,
    difference,
    expanded_dims,
    local,
    manifests_of_all,
    parameters_of,
    shard_of,
)
from .opening import NO_LIMIT, ROOM, Opening, opened

NAME = "sync_grads"

_DENSE = 1
_SPARSE_DIMS = 7
"""What a rank states of a gradient: this if it is dense, `1 << d` if d dimensions of it are sparse,
at most so many. What ranks state differently of one gradient is reduced as a dense one."""


@uncompiled
def sync_grads(
    module: torch.nn.Module,
    average: bool = True,
    group: Any = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Reduce the gradients of a module over all ranks; in `.grad`, on every rank alike.

    Args:
        module: its parameters are matched by name; dtype and shape of a name are the same on every
            rank. A parameter without a gradient counts as zero, on a rank that has no parameter of
            that name, too; where all have none it is left alone. Gradients are dense or sparse COO;
            a parameter whose gradient is sparse on some ranks and dense on others gets a dense one,
            and so does one that is sparse and complex.
            Of a DTensor each rank must have the same shard: pass the group of a mesh dimension
            along which it is replicated.
        average: divide by the size of the group; else the sum.
        group: None (the default group), a Wire, a ProcessGroup, or a 1-D DeviceMesh.
        wire_dtype: None, or `torch.bfloat16` or `torch.float16`, in which gradients of wider
            floating-point dtypes are then sent, sparse ones too: each rank's is rounded to it, and
            so is the result, once each, to nearest even; sums are kept in float32. Lossy:
            docs/wire-dtype.md has the bound. Other gradients travel as they are.

    Every parameter that some rank has a gradient of has one on all ranks afterwards, bit for bit
    the same. Dense gradients are reduced in place where they can be; ranks are added in rank order.

    Raises:
        WeftError: modules or arguments differ, naming the first difference and the ranks; the same
            text on every rank. Gradients are as they were, and the next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost, and the gradients
            are undefined.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(wire):
        ...     model = torch.nn.Embedding(4, 1, sparse=True)
        ...     model(torch.tensor([wire.rank, 3])).sum().backward()
        ...     weft.sync_grads(model, average=False)
        ...     return model.weight.grad.to_dense().flatten().tolist()
        >>> run(2, program)
        [[1.0, 1.0, 0.0, 2.0], [1.0, 1.0, 0.0, 2.0]]

        In half the bytes, to about three digits:

        >>> def rounded(wire):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     model(torch.tensor([[0.1]])).backward()
        ...     weft.sync_grads(model, wire_dtype=torch.bfloat16)
        ...     return model.weight.grad.item()
        >>> run(2, rounded)
        [0.10009765625, 0.10009765625]
    """
    wire = default.resolve(group)
    finish = finish_of(module) if isinstance(module, torch.nn.Module) else None
    if finish is not None:
        finish(wire, average, wire_dtype)
        return
    synchronised = Synchronised(wire, module, average, wire_dtype)

    def job() -> None:
        with record_function("weft::sync_grads"):
            synchronised.reduce(synchronised.names)

    wire.worker.call(NAME, job)


overlapping: WeakKeyDictionary[torch.nn.Module, Callable[..., None]] = WeakKeyDictionary()
"""The modules whose gradients are reduced while backward runs, and what `sync_grads` does then:
takes the wire, `average`, `wire_dtype`, and what else is wrong, or None."""


def finish_of(module: torch.nn.Module) -> Callable[..., None] | None:
    """What `sync_grads` does if the gradients of some parameters of a module overlap, else None."""
    if not overlapping or module in overlapping:
        return overlapping.get(module)
    own = {id(parameter) for parameter in module.parameters()}
    for reference in overlapping.keyrefs():  # a list: ranks may be threads
        other = reference()
        finish = None if other is None else overlapping.get(other)
        if other is None or finish is None:
            continue
        theirs = {id(parameter) for parameter in other.parameters()}
        if own and own == theirs:  # a wrapper, such as torch.compile's
            return finish
        if own & theirs:  # reduced again they would be counted twice
            return functools.partial(
                finish,
                error="the module has some of the parameters of another, which overlap_grads was "
                "called for: pass that one",
            )
    return None


class Synchronised:
    """The parameters of one module, as one rank knows them.

    Attributes:
        names: of all of them, sorted; those that are the same come once, under the first name.
        in_order: the same, as the module has them.
        manifest: what they are.
        digest: of the manifest.
        error: what is wrong with the arguments, or None.
    """

    def __init__(self, wire: Wire, module: Any, average: object, wire_dtype: Any) -> None:
        found, self.error = parameters_of(module)
        self._wire, self._op = wire, "sum" if average is False else "avg"
        self._wire_dtype = wire_dtype
        self._of, self.names, self.in_order = found.of, list(found.of), found.in_order
        self.manifest, self.digest = found.manifest, found.digest
        if self.error is None and not isinstance(average, bool):
            self.error = f"average is {average!r}: pass True or False"
        self.error = self.error or wrong_wire_dtype(wire_dtype)

    def size(self, name: str) -> int:
        """Bytes of a gradient."""
        return local(self._of[name]).nbytes

    def parameter(self, name: str) -> Tensor:
        """The parameter itself."""
        return self._of[name]

    @torch.no_grad()
    def reduce(
        self, names: Sequence[str], *, first: int | None = None, ready: bool = False
    ) -> bool:
        """Reduce the gradients of some parameters; collective, in a call whose turn it is.

        Args:
            names: which, the same on every rank, but where ranks have different parameters.
            first: where given, the first so many of the names are reduced if some rank is ready for
                them, and all of them if none is.
            ready: whether this rank is.

        Returns:
            Whether some rank was ready.
        """
        here = list(names)
        states, error = self._states(here)
        error = self.error or error
        if len(here) >= ROOM:
            error = error or f"{len(here)} parameters are too many for one call: below {ROOM}"
        with self._opened(b"" if error else states, error, ready) as said:
            some_ready, same, found = said.limit == 0, said.equal, said.mask
        described = self.manifest
        if not same:
            here, described = self._all_named()
            with self._opened(self._states(here)[0], None, ready) as said:
                found = said.mask
        states_of = dict(zip(here, found, strict=True))
        if first is not None and some_ready:
            states_of = {name: states_of[name] for name in here[:first]}
        sparse = {
            n: s.bit_length() - 1 for n, s in states_of.items() if s > _DENSE and not s & (s - 1)
        }
        self._reduce_sparse(sparse, described)
        others = [name for name, state in states_of.items() if state and name not in sparse]
        gradients = [self._dense(name, described) for name in others]
        reduce_dense(self._wire, gradients, self._op, self._wire_dtype)
        return some_ready

    def _all_named(self) -> tuple[list[str], Manifest]:
        """The parameters of all ranks by name, and what they are; collective.

        Raises:
            WeftError: one of them is not the same on all ranks that have it.
        """
        everyone = manifests_of_all(self._wire, NAME, self.manifest)
        text = difference(everyone, missing=False)
        if text is not None:
            raise WeftError(f"the modules differ: {text}; gradients are as they were")
        described = {name: one[name] for one in everyone for name in one}
        # what is the same as another, on all ranks that have it, is reduced under that name
        return [n for n in sorted(described) if ", the same as " not in described[n]], described

    def _opened(
        self, states: bytes, error: str | None, ready: bool
    ) -> AbstractContextManager[Opening]:
        """What all ranks said."""
        return opened(
            self._wire,
            NAME,
            {"average": self._op == "avg", "wire_dtype": str(self._wire_dtype)},
            error,
            limit=0 if ready else NO_LIMIT,
            digest=self.digest,
            own=states,
        )

    def _states(self, names: Sequence[str]) -> tuple[bytes, str | None]:
        """A byte for each name: which gradient this rank has; and what is wrong with the first."""
        states, error = bytearray(len(names)), None
        refused: dict[torch.dtype, str | None] = {}
        for number, name in enumerate(names):
            parameter = self._of.get(name)
            gradient = None if parameter is None else parameter.grad
            if parameter is None or gradient is None:
                continue
            dtype = gradient.dtype
            if dtype not in refused:
                reason = dense.refuses(self._op, dtype)
                refused[dtype] = reason and f"the gradient of {name!r}: {reason}"
            states[number] = _state(gradient)
            error = error or _wrong(name, gradient, parameter) or refused[dtype]
        return bytes(states), error

    def _gradient(self, name: str) -> Tensor | None:
        return self._of[name].grad if name in self._of else None

    def _reduce_sparse(self, names: Mapping[str, int], described: Manifest) -> None:
        """Reduce sparse gradients, each of so many sparse dimensions on every rank that has one."""
        calls: dict[torch.dtype | None, dict[str, Tensor]] = {}
        for name, dims in names.items():
            table = self._sparse(name, dims, described)
            rounds = table.is_floating_point()  # integers are not for `wire_dtype`
            calls.setdefault(self._wire_dtype if rounds else None, {})[name] = table
        for wire_dtype, tables in calls.items():
            given = list(tables.values())
            try:
                results = job_of(self._wire, given, self._op, "auto", wire_dtype)()
            except WeftError as error:
                raise WeftError(_named(str(error), list(tables))) from error
            for name, result in zip(tables, results, strict=True):
                if name in self._of:
                    self._of[name].grad = result

    def _sparse(self, name: str, dims: int, described: Manifest) -> Tensor:
        """A sparse gradient, without rows where this rank has none."""
        gradient = self._gradient(name)
        if gradient is not None:
            return gradient
        like = self._like(name, described)
        return torch.sparse_coo_tensor(
            torch.empty((dims, 0), dtype=torch.int64, device=like.device),
            like.new_empty((0, *like.shape[dims:])),
            like.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def _like(self, name: str, described: Manifest) -> Tensor:
        """A tensor of a parameter's dtype and shape: of another rank's where there is none here."""
        if name in self._of:
            return self._of[name]
        said = re.match(r"a parameter of torch\.(\w+) of shape \(([\d, ]*)\)", described[name])
        assert said is not None
        shape = [int(dim) for dim in said[2].split(",") if dim.strip()]
        return torch.empty(shape, dtype=getattr(torch, said[1]))

    def _dense(self, name: str, described: Manifest) -> Tensor:
        """What of a dense gradient is on this rank: made where there is none."""
        if name not in self._of:
            return torch.zeros_like(self._like(name, described))
        parameter = self._of[name]
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = gradient = torch.zeros_like(parameter)
        elif gradient.layout == torch.sparse_coo:
            parameter.grad = gradient = gradient.to_dense()
        elif expanded_dims(local(gradient)):
            parameter.grad = gradient = gradient.contiguous()
        return local(gradient)


def _wrong(name: str, gradient: Tensor, parameter: Tensor) -> str | None:
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        return f"the gradient of {name!r} has layout {gradient.layout}: use a sparse COO"
    if gradient.dtype != parameter.dtype:
        return (
            f"the gradient of {name!r} is {gradient.dtype}, the parameter {parameter.dtype}: "
            "make them one"
        )
    if shard_of(gradient) != shard_of(parameter):
        return f"the gradient of {name!r} is placed otherwise than the parameter"
    return None


def _named(error: str, names: Sequence[str]) -> str:
    """An error about a list of tables, which has their numbers, with the names that they have."""
    return re.sub(r"\btable (\d+)\b", lambda m: f"the gradient of {names[int(m[1])]!r}", error)


def _state(gradient: Tensor) -> int:
    """What a rank states of a gradient it has; one that sparse calls do not take is a dense one."""
    if gradient.layout != torch.sparse_coo or gradient.dtype not in DTYPES:
        return _DENSE
    return 1 << gradient.sparse_dim() if gradient.sparse_dim() <= _SPARSE_DIMS else _DENSE
