"""weft under Lightning: a strategy, which is DistributedDataParallel's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

import weft


def lightning(
    algorithm: str = "auto", wire_dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Make a strategy for a Lightning Trainer that lets weft carry gradients, on any device.

    `gradient_clip_val=` of the Trainer then takes sparse gradients, too, by norm.
    `strategy.weft_state` is the `weft.ddp.State` of the model, once it trains; None before.

    Args:
        algorithm, wire_dtype: as for `weft.ddp.register`.
        options: of Lightning's own `DDPStrategy`, such as `find_unused_parameters=True`.

    Returns:
        A `DDPStrategy` of the package `lightning`.

    Raises:
        WeftError: Lightning is not installed; raised on this rank alone. Later, from `fit`, what
            `weft.ddp.register` raises.

    Example:
        ```python
        trainer = Trainer(strategy=weft.trainers.lightning(), gradient_clip_val=1.0)
        trainer.fit(model, batches)
        ```
    """
    strategy: Any = strategy_class()
    return strategy(algorithm, wire_dtype, options)


@functools.cache
def strategy_class() -> type:
    """The strategy's class, which is a subclass of Lightning's."""
    try:
        strategies = importlib.import_module("lightning.pytorch.strategies")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("lightning"):
            raise  # something that Lightning itself lacks
        raise weft.WeftError("lightning is not installed here: pip install lightning") from None
    bases = (_OverWeft, strategies.DDPStrategy)
    place = {"__module__": __package__, "__doc__": _OverWeft.__doc__}
    return type("LightningStrategy", bases, place)


# It stands before Lightning's class among the bases, so that its methods come first and call those.
class _OverWeft:
    """A DDPStrategy of Lightning's over weft.

    Attributes:
        weft_state: the `weft.ddp.State` of the model, or None.
    """

    model: Any
    precision_plugin: Any

    def __init__(
        self, algorithm: str, wire_dtype: torch.dtype | None, options: dict[str, Any]
    ) -> None:
        super().__init__(**options)
        self._weft_options: dict[str, Any] = {"algorithm": algorithm, "wire_dtype": wire_dtype}
        self.weft_state: weft.ddp.State | None = None

    def configure_ddp(self) -> None:
        lightnings: Any = super()
        lightnings.configure_ddp()
        self.weft_state = weft.ddp.register(self.model, **self._weft_options)
        self.precision_plugin.clip_grad_by_norm = self._clip_norm

    def _clip_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        weft.clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)
