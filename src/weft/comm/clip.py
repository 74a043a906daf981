"""`clip_grad_norm_`: as torch's, for sparse and dense gradients together.

A sparse gradient as backward leaves it may hold an index several times. Its rows are summed first:
what is clipped is the gradient, not the pieces it came in. Of a table that is cut over ranks, each
has the gradient of its own rows: the norm is that of all of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.arguments import shown, truth
from ..base.errors import WeftError, check, entry
from ..call.attempt import preparing
from ..group.group import Group
from .all_reduce import Reduction
from .differentiable import apply
from .named import groups_of_shards, local, wrong_gradient

_NAME = "clip_grad_norm_"


@entry
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | nn.Module,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that the norm of all of them together is at most `max_norm`.

    It is local and sends nothing: after `weft.sync_grads` all ranks have the same gradients, and so
    the same norm. But if gradients are DTensors, such as those of FSDP2, it is collective over
    their mesh; if there are weights of sharded tables of `weft.nn`, over their group. The norm is
    then that of the whole tensors.

    Args:
        parameters: parameters, or a module. Gradients are dense or sparse COO, on any devices;
            sparse ones are coalesced. Parameters without a gradient do not count.
        max_norm: the largest norm that is allowed.
        norm_type: the p of the p-norm; may be `math.inf` or "inf".
        error_if_nonfinite: raise if the norm is infinite or NaN; else gradients are scaled by it.
        foreach: as in torch's function: True, or None, scales gradients of one device and dtype
            together, False one by one. The result is the same.

    Returns:
        The norm before scaling, a tensor without dimensions; 0.0 if there is no gradient.

    Raises:
        WeftError: `parameters` are not parameters, or an exhausted generator; raised on this rank
            alone. `max_norm` or `norm_type` is not a number that a norm can have, or a gradient has
            another layout, or no memory; with sharded tables also, the ranks' `max_norm` or
            `norm_type` differ: then it is the same text on every rank of their group, and the next
            call works. The norm is not finite and `error_if_nonfinite` is true.
        WireError: with sharded tables: a peer or a link failed; names the culprit. The group is
            lost.

    Example:
        >>> import torch, weft
        >>> table = torch.nn.Embedding(10, 1, sparse=True)
        >>> table(torch.tensor([3, 3, 7])).sum().backward()  # 3 twice: its gradient is 2
        >>> weft.clip_grad_norm_(table, max_norm=1.0)
        tensor(2.2361)
        >>> table.weight.grad.coalesce().values().norm()
        tensor(1.0000)
    """
    given = list(dict.fromkeys(_given(parameters)))
    groups = groups_of_shards(given)
    most = _number(max_norm)
    p = _number(norm_type)
    error = _wrong(given)
    if not (most >= 0 and p > 0):
        said = f"max_norm is {shown(max_norm)} and norm_type {shown(norm_type)}"
        error = f"{said}: the first must be at least 0 and the second above it"
    try:
        truth("error_if_nonfinite", error_if_nonfinite)
        truth("foreach", foreach)
    except WeftError as wrong:
        error = str(wrong)
    if error and not groups:
        raise WeftError(error)
    values: dict[Tensor, Tensor] = {}
    for parameter in given if error is None else ():
        gradient = _values(parameter)
        if gradient is not None:
            values[parameter] = gradient
    shards: dict[Group, list[Tensor]] = {}
    for weight, group in groups.items():
        shards.setdefault(group, []).append(weight)
    # first of all what may raise an error on all ranks: the norm of a DTensor has others wait
    norms_of_shards = _norms_over(shards, values, most, p, error)
    whole = [each for parameter, each in values.items() if parameter not in groups]
    norms = [_norm(each, p) for each in whole if each.numel()] + norms_of_shards
    total = nn.utils.get_total_norm(norms, p)  # the norm of norms is that of all values
    if error_if_nonfinite and not total.isfinite():
        raise WeftError(f"the norm of the gradients is {total.item()}: it cannot be clipped")
    clip: Any = nn.utils.clip_grads_with_norm_  # which asks for nothing but `.grad`
    gradients = [SimpleNamespace(grad=local(each)) for each in values.values()]
    clip(gradients, most, total, foreach)
    return total


def _given(parameters: object) -> list[Tensor]:
    """The parameters, one by one."""
    wanted = "pass a module, a tensor or an iterable of tensors"
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise WeftError(f"parameters is a {type(parameters).__name__}: {wanted}")
    if inspect.isgenerator(parameters) and inspect.getgeneratorstate(parameters) == "GEN_CLOSED":
        raise WeftError("parameters is a generator that is used up: make another, or pass a list")
    found = list(parameters)
    for number, each in enumerate(found):
        if not isinstance(each, Tensor):
            kinds = f"a {type(parameters).__name__}, its item {number} a {type(each).__name__}"
            raise WeftError(f"parameters is {kinds}: {wanted}")
    return found


def _number(given: object) -> float:
    """A number; NaN if it is none."""
    try:
        return float(given)  # type: ignore[arg-type]  # what is no number raises
    except Exception:  # a caller's object may raise anything
        return math.nan


def _wrong(parameters: Sequence[Tensor]) -> str | None:
    """Why a gradient cannot be clipped, or None."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and (error := wrong_gradient("a gradient", gradient)):
            return error
    return None


def _values(parameter: Tensor) -> Tensor | None:
    """The numbers of a gradient, in its memory; a sparse one is coalesced. None: there is none."""
    if parameter.grad is None or parameter.grad.layout == torch.strided:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


def _norm(values: Tensor, p: float) -> Tensor:
    """The p-norm of some values; of half precision in float32, where it does not overflow."""
    narrow = values.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(values, p, dtype=torch.float32 if narrow else None)
    whole = getattr(norm, "full_tensor", lambda: norm)  # of a DTensor
    number: Tensor = whole()
    return number


def _norms_over(
    shards: Mapping[Group, Sequence[Tensor]],
    values: Mapping[Tensor, Tensor],
    most: float,
    p: float,
    error: str | None,
) -> list[Tensor]:
    """The norm of what the ranks of each group have of gradients; collective over each of them.

    It is on the device of the group's first weight here, of float64 if one is, else of float32.

    Args:
        shards: the weights of each group that are cut over its ranks.
        values: the numbers of the gradients, by weight.
        most, p: the arguments of the call.
        error: what is wrong with these, or with a gradient, if anything is.

    Raises:
        WeftError: some rank's arguments are wrong, or differ. All groups have heard of it by then.
    """
    fields = {"max_norm": most, "norm_type": p}
    found = []
    raised: WeftError | None = None
    for group, weights in shards.items():
        op = "max" if math.isinf(p) else "sum"
        reduction = Reduction(group, _NAME, fields, op=op)
        try:
            with preparing(group, _NAME):
                check(error)
                nothing = torch.zeros((), device=weights[0].device)
                own_values = [values[each] for each in weights if each in values]
                norms = [nothing, *(_norm(each, p) for each in own_values if each.numel())]
                own = torch.stack([norm.to(nothing.device) for norm in norms]).double()
                own = own.amax() if math.isinf(p) else (own**p).sum()
            total = apply(reduction, [own])[0]
        except WeftError as first:
            raised = raised or first
            error = error or str(first)
        else:
            norm = total if math.isinf(p) else total.pow(1 / p)
            is_double = any(each.dtype == torch.float64 for each in weights)
            found.append(norm if is_double else norm.float())
    if raised is not None:
        raise raised
    return found
