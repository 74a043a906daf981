"""weft under the Trainer of Hugging Face, which trains by an Accelerator."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .accelerator import accelerate
from .frameworks import check_kind

T = TypeVar("T")


def huggingface(trainer: T, algorithm: str = "auto", wire_dtype: torch.dtype | None = None) -> T:
    """Let weft carry the gradients of a Trainer, also sparse ones. Call it before `train`.

    The Trainer then registers weft for the model that it wraps, and clips and measures the norm of
    sparse gradients, too, on which it fails otherwise, whatever is set. Give it an optimizer that
    takes sparse gradients: `optim="adagrad"` or `"sgd"`, or `optimizers=(optimizer, None)`.
    `trainer.accelerator.weft_state` is the `weft.ddp.State` of its model.

    Args:
        trainer: a `transformers.Trainer`, or a subclass, for one process, or for several under
            DistributedDataParallel.
        algorithm, wire_dtype: as for `weft.ddp.register`.

    Returns:
        The trainer.

    Raises:
        WeftError: it is no Trainer, its models are not wrapped in DistributedDataParallel, or it is
            over weft already; raised on this rank alone. From `train`: what `weft.ddp.register`
            raises.

    Example:
        ```python
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer = weft.trainers.huggingface(trainer)
        trainer.train()
        ```
    """
    check_kind(trainer, "transformers", "Trainer")
    given: Any = trainer
    accelerate(given.accelerator, algorithm, wire_dtype)
    return trainer
