"""weft under Lightning: a strategy, which is DistributedDataParallel's."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

import weft

from .frameworks import import_framework

_PACKAGES = {
    "LightningStrategy": ("lightning.pytorch", "lightning"),
    "PyTorchLightningStrategy": ("pytorch_lightning", "pytorch-lightning"),
}
"""By the name of a class of weft's: the package of Lightning that it is for, as it is imported and
as it is installed."""


def lightning(
    algorithm: str = "auto", wire_dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Make a strategy for a Lightning Trainer that lets weft carry gradients, on any device.

    `gradient_clip_val=` of the Trainer then takes sparse gradients, too, by norm and by value.
    `strategy.weft_state` is the `weft.ddp.State` of the model, once it trains; None before.

    Args:
        algorithm, wire_dtype: as for `weft.ddp.register`.
        options: of Lightning's own `DDPStrategy`, such as `find_unused_parameters=True`.

    Returns:
        A `DDPStrategy` of Lightning's: of `pytorch_lightning` if the program has imported that and
        not `lightning`; else of `lightning`.

    Raises:
        WeftError: Lightning is not installed or too old; raised on this rank alone. Later, from
            `fit`, what `weft.ddp.register` raises; and after the first step, if its gradients did
            not go over weft.

    Example:
        ```python
        trainer = Trainer(strategy=weft.trainers.lightning(), gradient_clip_val=1.0)
        trainer.fit(model, batches)
        ```
    """
    is_older_package = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    name = "PyTorchLightningStrategy" if is_older_package else "LightningStrategy"
    strategy: Any = class_named(name)
    return strategy(algorithm, wire_dtype, options)


@functools.cache
def class_named(name: str) -> type:
    """The strategy's class of that name, which is a subclass of one of Lightning's."""
    if name not in _PACKAGES:
        raise AttributeError(f"module 'weft.trainers' has no attribute {name!r}")
    module, package = _PACKAGES[name]
    ddp_strategy = import_framework(f"{module}.strategies", package).DDPStrategy
    bases = (_OverWeft, ddp_strategy)
    return type(name, bases, {"__module__": __package__, "__doc__": _OverWeft.__doc__})


# It stands before Lightning's class among the bases, so that its methods come first and call those.
class _OverWeft:
    """A DDPStrategy of Lightning's over weft.

    Attributes:
        weft_state: the `weft.ddp.State` of the model, or None.
    """

    model: Any
    precision_plugin: Any
    world_size: int

    def __init__(
        self, algorithm: str, wire_dtype: torch.dtype | None, options: dict[str, Any]
    ) -> None:
        super().__init__(**options)
        self._weft_options: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": wire_dtype}
        self._weft_calls = 0  # calls of the group before the first step
        self._weft_checked = False  # whether a step has shown that weft carries gradients
        self.weft_state: weft.ddp.State | None = None

    def configure_ddp(self) -> None:
        lightnings: Any = super()
        lightnings.configure_ddp()
        self.weft_state = weft.ddp.register(self.model, **self._weft_options)
        self._weft_calls = self.weft_state.group.worker.made
        self._weft_checked = False
        self.precision_plugin.clip_grad_by_norm = self._clip_norm
        self.precision_plugin.clip_grad_by_value = self._clip_value

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        lightnings: Any = super()
        result = lightnings.optimizer_step(*args, **kwargs)
        if not self._weft_checked and self.world_size > 1:
            state = self.weft_state
            if state is None or state.group.worker.made == self._weft_calls:
                raise weft.WeftError(
                    "weft is not in use: the first step sent no gradient over it. A strategy that "
                    "overrides configure_ddp must call super().configure_ddp()"
                )
        self._weft_checked = True
        return result

    def _clip_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        weft.clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _clip_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        weft.clip_grad_value_(self.precision_plugin.main_params(optimizer), clip_val)
