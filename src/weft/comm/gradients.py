"""`sync_grads`: every rank gets the sum or the average of the gradients of all.

Parameters are matched by name. First all ranks state which of their parameters have a gradient, and
whether it is sparse. On a rank without a gradient it counts as zero. Then dense gradients are
reduced in a few large `buckets`, and sparse ones in one `sparse_all_reduce`.

`sync_entries` does that for any of a module's parameters; `overlap` calls it while backward runs.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..base.arguments import shown
from ..base.errors import WeftError, entry
from ..base.tensors import mark_overwritten, shape_in, shares_elements
from ..call.attempt import preparing
from ..call.terms import NO_LIMIT, ROOM, agreed
from ..group import default
from ..group.group import Group
from ..kernels.ops import DTYPES
from ..schedules import dense
from ..sparse.api import job_of
from ..sparse.request import outside, wrong_wire_dtype
from .buckets import reduce_dense
from .named import (
    Manifest,
    description,
    digest,
    local,
    of_module,
    overlaps,
    shard_of,
    told_by_all,
    wrong_gradient,
)

NAME = "sync_grads"

_DENSE = 1
_SPARSE_DIMS = 7
"""A rank states `_DENSE` of a dense gradient, and `1 << d` of one with d sparse dimensions, at most
`_SPARSE_DIMS`. If ranks state different kinds of one gradient, it is reduced as a dense one."""

_DESCRIBED = r"a (?:(\w+) )?parameter of torch\.(\w+) of shape (\([\d, ]*\))"


@entry
def sync_grads(
    module: torch.nn.Module,
    average: bool = True,
    group: object = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Reduce the gradients of a module over all ranks; `.grad` is then the same on every rank.

    Args:
        module: its parameters are matched by name; dtype, shape and kind of device of a name must
            be the same on every rank. A missing gradient, or parameter, counts as zero; if no rank
            has a gradient, the parameter stays without. Gradients are dense or sparse COO. If a
            gradient is sparse on some ranks and dense on others, or sparse and complex, the result
            is dense. For a DTensor every rank must have the same shard: pass the group of a mesh
            dimension along which it is replicated.
        average: divide by the size of the group; else the sum.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.
        wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: dense and sparse
            gradients of wider floating-point dtypes are sent in this dtype. Each rank's gradient is
            rounded, and so is the result, once each, to nearest even; sums are made in float32 (of
            sparse float64 gradients in float64). Lossy: docs/wire-dtype.md has the error bound.
            With `torch.float32`, sparse gradients of half precision are rounded only in the result.
            Other gradients are sent unchanged.

    If some rank has a gradient for a parameter, all ranks have one afterwards, with the same bits.
    Dense gradients are reduced in place if possible, and ranks added as by `weft.all_reduce`;
    sparse ones as by `weft.sparse_all_reduce`.

    Raises:
        WeftError: modules or arguments differ, naming the first difference and the ranks; the same
            text on every rank. Gradients are unchanged, and the next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost, and the gradients
            are undefined.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     model = torch.nn.Embedding(4, 1, sparse=True)
        ...     model(torch.tensor([group.rank, 3])).sum().backward()
        ...     weft.sync_grads(model, average=False)
        ...     return model.weight.grad.to_dense().flatten().tolist()
        >>> run(2, program)
        [[1.0, 1.0, 0.0, 2.0], [1.0, 1.0, 0.0, 2.0]]

        In half the bytes, to about three digits:

        >>> def rounded(group):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     model(torch.tensor([[0.1]])).backward()
        ...     weft.sync_grads(model, wire_dtype=torch.bfloat16)
        ...     return model.weight.grad.item()
        >>> run(2, rounded)
        [0.10009765625, 0.10009765625]
    """
    group = default.resolve(group)
    with preparing(group, NAME):
        finish = finish_of(module) if isinstance(module, torch.nn.Module) else None
        if finish is None:
            synchronised = Synchronised(group, module, average, wire_dtype)
    if finish is not None:
        finish(group, average, wire_dtype)
        return
    group.worker.call(NAME, lambda: synchronised.reduce(list(synchronised.of)))


