"""Linear collectives as autograd sees them: the backward of one is its adjoint, another of them.

All ranks together decide whether a call is recorded: if one rank's tensors require a gradient, the
results of all ranks do, so that backward runs everywhere. Else a rank whose own tensors require
none would leave the others waiting.

The fingerprint of an adjoint says which call it is the backward of. So ranks whose graphs run in
different orders raise an error, instead of mixing up gradients of the same size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import entry
from ..tensors import has_elements, lacking
from ..wire.base import Wire, plain
from .opening import Mode


@dataclass
class Linear(ABC):
    """A collective that is linear in its tensors.

    Attributes:
        wire: among whom.
        name: of the call.
        error: what is wrong with its tensors on this rank, or None.
        number: of the call, among those of the group; known once it has run.
    """

    wire: Wire
    name: str
    error: str | None = None
    number: int = 0

    @abstractmethod
    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], bool]:
        """Run the collective on plain tensors, without autograd, inside the call's turn.

        Returns:
            The results, and whether some rank records gradients.
        """

    @abstractmethod
    def adjoint(self, name: str) -> Linear:
        """The collective, of this name, that makes the tensors' gradients from the results'."""

    def undone(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors' gradients, from the results' gradients; differentiable. After `run`."""
        kind = self.name.partition(" ")[0]
        adjoint = self.adjoint(f"{kind} backward of call {self.number}")
        for gradient in gradients:
            if not has_elements(gradient):
                adjoint.error = f"a gradient is {lacking(gradient)}: differentiate one at a time"
                return applied(adjoint, [torch.empty(0)] * len(gradients))
        return applied(adjoint, gradients)


def applied(collective: Linear, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a collective, differentiable any number of times."""
    mode = Mode.of(tensors)

    def job() -> tuple[list[Tensor], bool]:
        return collective.run([plain(tensor.detach()) for tensor in tensors], mode)

    with torch.no_grad():
        results, recorded = collective.wire.worker.call(collective.name, job)
    if not recorded:
        return results
    # makes autograd record the call where no tensor of this rank would
    anchor = torch.empty(0, requires_grad=True)
    return list(
        cast(tuple[Tensor, ...], _Applied.apply(collective, results, anchor, *tensors))  # type: ignore[no-untyped-call]  # torch's
    )


class _Applied(torch.autograd.Function):
    """The node in autograd's graph of a collective that has run already."""

    @staticmethod
    def forward(
        ctx: Any, collective: Linear, results: list[Tensor], anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.collective = collective
        return tuple(results)

    @staticmethod
    @entry
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.collective.undone(gradients))
