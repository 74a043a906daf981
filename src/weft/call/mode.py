"""The state of autograd where a call is made, which all ranks tell each other as it opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Mode(NamedTuple):
    """The state of autograd where the call was made.

    Attributes:
        records: whether this call would be recorded: a tensor requires a gradient.
        enabled: whether gradients are recorded at all.
    """

    records: bool = False
    enabled: bool = True

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Mode:
        """The mode here and now, for a call with these tensors."""
        enabled = torch.is_grad_enabled()
        return cls(enabled and any(tensor.requires_grad for tensor in tensors), enabled)


PLAIN = Mode()
"""The mode of a call that nobody differentiates."""