class Overlapping(Protocol):
    """What reduces some gradients while backward runs, as `sync_grads` sees it."""

    def is_given_up(self) -> bool:
        """Whether it was removed and its group is closed: what began there is never completed."""

    def leave(self) -> None:
        """Leave `overlapping`."""

    def module(self) -> torch.nn.Module | None:
        """That `overlap_grads` was called for; None: it is gone."""

    def parameters(self) -> Iterable[Tensor]:
        """Of that module, as it is now; where it is gone, as it was."""

    def finish(
        self,
        group: Group,
        average: bool,
        wire_dtype: torch.dtype | None,
        *,
        error: str | None = None,
    ) -> None:
        """`sync_grads` of these parameters; `error` is what else is wrong, or None."""


overlapping: WeakKeyDictionary[Overlapping, None] = WeakKeyDictionary()
"""Those that may have gradients under way."""


def finish_of(module: torch.nn.Module) -> Callable[..., None] | None:
    """The `finish` of what is overlapping for a module with any of its parameters, else None."""
    own = {id(parameter) for parameter in module.parameters()} if overlapping else set()
    for overlap in [reference() for reference in overlapping.keyrefs()]:  # ranks may be threads
        if overlap is None:
            continue
        if overlap.is_given_up():
            overlap.leave()
            continue
        theirs = {id(parameter) for parameter in overlap.parameters()}
        # the same ones, maybe of a wrapper, such as torch.compile's
        if overlap.module() is module or (own and own == theirs):
            return overlap.finish
        if own & theirs:  # reduced again they would be counted twice
            return functools.partial(
                overlap.finish,
                error="the module has some of the parameters of another, which overlap_grads was "
                "called for: pass that one, or remove() what overlap_grads returned",
            )
    return None


