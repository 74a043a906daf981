"""Arguments that go by two names: SAR's, which begin with an underscore, and the plain ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["also"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def also(**plain: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function take arguments by other names, too: `also(rank="_rank")`.

    Raises:
        TypeError: when it is called with one of them under both names.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for other in plain.keys() & kwargs.keys():
                name = plain[other]
                if name in kwargs:
                    raise TypeError(f"{function.__name__}: {name} and {other} are one argument")
                kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return called

    return decorate
