"""What a rank keeps of a tensor from step to step, since it has not sent it: error feedback.

Source: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887), sections 3.1 and 3.2:
residuals, and momentum correction with factor masking.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Picked = tuple[Tensor | None, Tensor, Tensor]
"""Of the entries of a tensor that are sent: their places (None: all entries are sent), their
values, and the values as they are sent, which rounding may have changed."""


@dataclass(slots=True)
class Feedback:
    """What is kept of a tensor from step to step.

    Attributes:
        residual: what was not sent, 1-D, in float32 or wider; None without error feedback.
        velocity: of momentum correction, likewise; None without momentum.
        steps: how often the tensor was reduced.
        added: how far a step's tensor was added whose mean has not come: 0, it was not; 1, it is
            counted; 2, the velocity has faded; 3, the velocity has it; 4, the residual, too.

    The handler of a signal may raise right behind a call, so `added` is set before each call that
    writes. These write to tensors of one dtype: they need no memory, and do not fail themselves.
    """

    residual: Tensor | None = None
    velocity: Tensor | None = None
    steps: int = 0
    added: int = 0

    def add(self, flat: Tensor, momentum: float) -> Tensor:
        """Add this step's tensor to what is kept. The caller must not write to the sum returned."""
        kept = [each for each in (self.residual, self.velocity) if each is not None]
        total = flat.to(kept[0].dtype) if kept else flat
        self.steps, self.added = self.steps + 1, 1
        if self.velocity is not None:
            self.added = 2
            self.velocity.mul_(momentum)
            self.added = 3
            total = self.velocity.add_(total)
        if self.residual is not None:
            self.added = 4
            total = self.residual.add_(total)
        return total

    def take_out(
        self, where: Tensor | None, values: Tensor, sent: Tensor, shared: Tensor | None = None
    ) -> None:
        """Take what was sent out of what is kept.

        Entries that are infinite or not a number become zero here, also those that were not shared:
        they would be the largest of all later steps. Every rank has seen them or, since they are
        the first to be shared, a result that is full of others.

        Args:
            where: the places of what was sent; None: all entries.
            values: the values there.
            sent: the values as they were sent.
            shared: the places of the result, if it has not all that was sent: what it lacks is
                kept, and sent again.
        """
        kept = [each for each in (self.residual, self.velocity) if each is not None]
        is_finite = not kept or bool(sent.isfinite().all())
        if where is not None and shared is not None:
            found = torch.isin(where, shared, assume_unique=True)
            where, values, sent = where[found], values[found], sent[found]
        if self.residual is not None:
            left = values - sent
            if where is not None:
                self.residual[where] = left
            else:
                if not is_finite:
                    left.nan_to_num_(0, 0, 0)
                self.added = 0
                self.residual.copy_(left)
        self.added = 0
        if self.velocity is not None and where is not None:  # factor masking
            self.velocity[where] = 0
        if not is_finite:
            for each in kept:
                each.nan_to_num_(0, 0, 0)

    def undo(self, flat: Tensor, momentum: float) -> None:
        """Undo the last `add`, or what was done of it, up to rounding: no mean came of it."""
        if self.residual is not None and self.added > 3:
            added = flat if self.velocity is None else self.velocity
            self.residual.sub_(added).nan_to_num_(0, 0, 0)
        if self.velocity is not None and self.added > 2:
            self.velocity.sub_(flat)
        if self.velocity is not None and self.added > 1:
            self.velocity.div_(momentum).nan_to_num_(0, 0, 0)
        self.steps -= 1
        self.added = 0
