"""`sync_grads`: every rank gets the sum or the average of the gradients of all.

Parameters are matched by name. First all ranks state which of their parameters have a gradient, and
whether it is sparse. On a rank without a gradient it counts as zero. Then dense gradients are
reduced in a few large `buckets`, and sparse ones in one `sparse_all_reduce`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import shown
from ..base.errors import WeftError, check, entry
from ..base.tensors import mark_overwritten, shares_elements
from ..call.attempt import preparing
from ..call.opening import opened
from ..call.statement import BODY
from ..group import default
from ..group.group import Group
from ..kernels.ops import DTYPES
from ..schedules import dense
from ..sparse.api import job_of
from ..sparse.request import outside, wrong_wire_dtype
from ..verbs.group import read
from .buckets import carriers_of, reduce_dense
from .named import (
    digest,
    local,
    of_module,
    overlaps,
    raise_difference,
    shard_of,
    wrong_gradient,
)

NAME = "sync_grads"

_DENSE = 1
_SPARSE_DIMS = 7
"""A rank states `_DENSE` of a dense gradient, and `1 << d` of one with d sparse dimensions, at most
`_SPARSE_DIMS`. If ranks state different kinds of one gradient, it is reduced as a dense one."""


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
        module: its parameters are matched by name; names, and dtype, shape and kind of device of a
            name, must be the same on every rank. A missing gradient counts as zero; if no rank has
            a gradient, the parameter stays without. Gradients are dense or sparse COO. If a
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
    Dense gradients are reduced in place if possible, and ranks added as by `weft.all_reduce` (a
    process group that carries them, such as NCCL's, has an order of its own); sparse ones as by
    `weft.sparse_all_reduce`.

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
        synchronised = Synchronised(group, module, average, wire_dtype)
    group.worker.call(NAME, synchronised.reduce)


class Synchronised:
    """The gradients of one module, as one rank has them.

    Attributes:
        group, wire_dtype: as they were given.
        of: the parameters by name, sorted; a shared one comes once, under its first name.
        manifest: their descriptions.
    """

    def __init__(self, group: Group, module: Any, average: object, wire_dtype: Any) -> None:
        self.group = group
        self.wire_dtype = wire_dtype
        self._op = "sum" if average is False else "avg"
        self.of, self.manifest = of_module(module, buffers=False)
        if not isinstance(average, bool):
            raise WeftError(f"average is {shown(average)}: pass True or False")
        if len(self.of) >= BODY:
            raise WeftError(f"{len(self.of)} parameters are too many for one call: below {BODY}")
        check(wrong_wire_dtype(wire_dtype))
        self._fields = {"average": average, "wire_dtype": str(wire_dtype)}

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients of all parameters; collective, inside a call's turn."""
        given = {name: parameter.grad for name, parameter in self.of.items()}
        gradients = {name: each for name, each in given.items() if each is not None}
        states = self._agreed_states(gradients)
        sparse: dict[str, int] = {}  # with the number of sparse dimensions
        dense_ones: dict[str, Tensor] = {}
        for name, state in states.items():
            if state > _DENSE and state.bit_count() == 1:  # on all ranks that have one
                sparse[name] = state.bit_length() - 1
            elif state:
                dense_ones[name] = self._dense(name, gradients)
        self._reduce_sparse(sparse, gradients)
        # one that lies in the memory of others, where autograd may leave those of tensors that were
        # added, would be written before the next is read
        for name, _ in overlaps(dense_ones):
            gradients[name] = gradients[name].clone()
            dense_ones[name] = local(gradients[name])
        owned = [gradients[name] for name in dense_ones]
        mark_overwritten(each for each in owned if each.numel())
        places = [each.data for each in dense_ones.values()]
        reduce_dense(self.group, places, self._op, self.wire_dtype)
        for name, gradient in gradients.items():
            if self.of[name].grad is not gradient:
                self.of[name].grad = gradient

    def _agreed_states(self, gradients: Mapping[str, Tensor]) -> dict[str, int]:
        """The kinds of the gradients of all ranks, by name, combined by bitwise "or"; collective.

        Raises:
            WeftError: arguments or modules differ, or a rank has a gradient that cannot be reduced.
        """
        states = {name: _state(gradients.get(name)) for name in self.of}
        wrong = itertools.starmap(self._wrong, gradients.items())
        with preparing(self.group, NAME):
            carriers = carriers_of(self.group, self.of.values())
            check(next(filter(None, wrong), None) or index_outside(self.group, gradients))
        fields = {**self._fields, "device": carriers}
        body = bytes(states.values())
        opening = opened(self.group, NAME, fields, body, digest=digest(self.manifest))
        if opening.equal:
            return dict(zip(self.of, opening.mask(len(body)), strict=True))
        raise_difference(self.group, NAME, self.manifest)

    def _wrong(self, name: str, gradient: Tensor) -> str | None:
        """Why a gradient cannot be reduced, or None."""
        what = f"the gradient of {name!r}"
        if error := wrong_gradient(what, gradient):
            return error
        if refused := dense.refuses(self._op, gradient.dtype):
            return f"{what}: {refused}"
        parameter = self.of[name]
        if (gradient.dtype, gradient.shape) != (parameter.dtype, parameter.shape):
            return (
                f"{what} is {gradient.dtype} of shape {tuple(gradient.shape)}, the parameter "
                f"{parameter.dtype} of shape {tuple(parameter.shape)}: make them one"
            )
        if shard_of(gradient) != shard_of(parameter):
            return f"{what} is placed otherwise than the parameter"
        return None

    def _reduce_sparse(self, names: Mapping[str, int], gradients: dict[str, Tensor]) -> None:
        """Reduce sparse gradients, given by name the number of their sparse dimensions."""
        calls: dict[tuple[torch.dtype | None, str], dict[str, Tensor]] = {}
        for name, dims in names.items():
            table = gradients.get(name)
            if table is None:
                table = without_rows(self.of[name], dims)
            rounds = table.is_floating_point()  # integers are not for `wire_dtype`
            kind = self.wire_dtype if rounds else None, table.device.type
            calls.setdefault(kind, {})[name] = table
        for (wire_dtype, _), tables in calls.items():
            with preparing(self.group, NAME):
                job, _ = job_of(self.group, list(tables.values()), self._op, "auto", wire_dtype)
            gradients.update(zip(tables, job(), strict=True))

    def _dense(self, name: str, gradients: dict[str, Tensor]) -> Tensor:
        """This rank's dense gradient, or its shard; zeros, if there is none."""
        gradient = gradients.get(name)
        if gradient is None:
            gradient = torch.zeros_like(self.of[name])
        elif gradient.layout == torch.sparse_coo:
            gradient = gradient.to_dense()
        elif shares_elements(local(gradient)):
            gradient = gradient.contiguous()
        gradients[name] = gradient
        return local(gradient)


