"""`distdl.utilities.misc`: dictionaries with attributes, and a wait for a CUDA stream."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx


class Bunch(dict[str, Any]):
    """A dictionary whose keys are attributes, too.

    Example:
        >>> bunch = Bunch(size=3)
        >>> bunch.rank = 1
        >>> bunch.size, bunch["rank"]
        (3, 1)
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


class DummyContext(Bunch, FunctionCtx):
    """A stand-in for the `ctx` of a torch.autograd.Function, to call its `forward` by hand.

    Example:
        >>> context = DummyContext(scale=2)
        >>> context.save_for_backward(torch.ones(1))
        >>> context.scale, context.to_save
        (2, (tensor([1.]),))
    """


def stream_barrier(stream: torch.cuda.Stream | None) -> None:
    """Make the current CUDA stream wait for another one; None: do nothing."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
