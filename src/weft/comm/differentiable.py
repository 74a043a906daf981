"""Linear collectives as autograd sees them: the backward of one is its adjoint, another of them.

All ranks together decide whether a call is recorded: if one rank's tensors require a gradient, the
results of all ranks do, so that backward runs everywhere. Else a rank whose own tensors require
none would leave the others waiting.

The fingerprint of an adjoint says which call it is the backward of. So ranks whose graphs run in
different orders raise an error, instead of mixing up gradients of the same size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..base.errors import WeftError, entry
from ..base.tensors import has_elements, lacking
from ..call.attempt import preparing
from ..call.mode import Mode
from ..call.opening import Opening
from ..group.group import Group


@dataclass
class Linear(ABC):
    """A collective that is linear in its tensors.

    Attributes:
        group: among whom.
        name: of the call.
        fields: values that must be equal on all ranks, by name, beside those of the collective.
        number: of the call, among those of the group; known once it has run.
    """

    group: Group
    name: str
    fields: Mapping[str, object] = field(default_factory=dict)
    number: int = 0

    @abstractmethod
    def run(self, tensors: Sequence[Tensor], mode: Mode) -> tuple[list[Tensor], Opening]:
        """Run the collective on tensors without autograd, inside the call's turn.

        Returns:
            The results, and what all ranks know of the call.
        """

    @abstractmethod
    def adjoint(self, name: str) -> Linear:
        """The collective, of this name, that makes the tensors' gradients from the results'."""

    def apply_adjoint(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make the tensors' gradients from the results'; differentiable. Only after `run`.

        Args:
            gradients: of the results, one for each.
        """
        kind = self.name.partition(" (")[0].partition(" backward of call")[0]
        adjoint = self.adjoint(f"{kind} backward of call {self.number}")
        with preparing(self.group, adjoint.name):
            for gradient in gradients:
                if not has_elements(gradient):
                    what = f"{kind}: a gradient is {lacking(gradient)}"
                    raise WeftError(f"{what}: differentiate one at a time")
        return apply(adjoint, gradients)


def apply(collective: Linear, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run a collective and return its results, which are differentiable any number of times."""
    with preparing(collective.group, collective.name) as call:
        make(call, collective, tensors)
    results: list[Tensor] = call.start()
    return results


def make(
    call: preparing,
    collective: Linear,
    tensors: Sequence[Tensor],
    finish: Callable[[list[Tensor]], Any] = list,
) -> None:
    """Make a call of a collective, which may be asynchronous.

    Its result is differentiable: autograd records it where it is asked for.

    Args:
        call: whose arguments these are.
        collective, tensors: as for `apply`.
        finish: makes the caller's result of the collective's; differentiable.
    """
    mode = Mode.of(tensors)  # of here and now
    given = [tensor.detach() for tensor in tensors]

    def job() -> tuple[list[Tensor], bool]:
        with torch.no_grad():
            results, opening = collective.run(given, mode)
        collective.number = opening.number
        return results, opening.records

    def finished(found: tuple[list[Tensor], bool]) -> Any:
        results, is_recorded = found
        if is_recorded:
            # makes autograd record the call where no tensor of this rank would
            anchor = torch.empty(0, requires_grad=True)
            recorded: Any = _Node.apply(collective, results, anchor, *tensors)  # type: ignore[no-untyped-call]  # torch's
            results = list(recorded)
        return finish(results)

    def finished_later(found: tuple[list[Tensor], bool]) -> Any:
        # whoever waits may be in another mode; that of the call decides
        _, is_recorded = found
        with torch.inference_mode(False), torch.set_grad_enabled(is_recorded):
            return finished(found)

    call.job = job
    call.device = tensors[0].device
    call.finish = finished_later if call.is_async else finished


class _Node(torch.autograd.Function):
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
        return (None, None, None, *ctx.collective.apply_adjoint(gradients))
