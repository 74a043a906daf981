"""Start-up from what the caller gives: rank, size, and where rank 0 is.

For faces of libraries whose programs bring these themselves, instead of leaving them to a launcher;
`init` does the rest. `publish` tells where rank 0 is through a file, before anything else is known.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote

import torch.distributed as dist

from ..errors import WeftError
from ..wire.base import Wire
from . import meeting
from .init import init
from .launchers import Launch

__all__ = ["Published", "publish", "start", "tcp"]

_TIMEOUT = 300.0  # seconds that a file is waited for
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")  # a launcher's, which may not fit to what is given

Published = tuple[str, int, str]
"""Address and port of the store that rank 0 hosts, and the `rendezvous=` of the file."""


def start(rank: int, size: int, *, backend: str | None, rendezvous: str) -> Wire:
    """`weft.init`, as this rank of so many, whatever the environment says; collective.

    If torch.distributed is initialised already, weft adopts that and `rendezvous` is not used.

    Raises:
        WeftError: as `weft.init`; or torch.distributed is initialised with another rank or size.
        WireError: as `weft.init`.

    Example:
        >>> with start(0, 1, backend="gloo", rendezvous="tcp://127.0.0.1:29431") as wire:
        ...     wire.rank, wire.size
        (0, 1)
    """
    if dist.is_initialized():
        there = dist.get_rank(), dist.get_world_size()
        if (rank, size) != there:
            raise WeftError(
                f"rank {there[0]}: torch.distributed is initialised already, with rank {there[0]} "
                f"of {there[1]}, and rank {rank} of {size} was asked for: pass the same"
            )
        return init(backend)
    changed = {"RANK": str(rank), "WORLD_SIZE": str(size), **dict.fromkeys(_LOCAL)}
    with _environment(changed):
        wire = init(backend, rendezvous=rendezvous)
    meeting.complete()
    return wire


def tcp(host: str, port: int) -> str:
    """The `rendezvous=` of a host and a port of rank 0's.

    Where those are the environment's own it is that: torchrun may serve a store there already.

    Example:
        >>> tcp("fd00::7", 29500)
        'tcp://[fd00::7]:29500'
    """
    own = os.environ.get("MASTER_ADDR", "").strip("[]"), os.environ.get("MASTER_PORT")
    if own == (host, str(port)):
        return "env://"
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def publish(rank: int, path: str) -> Published:
    """Rank 0 leaves a file that says where it is; the others wait for it, at most 300 s.

    The file is as for `weft.init(rendezvous="file://...")`: one that another run has left is not
    believed, and rank 0 takes it away at the end of `start`, when all have come.

    Args:
        rank: this one's; -1 for another than 0.
        path: of the file, or of a folder that it is to be in.

    Raises:
        WeftError: the file cannot be used, or is somebody else's.
        WireError: it did not come in time.
    """
    found = os.path.abspath(path)
    url = f"file://{quote(found)}"
    launch = Launch("environment", rank, 0, rank, 0)
    place = meeting.place(launch, url)
    assert isinstance(place, meeting.File)  # the scheme says so
    store = meeting.before(place, launch, time.monotonic() + _TIMEOUT)
    assert isinstance(store, dist.TCPStore)
    return store.host, store.port, url


@contextlib.contextmanager
def _environment(changed: Mapping[str, str | None]) -> Iterator[None]:
    """Have variables set, or none of that name, in this block."""
    saved = {name: os.environ.get(name) for name in changed}
    _change(changed)
    try:
        yield
    finally:
        _change(saved)


def _change(changed: Mapping[str, str | None]) -> None:
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
