"""The outermost backward that is under way, which is asked once to call something at its end.

A backward may run inside another one. What is called at the end of the inner one would come too
early, and an error that is raised there would end the outer one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..base._torch import at_end_of_backward, backward_id


class Outermost:
    """The outermost backward: the first that asks for its end.

    Its graph task keeps what is called at the end, and nothing else does: so it is known by a weak
    reference, which is gone if the backward was given up.
    """

    def __init__(self) -> None:
        self._end: Callable[[], object] = _no_backward

    def at_end(self, callback: Callable[[], None]) -> None:
        """Have a function called at the end of the outermost backward, if there is one.

        Until then, further calls do nothing.
        """

        def end() -> None:
            self._end = _no_backward
            callback()

        if self._end() is None and backward_id() >= 0:
            self._end = weakref.ref(end)
            at_end_of_backward(end)


def _no_backward() -> None:
    """In place of a reference to what a backward keeps: there is none."""
