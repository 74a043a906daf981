"""weft under trainers: Accelerate, the Trainer of Hugging Face, Lightning.

It is common that a trainer wraps the model itself, so that nobody is there to call
`weft.ddp.register`, and that it clips gradients by torch's function, which fails on sparse ones.
Each function here makes a trainer do both over weft. No framework is imported before a function is
called that needs it.

| trainer | what a program writes |
|---|---|
| Accelerate | `accelerator = weft.trainers.accelerate(Accelerator())` |
| Hugging Face | `trainer = weft.trainers.huggingface(Trainer(...))` |
| Lightning | `trainer = Trainer(strategy=weft.trainers.lightning())` |
"""

from typing import Any as _Any

from .accelerator import accelerate
from .strategy import lightning
from .strategy import strategy_class as _strategy_class
from .trainer import huggingface

__all__ = ["accelerate", "huggingface", "lightning"]


def __getattr__(name: str) -> _Any:
    """The class of `lightning()`, which pickle finds here by name, where there is Lightning."""
    if name != "LightningStrategy":
        raise AttributeError(f"module 'weft.trainers' has no attribute {name!r}")
    return _strategy_class()
