"""`clip_grad_norm_`: as torch's, for sparse and dense gradients together.

A sparse gradient as backward leaves it may hold an index several times. Its rows are summed first:
the norm is that of the gradient, not of the pieces it came in. Of a table that is cut over ranks,
each has the gradient of its own rows: the norm is that of all of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WeftError
from ..group.group import Group
from .all_reduce import all_reduce
from .named import Cut, local


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
    their mesh; if a module has sharded tables of `weft.nn`, over their group. The norm is then that
    of the whole tensors.

    Args:
        parameters: parameters, or a module; with sharded tables it must be the module. Gradients
            are dense or sparse COO, on any devices; sparse ones are coalesced. Parameters without a
            gradient do not count.
        max_norm: the largest norm that is allowed.
        norm_type: the p of the p-norm; may be `math.inf` or "inf".
        error_if_nonfinite: raise if the norm is infinite or NaN; else gradients are scaled by it.
        foreach: as in torch's function: True, or None, scales gradients of one device and dtype
            together, False one by one. The result is the same.

    Returns:
        The norm before scaling, a tensor without dimensions; 0.0 if there is no gradient.

    Raises:
        WeftError: `parameters` are not parameters, or an exhausted generator; `max_norm` or
            `norm_type` is not a number that a norm can have; a gradient has another layout; or the
            norm is not finite and `error_if_nonfinite` is true.

    Example:
        >>> import torch, weft
        >>> table = torch.nn.Embedding(10, 1, sparse=True)
        >>> table(torch.tensor([3, 3, 7])).sum().backward()  # 3 twice: its gradient is 2
        >>> weft.clip_grad_norm_(table, max_norm=1.0)
        tensor(2.2361)
        >>> table.weight.grad.coalesce().values().norm()
        tensor(1.0000)
    """
    try:
        most, p = float(max_norm), float(norm_type)
        wrong = math.isnan(most) or most < 0 or math.isnan(p) or p <= 0
    except (TypeError, ValueError):
        wrong = True
    if wrong:
        raise WeftError(
            f"max_norm is {max_norm} and norm_type {norm_type}: the first must be at least 0 and "
            "the second above it"
        )
    values: list[Tensor] = []
    shards = _shards(parameters)
    over: dict[Group, list[Tensor]] = {group: [] for group in shards.values()}
    norms: list[Tensor] = []
    for parameter in dict.fromkeys(_given(parameters)):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout == torch.sparse_coo:
            parameter.grad = gradient = gradient.coalesce()
            values.append(gradient._values())
        elif gradient.layout == torch.strided:
            values.append(gradient)
        else:
            raise WeftError(f"a gradient has layout {gradient.layout}: use strided or sparse COO")
        if values[-1].numel():
            group = shards.get(parameter)
            (norms if group is None else over[group]).append(_norm(values[-1], p))
    norms += [_norm_over(group, some, p) for group, some in over.items()]
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    widest = torch.float64 if any(n.dtype is torch.float64 for n in norms) else torch.float32
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device, widest) for norm in norms]), p
    )
    if error_if_nonfinite and not total.isfinite():
        raise WeftError(f"the norm of the gradients is {total.item()}: it cannot be clipped")
    clip: Any = nn.utils.clip_grads_with_norm_  # which asks for nothing but `.grad`
    clip([SimpleNamespace(grad=local(each)) for each in values], most, total, foreach)
    return total


def _given(parameters: object) -> list[Tensor]:
    """The parameters, one by one."""
    wanted = "pass a module, a tensor or an iterable of tensors"
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, type):
        raise WeftError(f"parameters is a {type(parameters).__name__}: {wanted}")
    if inspect.isgenerator(parameters) and inspect.getgeneratorstate(parameters) == "GEN_CLOSED":
        raise WeftError("parameters is a generator that is used up: make another, or pass a list")
    found = list(parameters)
    for number, each in enumerate(found):
        if not isinstance(each, Tensor):
            kinds = f"a {type(parameters).__name__}, its item {number} a {type(each).__name__}"
            raise WeftError(f"parameters is {kinds}: {wanted}")
    return found


def _shards(parameters: object) -> dict[Tensor, Group]:
    """The parameters of a module of which each rank has a part, and among which ranks."""
    parts = parameters.modules() if isinstance(parameters, nn.Module) else ()
    return {part.weight: part._group() for part in parts if isinstance(part, Cut)}


def _norm_over(group: Group, norms: Sequence[Tensor], p: float) -> Tensor:
    """The p-norm of what the ranks have the norms of; collective."""
    here = [norm.to(norms[0].device) for norm in norms] or [torch.zeros(())]
    own = torch.stack(here).cpu().double()  # all in one copy
    if math.isinf(p):
        return all_reduce(own.amax(), "max", group).float()
    return all_reduce((own**p).sum(), "sum", group).pow(1 / p).float()


def _norm(values: Tensor, p: float) -> Tensor:
    """The p-norm of some values; of half precision in float32, where it does not overflow."""
    narrow = values.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(values, p, dtype=torch.float32 if narrow else None)
    whole = getattr(norm, "full_tensor", lambda: norm)  # of a DTensor
    number: Tensor = whole()
    return number
