"""Linear collectives as autograd sees them: the backward of one is its adjoint, another of them.

All ranks together decide whether a call is recorded: if one rank's tensors require a gradient, the
results of all ranks do, so that backward runs everywhere. Else a rank whose own tensors require
none would leave the others waiting.

The fingerprint of an adjoint says which call it is the backward of. So ranks whose graphs run in
different orders raise an error, instead of mixing up gradients of the same size.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..devices import Aside
from ..errors import entry
from ..tensors import has_elements, lacking
from ..wire.base import Wire, Work, plain
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
    job = _job(collective, tensors)
    with torch.no_grad():
        outcome = collective.wire.worker.call(collective.name, job)
    return _recorded(collective, tensors, *outcome)


def started(
    collective: Linear, tensors: Sequence[Tensor], finish: Callable[[list[Tensor]], Any]
) -> Work[Any]:
    """Run a collective on the worker's thread.

    Returns:
        The work, whose result is what `finish` makes of the results. It is as differentiable as
        that of a call that is waited for at once.
    """
    job = _Background(collective, tensors, finish)
    with torch.no_grad():
        return collective.wire.worker.submit(collective.name, job)


def _job(collective: Linear, tensors: Sequence[Tensor]) -> Callable[[], tuple[list[Tensor], bool]]:
    """What runs a collective when its turn has come; in autograd's mode of here and now."""
    mode = Mode.of(tensors)
    return lambda: collective.run([plain(tensor.detach()) for tensor in tensors], mode)


def _recorded(
    collective: Linear, tensors: Sequence[Tensor], results: list[Tensor], recorded: bool
) -> list[Tensor]:
    """The results of a collective that has run, as autograd is to see them."""
    if not recorded:
        return results
    # makes autograd record the call where no tensor of this rank would
    anchor = torch.empty(0, requires_grad=True)
    return list(
        cast(tuple[Tensor, ...], _Applied.apply(collective, results, anchor, *tensors))  # type: ignore[no-untyped-call]  # torch's
    )


class _Background(Aside[Any]):
    """A collective on the worker's thread; autograd records it where the result is asked for."""

    def __init__(
        self,
        collective: Linear,
        tensors: Sequence[Tensor],
        finish: Callable[[list[Tensor]], Any],
    ) -> None:
        super().__init__(tensors[0].device, _job(collective, tensors))
        self._collective = collective
        self._tensors = tensors
        self._finish = finish
        self._lock = threading.Lock()
        self._made: list[Any] = []  # the finished result, once there is one: all waits get the same

    def joined(self, result: Any) -> Any:
        with self._lock:
            results, recorded = super().joined(result)
            if not self._made:
                # whoever waits may be in another mode; that of the call decides
                with torch.inference_mode(False), torch.set_grad_enabled(recorded):
                    outcome = _recorded(self._collective, self._tensors, results, recorded)
                    self._made.append(self._finish(outcome))
                if self.accelerators:  # who asks next waits for this stream, too
                    self._behind.record(torch.accelerator.current_stream(self._device))
            return self._made[0]


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
