"""DistDL's `Module`, whose subclasses prepare themselves for their input."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, ClassVar

import torch

from .. import backend


def checks_by_default() -> bool:
    """Whether modules check every input for a change, by the environment."""
    return os.environ.get("DISTDL_CHECK_INPUT_CHANGED") != "0"


class Module(torch.nn.Module):
    """A torch.nn.Module that prepares itself before its first call, and again when inputs change.

    A subclass overrides `_distdl_module_setup`, which must set `_distdl_is_setup` to True. It may
    override `_distdl_module_teardown` and `_distdl_input_changed`. Each takes the tuple of inputs.

    Example:
        >>> class Scale(Module):
        ...     def _distdl_module_setup(self, input):
        ...         self._distdl_is_setup, self.by = True, input[0].numel()
        ...     def forward(self, input):
        ...         return input / self.by
        >>> Scale()(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    _distdl_backend: ClassVar[ModuleType] = backend
    _distdl_checks: ClassVar[bool] = checks_by_default()
    _distdl_is_setup = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # weft's own layers have nothing to set up, and so no hook that costs time
        if type(self)._distdl_module_setup is not Module._distdl_module_setup:
            self.register_forward_pre_hook(type(self)._distdl_forward_pre_hook)

    def _distdl_forward_pre_hook(self, input: tuple[Any, ...]) -> None:
        """Runs before `forward`: prepares the module if that is needed."""
        if self._distdl_module_requires_reset(input):
            if self._distdl_is_setup:
                self._distdl_module_teardown(input)
            self._distdl_module_setup(input)

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        """Prepare for this input."""

    def _distdl_module_teardown(self, input: tuple[Any, ...]) -> None:
        """Undo the preparation; called before the next one."""

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        """Whether this input needs another preparation than the last one."""
        return False

    def _distdl_module_requires_reset(self, input: tuple[Any, ...]) -> bool:
        """Whether the module must be prepared for this input now."""
        return not self._distdl_is_setup or (
            self._distdl_checks and self._distdl_input_changed(input)
        )
