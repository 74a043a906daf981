"""SAR's `Config`, as far as it concerns communication."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Config"]


class Config:
    """What a program sets once, on the class itself, alike on every rank.

    Attributes:
        max_collective_size: elements that a rank sends and receives together, at most, in one round
            of `all_to_all`, give or take one of each tensor; 0: all in one round. Where ranks
            differ the smallest counts.
    """

    max_collective_size: ClassVar[int] = 0
