"""The root of a call that has one: the rank that alone gives rows, or alone gets them."""

from __future__ import annotations

import operator
from typing import Any

from .request import Request

__all__ = ["root_in", "take_root"]


def root_in(given: Any, size: int) -> int:
    """The root's number, as the caller gave it; -1 where that is no rank of so many."""
    try:
        root = operator.index(given)
    except Exception:  # an object of the caller's may raise anything
        return -1
    return root if 0 <= root < size else -1


def take_root(request: Request, name: str, given: object, size: int) -> int:
    """`root_in`, which must be the same on all ranks; what is wrong with it is stated."""
    root = root_in(given, size)
    request.fields[name] = root
    if root < 0:
        try:
            said = repr(given)
        except Exception:  # raised here it would leave the others waiting
            said = f"a {type(given).__name__}"
        request.error = request.error or (
            f"{name} is {said}: pass a rank of the group, 0 to {size - 1}"
        )
    return root