class Synchronised:
    """The parameters of one module, as one rank knows them.

    Attributes:
        group, average, wire_dtype: as they were given.
        of: the parameters by name, sorted; a shared one comes once, under its first name.
        manifest: their descriptions, as `describe` made them last.
        error: what is wrong with the arguments, or None.
        fields: those that must be the same on every rank.
    """

    def __init__(self, group: Group, module: Any, average: object, wire_dtype: Any) -> None:
        self.group, self.average, self.wire_dtype = group, average, wire_dtype
        self._op = "sum" if average is False else "avg"
        self.of, self.manifest, self.error = of_module(module, buffers=False)
        if self.error is None and not isinstance(average, bool):
            self.error = f"average is {shown(average)}: pass True or False"
        self.error = self.error or wrong_wire_dtype(wire_dtype)
        self.fields: dict[str, object] = {}
        if self.error is None:
            self.fields = {"average": average, "wire_dtype": str(wire_dtype)}
        self._digest = digest(self.manifest)
        self._kinds = {name: kind_of(parameter) for name, parameter in self.of.items()}

    def describe(self) -> tuple[Manifest, int]:
        """The manifest of the parameters as they are now, and its digest.

        `half()` leaves a parameter with another dtype, maybe on one rank alone.
        """
        kinds = {name: kind_of(parameter) for name, parameter in self.of.items()}
        changed = [name for name in kinds if kinds[name] != self._kinds[name]]
        if changed:
            texts = {name: description("parameter", self.of[name]) for name in changed}
            self.manifest = self.manifest | texts
            self._digest = digest(self.manifest)
            self._kinds = kinds
        return self.manifest, self._digest

    @torch.no_grad()
    def reduce(
        self,
        names: Sequence[str],
        *,
        first: int | None = None,
        given: dict[str, Tensor] | None = None,
        as_of: tuple[Manifest, int] | None = None,
        error: str | None = None,
    ) -> bool:
        """Reduce the gradients of some parameters; collective, inside a call's turn.

        Args:
            names: the parameters; the same on every rank, unless ranks have different ones.
            first: None: reduce all. Else, if some rank is ready, reduce only this many of the
                names, the first; if no rank is ready, reduce all.
            given: of a rank that is ready, the gradients of the first names; it states no others.
                They become the results. No parameter is looked at, nor its `.grad`, since the
                caller may change these meanwhile.
            as_of: what `describe` returned as the step began; None: as it was last.
            error: what is wrong on this rank, or None.

        Returns:
            Whether some rank was ready.
        """
        ready = given is not None
        gradients = self._gradients(names) if given is None else given
        states, wrong = self._states(names, gradients)
        if not ready:
            wrong = wrong or self._unlike(gradients)
        error = self.error or error or wrong
        manifest, code = as_of or (self.manifest, self._digest)
        if len(names) >= ROOM:
            error = error or f"{len(names)} parameters are too many for one call: below {ROOM}"
        with agreed(
            self.group,
            NAME,
            self.fields | {"overlap_grads": "not called" if first is None else "called"},
            error,
            limit=0 if ready else NO_LIMIT,
            digest=code,
            own=b"" if error else bytes(states.values()),
        ) as said:
            described, some_ready = manifest, said.limit == 0
            if said.equal:
                states = dict(zip(names, said.mask(len(names)), strict=True))
        if not said.equal:
            described, states = self._told(manifest, gradients)
        if first is not None and some_ready:
            states = {name: states[name] for name in names[:first]}
        sparse: dict[str, int] = {}  # with the number of sparse dimensions
        others: list[str] = []
        for name, state in states.items():
            if state > _DENSE and state.bit_count() == 1:  # on all ranks that have one
                sparse[name] = state.bit_length() - 1
            elif state:
                others.append(name)
        self._reduce_sparse(sparse, described, gradients)
        dense_ones = {name: self._dense(name, described, gradients) for name in others}
        self._part(dense_ones, gradients)
        # writes to `.data` are not counted: autograd sees one of all, as `overlap_grads` expects
        owned = [gradients[name] for name in dense_ones if name in self.of]
        mark_overwritten(each for each in owned if each.numel())
        places = [each.data for each in dense_ones.values()]
        reduce_dense(self.group, places, self._op, self.wire_dtype)
        if given is None:
            for name, gradient in gradients.items():
                if self.of[name].grad is not gradient:
                    self.of[name].grad = gradient
        return some_ready

    def _told(
        self, manifest: Manifest, gradients: Mapping[str, Tensor]
    ) -> tuple[Manifest, dict[str, int]]:
        """The combined manifest of all ranks, and the kinds of their gradients; collective.

        Raises:
            WeftError: one of them is not the same on all ranks that have it.
        """
        mine, kept = self._states(list(self.of), gradients)[0], "; gradients are as they were"
        said = told_by_all(self.group, NAME, manifest, mine, missing=False, kept=kept)
        described = {name: text for manifest, _ in said for name, text in manifest.items()}
        # a parameter that is the same as another, on all ranks that have it, is left out
        states = {n: 0 for n in sorted(described) if ", the same as " not in described[n]}
        for name, state in (pair for _, theirs in said for pair in theirs.items()):
            states[name] |= state
        return described, states

    def _states(
        self, names: Sequence[str], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, int], str | None]:
        """The kind of this rank's gradient for each name; and the first error, or None."""
        dtypes = {each.dtype for each in gradients.values()}
        refused = {dtype: dense.refuses(self._op, dtype) for dtype in dtypes}
        wrong = (_wrong(name, each, refused[each.dtype]) for name, each in gradients.items())
        states = {name: _state(gradients.get(name)) for name in names}
        return states, next(filter(None, wrong), None)

    def _unlike(self, gradients: Mapping[str, Tensor]) -> str | None:
        """The error if a gradient is not like its parameter, or None."""
        found = (unlike(name, each, self.of[name]) for name, each in gradients.items())
        return next(filter(None, found), None)

    def _gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Those that this rank has, by name."""
        found = ((name, self.of[name].grad) for name in names if name in self.of)
        return {name: gradient for name, gradient in found if gradient is not None}

    def _reduce_sparse(
        self, names: Mapping[str, int], described: Manifest, gradients: dict[str, Tensor]
    ) -> None:
        """Reduce sparse gradients, given by name the number of their sparse dimensions."""
        calls: dict[tuple[torch.dtype | None, str], dict[str, Tensor]] = {}
        for name, dims in names.items():
            table = gradients.get(name)
            if table is None:
                table = without_rows(self._like(name, described), dims)
            rounds = table.is_floating_point()  # integers are not for `wire_dtype`
            kind = self.wire_dtype if rounds else None, table.device.type
            calls.setdefault(kind, {})[name] = table
        for (wire_dtype, _), tables in calls.items():
            given = list(tables.values())
            try:
                results = job_of(self.group, given, self._op, "auto", wire_dtype).run()
            except WeftError as error:
                raise WeftError(_named(str(error), list(tables))) from error
            for name, result in zip(tables, results, strict=True):
                if name in self.of:
                    gradients[name] = result

    def _like(self, name: str, described: Manifest) -> Tensor:
        """A tensor with a parameter's dtype and shape; another rank's, if this rank lacks it."""
        if name in self.of:
            return self.of[name]
        said = re.match(_DESCRIBED, described[name])
        assert said is not None
        device, dtype, shape = said.groups()
        return torch.empty(shape_in(shape), dtype=getattr(torch, dtype), device=device or "cpu")

    def _dense(self, name: str, described: Manifest, gradients: dict[str, Tensor]) -> Tensor:
        """This rank's dense gradient, or its shard; zeros, if there is none."""
        if name not in self.of:
            return torch.zeros_like(self._like(name, described))
        gradient = gradients.get(name)
        if gradient is None:
            gradient = torch.zeros_like(self.of[name])
        elif gradient.layout == torch.sparse_coo:
            gradient = gradient.to_dense()
        elif shares_elements(local(gradient)):
            gradient = gradient.contiguous()
        gradients[name] = gradient
        return local(gradient)

    def _part(self, found: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Give dense gradients memory of their own where they lie in that of others.

        One would be written before the next is read. Autograd may leave those of tensors that were
        added in one memory.
        """
        for name, _ in overlaps({name: each for name, each in found.items() if name in self.of}):
            gradients[name] = gradients[name].clone()
            found[name] = local(gradients[name])


def kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return tensor.dtype, tensor.shape, tensor.device


def without_rows(like: Tensor, dims: int = 1) -> Tensor:
    """A sparse gradient without entries, with `dims` sparse dimensions."""
    return torch.sparse_coo_tensor(
        torch.empty((dims, 0), dtype=torch.int64, device=like.device),
        like.new_empty((0, *like.shape[dims:])),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def unlike(name: str, gradient: Tensor, parameter: Tensor) -> str | None:
    """In what a gradient is not like its parameter, or None."""
    if gradient.dtype != parameter.dtype:
        return (
            f"the gradient of {name!r} is {gradient.dtype}, the parameter {parameter.dtype}: "
            "make them one"
        )
    if gradient.shape != parameter.shape:
        return (
            f"the gradient of {name!r} has shape {tuple(gradient.shape)}, the parameter "
            f"{tuple(parameter.shape)}: make them one"
        )
    if shard_of(gradient) != shard_of(parameter):
        return f"the gradient of {name!r} is placed otherwise than the parameter"
    return None


def _wrong(name: str, gradient: Tensor, refused: str | None) -> str | None:
    """Why a gradient cannot be reduced, or None."""
    if error := wrong_gradient(f"the gradient of {name!r}", gradient):
        return error
    refused = refused or _index_outside(gradient)
    return refused and f"the gradient of {name!r}: {refused}"


def _index_outside(gradient: Tensor) -> str | None:
    """Which index of a sparse gradient is none of its shape, or None; `to_dense` does not look."""
    if gradient.layout != torch.sparse_coo or not gradient._nnz():
        return None
    ends = torch.stack(gradient._indices().aminmax(dim=1)).tolist()  # one wait for a device
    bounds = zip(*ends, gradient.shape, strict=False)
    return next(filter(None, itertools.starmap(outside, bounds)), None)


def _named(error: str, names: Sequence[str]) -> str:
    """An error about a list of tables, with the parameters' names in place of table numbers."""
    return re.sub(r"\btable (\d+)\b", lambda m: f"the gradient of {names[int(m[1])]!r}", error)


def _state(gradient: Tensor | None) -> int:
    """What a rank states of a gradient; a sparse one that sparse calls refuse counts as dense."""
    if gradient is None:
        return 0
    if gradient.layout != torch.sparse_coo or gradient.dtype not in DTYPES:
        return _DENSE
    return 1 << gradient.sparse_dim() if gradient.sparse_dim() <= _SPARSE_DIMS else _DENSE