def without_rows(like: Tensor, dims: int = 1) -> Tensor:
    """A sparse gradient without entries, with `dims` sparse dimensions."""
    return torch.sparse_coo_tensor(
        torch.empty((dims, 0), dtype=torch.int64, device=like.device),
        like.new_empty((0, *like.shape[dims:])),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def index_outside(group: Group, gradients: Mapping[str, Tensor]) -> str | None:
    """Which index of a sparse gradient is none of its shape, or None; `to_dense` does not look.

    Args:
        group: under whose deadline the host waits for a device, once for all gradients there.
        gradients: by name, which is in the error.
    """
    of_devices: dict[torch.device, dict[str, Tensor]] = {}
    for name, gradient in gradients.items():
        if gradient.layout == torch.sparse_coo and gradient._nnz():
            of_devices.setdefault(gradient.device, {})[name] = gradient
    for sparse in of_devices.values():
        found = [torch.stack(each._indices().aminmax(dim=1)).t() for each in sparse.values()]
        ends = iter(read(group, torch.cat(found).flatten()))
        for name, gradient in sparse.items():
            for height in gradient.shape[: gradient.sparse_dim()]:
                if error := outside(next(ends), next(ends), height):
                    return f"the gradient of {name!r}: {error}"
    return None


def _state(gradient: Tensor | None) -> int:
    """What a rank states of a gradient; a sparse one that sparse calls refuse counts as dense."""
    if gradient is None:
        return 0
    if gradient.layout != torch.sparse_coo or gradient.dtype not in DTYPES:
        return _DENSE
    return 1 << gradient.sparse_dim() if gradient.sparse_dim() <= _SPARSE_DIMS else _DENSE
