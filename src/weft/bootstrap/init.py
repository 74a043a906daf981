"""`weft.init` and `weft.shutdown`: from a started process to the default wire, and back.

One process has one default group of torch.distributed, and weft's default wire is that group's.
If the program has set one up, weft adopts it and leaves it as it was; else weft sets it up.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import kernels
from ..errors import WeftError, WireError
from ..wire import default
from ..wire.base import Wire
from . import launchers, mpi

__all__ = ["init", "shutdown"]

_TIMEOUT = 300.0  # seconds, of a group that weft starts
_log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """What `init` started and `shutdown` ends."""

    wire: Wire
    group: dist.ProcessGroup
    made: bool  # the group is weft's own
    url: str | None  # where its ranks met, if weft knows
    process: int


_running: _Running | None = None
_generation = 0  # how many groups this process has started
_store: dist.Store | None = None  # of the last one; see _meet


def init(
    backend: str | None = None, *, rendezvous: str | None = None, timeout: float | None = None
) -> Wire:
    """Start weft in this process, and return the wire between all ranks, the default one.

    Collective: every rank calls it. Kernels are compiled before anybody waits for anybody.
    torch.distributed works afterwards, whoever set it up: if the program had its default group,
    weft adopts that, and leaves it alone at the end; else weft sets it up, under torchrun (or
    whatever sets the same variables) for its ranks, without a launcher for this process alone,
    which uses no network. As a context manager, it shuts down at the end of the block.

    Args:
        backend: "gloo"; "weft", which is gloo with sparse and uneven collectives served by weft;
            "nccl" for a default group whose CUDA tensors go over NCCL and whose CPU tensors go
            over gloo; or "mpi", under mpirun, for torch.distributed and weft over MPI (needs
            `pip install weft[mpi]`). None: gloo, or what there is. But for MPI, weft's own
            traffic goes over sockets of its own.
        rendezvous: where the ranks meet, as `init_method` of torch.distributed: "env://",
            "tcp://host:port" or "file:///path", with rank and size from the environment.
            None: "env://".
        timeout: seconds that any wait may last. None: the adopted group's own, else 300.

    Raises:
        WeftError: the environment is incomplete, the backend is not there, or weft is
            already running with other arguments. Nothing was sent.
        WireError: not all ranks came within `timeout`.

    Example:
        >>> import weft
        >>> with weft.init() as wire:
        ...     wire.rank, wire.size
        (0, 1)
    """
    global _running
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise WeftError(f"timeout is {timeout}: pass a number of seconds above 0, or None")
    spec = _backend_spec(backend)
    if _running is not None:
        if dist.is_initialized() and dist.group.WORLD is _running.group:
            _check_same(_running.wire, _running.url, backend, rendezvous, timeout)
            return _running.wire
        shutdown()  # the program has destroyed that group: what is left of it is of no use
    if dist.is_initialized():
        made, url = False, None
        _check_backend(backend)
        if rendezvous is not None:
            raise WeftError(
                f"rendezvous={rendezvous!r} was asked for, but torch.distributed is initialised "
                "already: leave rendezvous= out to use that group"
            )
        kernels.warm()
    elif backend == "mpi":
        made, url = True, None
        _refuse_rendezvous(rendezvous)
        kernels.warm()
        mpi.start_group(_TIMEOUT if timeout is None else timeout)
    else:
        made, launch = True, launchers.detect()
        url = _where(launch, rendezvous)
        kernels.warm()
        _start_group(launch, spec, url, _TIMEOUT if timeout is None else timeout)
    group = dist.group.WORLD
    assert group is not None  # it was there, or was started
    try:
        from ..wire import process_group  # here: `import weft` shall be quick

        wire = process_group.of_group(None, timeout=timeout)
        _check_same(wire, url, None, None, timeout)
    except BaseException:
        if made:
            dist.destroy_process_group()
        raise
    wire.leave = shutdown
    default.set(wire)
    _running = _Running(wire, group, made, url, os.getpid())
    _log.info("rank %d of %d is ready", wire.rank, wire.size)
    return wire


def shutdown() -> None:
    """End what `init` started: the wire, its threads and sockets, and the group if weft made it.

    The others learn that this rank leaves; it waits for nobody. Without a running weft it does
    nothing. It is called at exit by itself.
    """
    global _running
    running, _running = _running, None
    if running is None or running.process != os.getpid():
        return  # a forked child must not say goodbye in its parent's name
    default.clear("weft.shutdown() was called; call weft.init() again")
    running.wire.leave = None
    running.wire.close()
    if running.made and dist.is_initialized() and dist.group.WORLD is running.group:
        dist.destroy_process_group()


@atexit.register
def _leave() -> None:
    global _store
    shutdown()
    _store = None


def _check_same(
    wire: Wire,
    url: str | None,
    backend: str | None,
    rendezvous: str | None,
    timeout: float | None,
) -> None:
    """Refuse to be asked for something else than there is."""
    _check_backend(backend)
    for name, asked, there in (("rendezvous", rendezvous, url), ("timeout", timeout, wire.timeout)):
        if asked is not None and asked != there:
            raise WeftError(
                f"weft is running already, with {name}={there!r}, and cannot change to "
                f"{asked!r}: call weft.shutdown() first"
            )


def _backend_spec(backend: str | None) -> str:
    """What torch.distributed calls it."""
    if backend in (None, "gloo"):
        return "gloo"
    if backend in ("weft", "mpi"):  # the latter's group is started by `mpi.start_group`
        return "cpu:weft"
    if backend != "nccl":
        raise WeftError(
            f"backend {backend!r} is unknown: use gloo, weft, mpi, or nccl on machines with GPUs"
        )
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeftError(
            "backend 'nccl' needs a GPU and a CUDA build of torch, and there is "
            f"{'no GPU' if dist.is_nccl_available() else f'torch {torch.__version__}'}: "
            "use gloo, or install torch as pytorch.org says for your CUDA"
        )
    return "cpu:gloo,cuda:nccl"


def _check_backend(backend: str | None) -> None:
    there = dist.get_backend_config()
    if backend is not None and backend not in there:
        raise WeftError(
            f"backend={backend!r} was asked for, but torch.distributed is initialised already "
            f"with {there}: leave backend= out to use that"
        )


def _refuse_rendezvous(rendezvous: str | None) -> None:
    if rendezvous is not None:
        raise WeftError(
            f"rendezvous={rendezvous!r} was asked for, but under MPI the ranks meet through "
            "mpirun: leave rendezvous= out"
        )


def _where(launch: launchers.Launch, rendezvous: str | None) -> str | None:
    """The URL where the ranks meet, or None if there is nobody to meet."""
    if rendezvous is not None and not rendezvous.startswith(("env://", "tcp://", "file://")):
        raise WeftError(
            f"rendezvous {rendezvous!r} is none of env://, tcp://host:port and file:///path"
        )
    if launch.kind == "alone":
        if rendezvous is not None:
            raise WeftError(
                f"rendezvous={rendezvous!r} needs RANK and WORLD_SIZE in the environment: set "
                "them, or start with torchrun"
            )
        return None
    url = rendezvous or "env://"
    if url.startswith("env://"):
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise WeftError(
                f"rank {launch.rank}: the environment has RANK and WORLD_SIZE but no "
                f"{' and no '.join(missing)}: start with torchrun, or set it, or pass "
                "rendezvous='tcp://host:port'"
            )
    return url


def _start_group(launch: launchers.Launch, spec: str, url: str | None, timeout: float) -> None:
    """Set up the default group of torch.distributed."""
    global _generation
    _generation += 1
    limit = timedelta(seconds=timeout)
    if url is None:
        with _loopback_only():
            dist.init_process_group(
                spec, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
            )
        return
    try:
        dist.init_process_group(
            spec,
            store=_meet(launch, url, limit),
            rank=launch.rank,
            world_size=launch.size,
            timeout=limit,
        )
    except (RuntimeError, OSError) as error:  # torch's store and gloo errors are RuntimeErrors
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WireError(
            f"rank {launch.rank}: the {launch.size} ranks did not meet at "
            f"{at if url == 'env://' else url} within {timeout:g} s: are all of them started, "
            f"and is that address reachable? ({str(error).splitlines()[0]})",
            rank=launch.rank,
        ) from error


def _meet(launch: launchers.Launch, url: str, limit: timedelta) -> dist.Store:
    """The store of all ranks, under a prefix that no earlier group of theirs has used.

    The store itself is kept until the process ends: rank 0 may be the one that hosts it, and when
    it starts its next group the others may be connecting already.
    """
    global _store
    _store, _, _ = next(iter(dist.rendezvous(url, launch.rank, launch.size, timeout=limit)))
    return dist.PrefixStore(f"weft/group{_generation}", _store)


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Make a gloo group of one listen where nobody else can reach it (it always listens)."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if "GLOO_SOCKET_IFNAME" in os.environ or not names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
