"""The machine code that calls usually need: whether it is there or kept, and making it at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from . import cache, cpu, cpu_copy, cpu_indices, cpu_shares, cpu_talk, floats, lent, lists
from .compile import compiler
from .gaps import gaps_key
from .ops import OPS, Op

__all__ = ["kept", "prepare", "ready", "warm"]

_log = logging.getLogger("weft")
_COMMON = (
    (torch.int64, torch.float32, OPS["sum"]),
    (torch.int32, torch.float32, OPS["sum"]),
)


def ready(index_dtype: torch.dtype, dtype: torch.dtype, op: Op) -> bool:
    """Whether calls with these on the CPU are served by machine code. Starts nothing."""
    keys = _keys(index_dtype, dtype, op)
    return bool(keys) and all(map(compiler.made, keys))


def warm(pairs: Iterable[tuple[torch.dtype, torch.dtype, Op]] = _COMMON) -> None:
    """Make the machine code for (dtype of indices, dtype of values, op) now, or load it.

    Takes seconds the first time on a machine. Does nothing where there is no compiler.

    Example:
        >>> warm([(torch.int64, torch.bfloat16, OPS["avg"])])
    """
    for key in _sets(pairs):
        compiler.make(key)


def kept() -> bool:
    """Whether the usual machine code only has to be loaded here, or none is to serve."""
    return bool(compiler.unusable) or cache.has(_words(_sets(_COMMON)))


def prepare() -> Callable[[], None]:
    """Make the usual machine code now, as `warm` does, unless it is kept and only to be loaded.

    Loading takes the better part of a second, most of it to import numba.

    Returns:
        What begins to load it in the background, where torch operations serve until it is there.
    """
    sets = _sets(_COMMON)
    if not kept():
        _log.info("machine code is made, once on this machine: it takes ten seconds or so")
        warm()
        if all(map(compiler.made, sets)):
            cache.note(_words(sets))

    def begin() -> None:
        for key in sets:
            compiler.loops(key)  # asks for it

    return begin


def _sets(pairs: Iterable[tuple[torch.dtype, torch.dtype, Op]]) -> list[tuple[str, ...]]:
    """The sets of loops for these, in the order in which calls need them."""
    sets = [
        key
        for index_dtype, dtype, op in pairs
        for key in (
            *_keys(index_dtype, dtype, op),
            gaps_key(index_dtype),
            lists.sums_key(dtype, op),
        )
        if key is not None
    ]
    # these are for every dtype, and fewest calls need them
    common = lists.KEY, lent.KEY, cpu_copy.KEY, cpu_shares.KEY, cpu_talk.KEY, floats.PIECES
    return list(dict.fromkeys([*sets, *common]))


def _keys(index_dtype: torch.dtype, dtype: torch.dtype, op: Op) -> list[tuple[str, ...]]:
    """All sets of loops that a call may need, none if machine code cannot serve it."""
    total = op.accumulator(dtype)
    values = [cpu.value_key(dtype, dtype, op), cpu.value_key(dtype, total, op)]
    if None in values:
        return []
    if total != dtype:
        values.append(cpu.value_key(total, total, op))
    keys = [cpu_indices.index_key(index_dtype), *(key for key in values if key is not None)]
    return list(dict.fromkeys(keys))


def _words(sets: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(" ".join(key) for key in sets)
