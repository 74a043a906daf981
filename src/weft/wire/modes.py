"""The caller's torch function modes, kept out of what weft does inside.

`torch.set_default_device("cuda")` is such a mode: each tensor that is made without a device is made
there. weft's own are memory that messages lie in, so they belong on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["uncompiled", "without_modes", "without_transforms"]

P = ParamSpec("P")
T = TypeVar("T")

_count = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_compiler = torch._C._dynamo.eval_frame


def without_modes(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, in which no torch function mode of its caller is active.

    Example:
        >>> with torch.device("meta"):
        ...     torch.empty(1).device.type, without_modes(torch.empty)(1).device.type
        ('meta', 'cpu')
    """

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _count():
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return inside


def without_transforms(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, outside of the transforms of torch.func's that its caller is in.

    In those all that is made stands for something else, which has no memory for a message.

    Example:
        >>> make = without_transforms(torch.empty)
        >>> made = []
        >>> _ = torch.func.grad(lambda x: made.append(make(1)) or x)(torch.tensor(1.0))
        >>> torch._C._functorch.is_functorch_wrapped_tensor(made[0])
        False
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if _transform() is None:
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return outside


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which torch.compile calls as it is, and does not look into.

    What talks to other ranks cannot be traced: the graph breaks there. As `torch.compiler.disable`,
    which takes a second to import and time in each call.

    Example:
        >>> import weft
        >>> with weft.init():
        ...     torch.compile(lambda x: weft.all_reduce(2 * x) + 1, backend="eager")(torch.ones(2))
        tensor([3., 3.])
    """

    inside: Any = function
    inside._torchdynamo_disable = True  # by which the compiler knows
    skip = _compiler._FrameAction.SKIP
    _compiler.set_code_exec_strategy(inside.__code__, _compiler._FrameExecStrategy(skip, skip))
    return function
