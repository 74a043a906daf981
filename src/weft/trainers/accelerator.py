"""weft under Accelerate: models that an Accelerator prepares, and gradients that it clips."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import weft

from .frameworks import check_kind

A = TypeVar("A")


def accelerate(accelerator: A, algorithm: str = "auto", wire_dtype: torch.dtype | None = None) -> A:
    """Let weft carry the gradients of what an Accelerator prepares. Call it before `prepare`.

    Afterwards `accelerator.prepare` registers weft for each model that it wraps in
    DistributedDataParallel (`weft.ddp.register`), and `accelerator.clip_grad_norm_`
    takes sparse gradients, too. `accelerator.weft_state` is the `weft.ddp.State` of the model that
    was prepared last, or None. In a group of one gradients stay as they are.

    Args:
        accelerator: an `accelerate.Accelerator` for one process, or for several under
            DistributedDataParallel.
        algorithm, wire_dtype: as for `weft.ddp.register`.

    Returns:
        The accelerator.

    Raises:
        WeftError: it is no Accelerator, its models are not wrapped in DistributedDataParallel, or
            it is over weft already; raised on this rank alone. Later, from `prepare`, what
            `weft.ddp.register` raises.

    Example:
        >>> import accelerate, torch, weft
        >>> accelerator = weft.trainers.accelerate(accelerate.Accelerator(cpu=True))
        >>> table = torch.nn.EmbeddingBag(10, 2, sparse=True)
        >>> optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(table, optimizer)
        >>> accelerator.backward(model(torch.tensor([[3, 3, 7]])).sum())
        >>> accelerator.clip_grad_norm_(model.parameters(), max_norm=0.5)
        tensor(1.0541)
        >>> optimizer.step()
    """
    check_kind(accelerator, "accelerate", "Accelerator")
    given: Any = accelerator
    kind = given.distributed_type.value  # of accelerate.DistributedType
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise weft.WeftError(
            f"this Accelerator trains under {kind}: weft.trainers.accelerate is for models in "
            "DistributedDataParallel"
        )
    if hasattr(given, "weft_state"):
        raise weft.WeftError("this Accelerator is over weft already: call it once")
    methods = _Methods(given, algorithm, wire_dtype)
    given.weft_state = None
    given.prepare_model = methods.prepare_model
    given.clip_grad_norm_ = methods.clip_grad_norm_
    return accelerator


class _Methods:
    """Methods of an Accelerator over weft, in place of its own, which they call."""

    def __init__(self, accelerator: Any, algorithm: str, wire_dtype: torch.dtype | None) -> None:
        self._accelerator = accelerator
        self._prepare_model = accelerator.prepare_model
        self._options: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": wire_dtype}
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose gradients weft carries

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        prepared: nn.Module = self._prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )
        wrapped: Any = getattr(prepared, "_orig_mod", prepared)  # torch.compile's is outside
        has_gradients = any(each.requires_grad for each in prepared.parameters())
        if has_gradients and not evaluation_mode and wrapped not in self._models:
            self._accelerator.weft_state = weft.ddp.register(wrapped, **self._options)
            self._models.add(wrapped)
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: Any = 2
    ) -> Tensor:
        self._accelerator.unscale_gradients()
        return weft.clip_grad_norm_(parameters, max_norm, norm_type)
