"""What DistributedDataParallel takes parameters for, sparse or dense, and where they are."""

from __future__ import annotations

import weakref
from typing import NamedTuple, TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .state import State


class Place(NamedTuple):
    """Where a parameter is: in which module, and by which name in the whole."""

    part: nn.Module
    name: str


def places_of(module: nn.Module) -> dict[Tensor, list[Place]]:
    """The parameters that DistributedDataParallel reduces, each with all its places.

    By the first of these it knows whether it expects sparse gradients.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    found: dict[Tensor, list[Place]] = {}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(path, recurse=False):
            if parameter.requires_grad and name not in ignored:
                found.setdefault(parameter, []).append(Place(part, name))
    return found


def is_table(part: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Whether gradients of a module are sparse, as DistributedDataParallel knows it."""
    return isinstance(part, nn.Embedding | nn.EmbeddingBag) and bool(part.sparse)


def interferes(ddp_model: DistributedDataParallel) -> str | None:
    """What in a model would keep gradients from being reduced."""
    if getattr(ddp_model, "skip_all_reduce_unused_params", False):
        return (
            "the model has skip_all_reduce_unused_params=True, which leaves out buckets that the "
            "hook waits for: leave it False"
        )
    return None


def tied(ddp_model: DistributedDataParallel) -> str | None:
    """What is wrong with a table that a dense layer has as its weight, too; None if nothing is."""
    for (table, name), *others in places_of(ddp_model.module).values():
        dense = [other.name for other in others if _is_dense(other.part)]
        if is_table(table) and dense:
            return (
                f"{name!r} has sparse gradients and is tied to {dense[0]!r}, whose gradients are "
                f"dense: pass sparse=False to the {type(table).__name__}, or call weft.sync_grads "
                "in place of DistributedDataParallel"
            )
    return None


def _is_dense(part: nn.Module) -> bool:
    """Whether gradients of a module are known to be dense.

    Modules that are not torch's own may look rows up: `_check_kind` sees what they do.
    """
    only_holds = isinstance(part, nn.ParameterList | nn.ParameterDict)
    of_torch = type(part).__module__.startswith("torch.nn.")
    return of_torch and not only_holds and not is_table(part)


def check_kinds(state: State, ddp_model: DistributedDataParallel) -> None:
    """See whether gradients are as DistributedDataParallel expects them: sparse or dense."""
    for parameter, places in places_of(ddp_model.module).items():
        _check_kind(state, ddp_model, parameter, places)


def _check_kind(
    state: State, ddp_model: DistributedDataParallel, parameter: Tensor, places: list[Place]
) -> None:
    """See whether a parameter's gradients are as they are expected; of a dense one, the first.

    If not, DistributedDataParallel would fail without a name, and be of no use any more. So it gets
    what it expects, and the error is raised at the end of backward.
    """
    first, *others = places
    expects_sparse = is_table(first.part)
    name, kind = first.name, type(first.part).__name__
    other_use = f"as {others[0].name!r}" if others else "of another use"
    # a hook of a parameter's is held in C++: what it held would never go, nor the parameter
    kept = weakref.ref(state)
    model = weakref.ref(ddp_model)  # a program may keep the state for longer

    def check(parameter: Tensor) -> None:
        state = kept()
        if state is None or model() is None:
            handle.remove()
            return
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse == expects_sparse:
            if not expects_sparse:  # a table may have another use in a later step
                handle.remove()
        elif expects_sparse:
            state.unlike = (
                f"{name!r} has sparse gradients in {kind}, and got a dense one, {other_use}: pass "
                "sparse=False there, or call weft.sync_grads in place of DistributedDataParallel"
            )
            parameter.grad = gradient.to_sparse(1)
        else:
            state.unlike = (
                f"{name!r} got a sparse gradient, which DistributedDataParallel expects of "
                "torch.nn.Embedding and EmbeddingBag with sparse=True alone: use one of these, or "
                "call weft.sync_grads in place of DistributedDataParallel"
            )
            parameter.grad = gradient.to_dense()

    # before the hook of DistributedDataParallel's; typed by torch as untyped
    handle = parameter.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
