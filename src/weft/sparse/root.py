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


def take_root(request: Request, name: str, root: int, given: object, size: int) -> None:
    """Have all ranks compare the root, `root_in` of what was given; state what is wrong."""
    request.fields[name] = root
    if root < 0:
        try:
            said = repr(given)
        except Exception:  # raised here it would leave the others waiting
            said = f"a {type(given).__name__}"
        request.error = request.error or (
            f"{name} is {said}: pass a rank of the group, 0 to {size - 1}"
        )
