"""torch.distributed's default group: whether there is one, and this rank in it."""

from __future__ import annotations

import torch.distributed as dist


def has_default() -> bool:
    """Whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> str:
    """The beginning of an error that this rank raises alone: its number, if it is known."""
    return f"rank {dist.get_rank()}: " if has_default() else ""
