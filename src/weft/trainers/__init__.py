"""weft under trainers: Accelerate, the Trainer of Hugging Face, Lightning.

It is common that a trainer wraps the model itself, so that nobody is there to call
`weft.ddp.register`, and that it clips gradients by torch's function, which fails on sparse ones.
Each function here makes a trainer do both over weft, and has it raise an error if its first step
did not go over weft. No framework is imported before a function is called that needs it.

| trainer | what a program writes |
|---|---|
| Accelerate | `accelerator = weft.trainers.accelerate(Accelerator())` |
| Hugging Face | `trainer = weft.trainers.huggingface(Trainer(...))` |
| Lightning | `trainer = Trainer(strategy=weft.trainers.lightning())` |
"""

from typing import Any as _Any

from . import strategy as _strategy
from .accelerator import accelerate
from .strategy import lightning
from .trainer import huggingface

__all__ = ["accelerate", "huggingface", "lightning"]


def __getattr__(name: str) -> _Any:
    """The classes of `lightning()`, which pickle finds here by name."""
    return _strategy.class_named(name)
