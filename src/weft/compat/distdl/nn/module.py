"""DistDL's `Module`, whose subclasses set themselves up for their input, and its `set_backend`.

Of what that sets, only whether modules look at every input matters here.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, ClassVar

import torch

from .. import backend


class Module(torch.nn.Module):
    """A torch.nn.Module that sets itself up before its first call, and again for another input.

    A subclass overrides `_distdl_module_setup`, which is to set `_distdl_is_setup`, and
    `_distdl_module_teardown`, `_distdl_input_changed` as it needs. Each takes the tuple of inputs.

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
    _distdl_checks: ClassVar[bool] = os.environ.get("DISTDL_CHECK_INPUT_CHANGED") != "0"
    _distdl_is_setup = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # weft's own layers have nothing to set up, and so no hook that costs time
        if type(self)._distdl_module_setup is not Module._distdl_module_setup:
            self.register_forward_pre_hook(type(self)._distdl_forward_pre_hook)

    def _distdl_forward_pre_hook(self, input: tuple[Any, ...]) -> None:
        """What torch calls before `forward`."""
        if self._distdl_module_requires_reset(input):
            if self._distdl_is_setup:
                self._distdl_module_teardown(input)
            self._distdl_module_setup(input)

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        """Prepare for this input."""

    def _distdl_module_teardown(self, input: tuple[Any, ...]) -> None:
        """Undo that, before the next."""

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        """Whether this input needs another preparation than the one before."""
        return False

    def _distdl_module_requires_reset(self, input: tuple[Any, ...]) -> bool:
        """Whether to prepare now."""
        return not self._distdl_is_setup or (
            self._distdl_checks and self._distdl_input_changed(input)
        )


def set_backend(
    backend_comm: object = None,
    backend_array: object = None,
    check_input_changed: bool | None = None,
) -> None:
    """Say whether modules look at every input; there is one backend, for all devices.

    Args:
        backend_comm, backend_array: DistDL's choices of MPI or NCCL, NumPy or CuPy; no effect.
        check_input_changed: False: a module that is set up stays so, whatever its inputs. None: as
            DISTDL_CHECK_INPUT_CHANGED says, 0 or 1; unset: True.
    """
    if check_input_changed is None:
        check_input_changed = os.environ.get("DISTDL_CHECK_INPUT_CHANGED") != "0"
    Module._distdl_checks = check_input_changed
