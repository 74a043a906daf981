"""weft as a backend of torch.distributed: gloo, and four calls of weft's.

`import weft` registers it, which starts nothing. The first group of it imports `group`. `calls` has
the four calls, `work` the objects that torch.distributed waits for.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["WEFT", "register"]

WEFT = "weft"
"""The name of the backend."""


def register() -> None:
    """Register the backend with `torch.distributed`. It may be called more than once."""
    if not dist.is_available():  # a torch built without it
        return
    from ..base import _torch  # noqa: F401  # what it does in forked children

    if WEFT not in dist.Backend.backend_list:
        dist.Backend.register_backend(WEFT, _weft, extended_api=True, devices=["cpu"])


def _weft(asked: Any, options: object) -> Any:
    from ..base.errors import WeftError
    from .group import WeftGroup

    beside = getattr(asked, "process_group", None)  # torch 2.13 does not say
    if beside is not None and beside.name() != "custom":
        raise WeftError(
            f"rank {asked.group_rank}: backend {WEFT!r} takes no other beside it: start with "
            "'cpu:gloo,cuda:nccl', and give sparse CPU tables a group of their own, by "
            f"torch.distributed.new_group(backend={WEFT!r})"
        )
    return WeftGroup(asked.store, asked.group_rank, asked.group_size, asked.timeout)
