"""weft as a backend of torch.distributed.

`import weft` registers it, which starts nothing. Its first group imports `gloo`. `collectives` has
the collectives over a group, `work` the objects that torch.distributed waits for.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["WEFT", "register"]

WEFT = "weft"
"""The name of the backend with all collectives over a group of weft's, also sparse and uneven ones,
and messages over gloo."""


def register() -> None:
    """Register the backend with `torch.distributed`. It may be called more than once."""
    if not dist.is_available():  # a torch built without it
        return
    from ..base import _torch  # noqa: F401  # what it does in forked children

    if WEFT not in dist.Backend.backend_list:
        dist.Backend.register_backend(WEFT, _weft, extended_api=True, devices=["cpu"])


def _weft(asked: Any, options: object) -> Any:
    from .gloo import WeftBackend, WeftGroup

    rank = asked.group_rank
    if _shared(asked):
        group = asked.process_group
        return WeftBackend(group, asked.store, rank, asked.group_size, asked.timeout)
    return WeftGroup(asked.store, rank, asked.group_size, asked.timeout)


def _shared(asked: Any) -> bool:
    """Whether the group has a backend of torch's, too: `cpu:weft,cuda:nccl`.

    torch 2.13 does not say, and keeps a group that is written in Python alone.
    """
    group = getattr(asked, "process_group", None)
    return group is not None and group.name() != "custom"
