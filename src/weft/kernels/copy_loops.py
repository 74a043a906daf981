"""The compiled loop that copies past the cache; see `cpu_copy`.

Made and called like `value_loops`: all arguments are int64, addresses and bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from .machine import fence, load, store, stream

LOOPS = ("rows",)

__all__ = ["LOOPS", "rows"]

_BLOCK = 32  # bytes that `stream` moves at once, and by which it wants them aligned


def rows() -> Callable[..., None]:
    """Copy rows `first` to `last`, of `width` bytes each; a plane has `height` of them.

    Row r lies `r // height` times the first stride and `r % height` times the second from where
    the tensor begins.
    """

    def loop(
        out: int,
        out_plane: int,
        out_row: int,
        values: int,
        plane: int,
        row: int,
        height: int,
        width: int,
        first: int,
        last: int,
    ) -> None:
        for number in range(first, last):
            upper = number // height
            lower = number - upper * height
            to = out + upper * out_plane + lower * out_row
            source = values + upper * plane + lower * row
            at = min(width, -to & (_BLOCK - 1))
            for byte in range(at):
                store("u8", to, byte, load("u8", source, byte))
            end = width - _BLOCK
            while at <= end:
                stream(to + at, source + at)
                at += _BLOCK
            for byte in range(at, width):
                store("u8", to, byte, load("u8", source, byte))
        fence()

    return loop
