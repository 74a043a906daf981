"""weft under the Trainer of Hugging Face, which trains by an Accelerator."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

import weft

from .accelerator import accelerate
from .frameworks import check_kind, import_framework

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
        WeftError: it is no Trainer, its models are not wrapped in DistributedDataParallel, it is
            over weft already, or Transformers or Accelerate is too old; raised on this rank alone.
            From `train`: what `weft.ddp.register` raises; before the first step, if the Trainer has
            another Accelerator by then; and at its backward, if gradients did not go over weft.

    Example:
        ```python
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer = weft.trainers.huggingface(trainer)
        trainer.train()
        ```
    """
    check_kind(trainer, "transformers", "transformers", "Trainer")
    given: Any = trainer
    accelerate(given.accelerator, algorithm, wire_dtype)
    given.add_callback(_check_of_accelerator(given))
    return trainer


def _check_of_accelerator(trainer: Any) -> object:
    """A callback that raises WeftError if the Trainer has got another Accelerator since.

    (Whether gradients went over weft, the Accelerator itself checks, after the first backward.)
    """
    transformers: Any = import_framework("transformers", "transformers")

    class Check(transformers.TrainerCallback):  # type: ignore[misc]  # of no type here
        def on_train_begin(self, *_: object, **__: object) -> None:
            if not hasattr(trainer.accelerator, "weft_state"):
                raise weft.WeftError(
                    "weft is not in use: the Trainer has made itself another Accelerator since "
                    "weft.trainers.huggingface: call that again, with this Trainer"
                )

    return Check()
