"""For tests: ranks whose CPU tensors go by verbs, as those of an accelerator do."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

import weft
from weft.bootstrap.outcome import Outcome
from weft.group.group import Group
from weft.testing import threads
from weft.testing.pool import load_module, on_pool


def on_verbs(
    world: tuple[int, float], body: Callable[..., Any], args: Any, kwargs: Any, limit: float
) -> list[Outcome]:
    """Ranks that are threads, with verbs made of posts."""
    groups = threads.group(*world, wire="group")
    return threads.on_groups(groups, body, args, kwargs, limit=limit)


def on_gloo(
    world: tuple[int, float], body: Callable[..., Any], args: Any, kwargs: Any, limit: float
) -> list[Outcome]:
    """Ranks that are processes, with the verbs of gloo's process group."""
    name = body.__module__
    found = name, sys.modules[name].__file__, body.__qualname__
    with tempfile.TemporaryDirectory() as folder:
        given = (Path(folder) / "store", world[1], found, args, kwargs)
        return on_pool(world, over_gloo, given, {}, limit=limit)


def over_gloo(
    group: Group,
    place: Path,
    timeout: float,
    found: tuple[str, str, str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """What a body returns whose group has a process group of gloo's, which carries all tensors.

    Args:
        group: of the pool.
        place: where the ranks of the process group meet.
        timeout: of the group that the body gets.
        found: the module of the body, its file, and the name there of what `spmd` has made of it.
        args, kwargs: of the body.
    """
    name, file, qualname = found
    body = inspect.unwrap(attrgetter(qualname)(load_module(name, file)))
    me = {"rank": group.rank, "world_size": group.size, "init_method": f"file://{place}"}
    dist.init_process_group("gloo", **me)
    try:
        return body(weft.init(wire="group", timeout=timeout), *args, **kwargs)
    finally:
        weft.shutdown()
        dist.destroy_process_group()
