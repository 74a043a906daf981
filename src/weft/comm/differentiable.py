"""Linear collectives as autograd sees them: the backward of one is its adjoint, another of them.

Whether a call is recorded is decided by all ranks together: where one rank's tensors require a
gradient, the results of all ranks do, so that backward runs everywhere. A rank whose own tensors
require none would otherwise leave the others waiting.

The adjoint states which call it is the backward of. Ranks whose graphs run in different orders are
told so, instead of mixing up gradients of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..tensors import has_elements, lacking
from .opening import Mode


class Linear(Protocol):
    """A collective that is linear in its tensors.

    Attributes:
        error: what is wrong with them on this rank, or None.
    """

    error: str | None

    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        """Do it, without autograd; the results, and whether some rank records gradients."""

    def adjoint(self) -> Linear:
        """Takes the gradients of the results, gives those of the tensors; asked for after `run`."""


def applied(collective: Linear, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a collective, differentiable any number of times."""
    mode = Mode.of(tensors)
    with torch.no_grad():
        results, recorded = collective.run(tensors, mode)
    if not recorded:
        return results
    # makes autograd record the call where no tensor of this rank would
    anchor = torch.empty(0, requires_grad=True)
    return list(
        cast(tuple[Tensor, ...], _Applied.apply(collective, results, anchor, *tensors))  # type: ignore[no-untyped-call]  # torch's
    )


class _Applied(torch.autograd.Function):
    """What was done already, as a node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, collective: Linear, results: list[Tensor], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.collective = collective
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        adjoint = ctx.collective.adjoint()
        return (None, None, None, *applied(adjoint, movable(gradients, adjoint)))


def movable(gradients: Sequence[Tensor], adjoint: Linear) -> Sequence[Tensor]:
    """The gradients that the adjoint takes; others in their place if it has to refuse them."""
    for gradient in gradients:
        if not has_elements(gradient):
            adjoint.error = f"a gradient is {lacking(gradient)}: differentiate one at a time"
            return [torch.empty(0)] * len(gradients)
    return gradients
