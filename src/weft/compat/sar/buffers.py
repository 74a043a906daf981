"""The tensors that a program brings to be filled: what is wrong with them, and filling them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm.named import expanded_dims
from ...tensors import has_elements, lacking

__all__ = ["fill", "unfit", "unwritable"]


def unwritable(name: str, place: Tensor) -> str | None:
    """Why a tensor of the caller's cannot be filled, or None."""
    if not has_elements(place):
        return f"{name} is {lacking(place)}: pass a strided tensor with data"
    if expanded_dims(place):
        return f"{name} is expanded, its elements share memory: pass one that can be written"
    if place.is_inference() and not torch.is_inference_mode_enabled():
        return f"{name} is of inference mode: pass one that can be written, or a clone of it"
    return None


def unfit(name: str, place: object, source: int, came: Tensor) -> str | None:
    """Why a buffer cannot take what came, or None."""
    if not isinstance(place, Tensor):
        return f"{name} is a {type(place).__name__}: pass a tensor to be filled"
    if error := unwritable(name, place):
        return error
    if place.dtype != came.dtype:
        return f"{name} has {place.dtype}, and rank {source} sends {came.dtype}: pass one dtype"
    if place.numel() != came.numel():
        return (
            f"{name} has shape {tuple(place.shape)}, and rank {source} sends {tuple(came.shape)}: "
            "make it as large, or use exchange_tensors, which needs no sizes"
        )
    return None


def fill(place: Tensor, came: Tensor) -> None:
    """Write what came into a buffer that is fit for it."""
    with torch.no_grad():
        place.copy_(came.view(place.shape))
