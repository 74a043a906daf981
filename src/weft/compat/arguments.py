"""What all faces need: an error of one rank's own arguments is raised on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import weft


def group_of(group: Any = None) -> weft.Group:
    """What a `group=` argument of weft's calls stands for; None: the default group."""
    return weft.Partition(1, group=group).group


@contextmanager
def telling(group: weft.Group | None = None) -> Iterator[None]:
    """Raise on all ranks what is raised in this block; the others are in the call that follows.

    Raises:
        WeftError: something was raised; the same text on every rank, naming this one.
    """
    try:
        yield
    except Exception as error:
        caught = error

        def fail() -> NoReturn:
            raise caught

        weft.attempt(fail, group)
