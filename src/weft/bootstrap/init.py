"""`weft.init` and `weft.shutdown`: from a started process to the default group, and back.

One process has one default group of torch.distributed, and weft's default group is that one's.
If the program has set one up, weft adopts it and leaves it as it was; else weft sets it up.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from .. import kernels
from ..base import watch as slow
from ..base._torch import keep
from ..base.arguments import LONGEST, in_words, is_a, is_duration, shown, wrong_timeout
from ..base.errors import WeftError, WireError, entry
from ..failure import last_error
from ..group import default, process_group
from ..group.group import Group
from ..rendezvous import launchers, mpi, places
from ..rendezvous.address import gloo_interfaces, named_for_gloo
from ..rendezvous.store import HELD_UP
from ..sparse import registry
from . import backends, descent, gathering, membership
from .config import Config, unknown_variables
from .config import config as in_force

TIMEOUT = 300.0  # seconds, of a group that weft starts
TELL = 3.0  # seconds in which a process that cannot take part tries to tell the others
_log = logging.getLogger("weft")

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Running(NamedTuple):
    """What `init` started and `shutdown` ends."""

    group: Group
    process_group: dist.ProcessGroup
    made: bool  # the group is weft's own
    hook: _Hook  # of uncaught errors, before it was made
    url: str | None  # where its ranks met, if weft knows


class _Asked(NamedTuple):
    """The arguments of `init`; None: the program leaves it to weft."""

    backend: str | None = None
    rendezvous: str | None = None
    timeout: float | None = None
    wire: str | None = None
    watch: float | None = None

    @property
    def limit(self) -> float:
        """Seconds that a wait may last, in a group that weft starts; 300 if they are wrong."""
        return self.timeout if is_duration(self.timeout) else TIMEOUT


_running: _Running | None = None
starting = threading.RLock()  # one thread starts at a time; a signal's handler may, in its midst


@entry
def init(
    backend: str | None = None,
    *,
    rendezvous: str | None = None,
    timeout: float | None = None,
    wire: str | None = None,
    watch: float | None = None,
) -> Group:
    """Start weft in this process, and return the default group, of all ranks.

    Collective: every rank calls it. Each rank compiles or loads the kernels before it waits for
    others. If the program has torch.distributed's default group, weft uses that group, and does not
    end it. Else weft sets up the default group: under torchrun (or a launcher with the same
    variables), mpirun or srun for all ranks; without a launcher for this process alone, which uses
    no network. As a context manager it shuts down at the end of the block. It logs the launcher,
    the place where the ranks met, and the network interface.

    Args:
        backend: the backend of torch.distributed: "gloo"; "weft", whose collectives are weft's;
            "nccl" or "xccl", where CPU tensors go over gloo; "ccl" or "ucc"; or "mpi", for ranks
            that mpirun starts: gloo, where an mpirun that weft does not know has mpi4py say rank
            and size. None: the backend of the group that weft uses, else nccl or xccl if every rank
            has such a GPU, else gloo. weft's own traffic goes over its own sockets.
        rendezvous: where the ranks meet; rank and size come from the environment. "env://" (at
            MASTER_ADDR and MASTER_PORT), "tcp://host:port" on the host of rank 0, or
            "file:///path" of a file or folder that all ranks see. None: "env://", and if the
            environment names no place, one that follows from the launcher.
        timeout: the longest wait, in seconds; more than two weeks are two weeks. None: that of the
            group that weft uses, else 300.
        wire: what CPU tensors go over, the same on every rank. "tcp", or None: weft's own sockets,
            and shared memory between ranks of one host. "group": the process group, as tensors of
            accelerators do. None: the value of WEFT_WIRE, else "tcp".
        watch: seconds after which a waiting rank prints a line on standard error, once for each
            wait, also at start-up: what it awaits, which rank is late, and where that rank's
            program is. None: the value of WEFT_WATCH, else never.

    Raises:
        WeftError: the environment is incomplete, the backend is missing, or the processes do not
            fit together (a rank given twice, different world sizes or versions): the same text on
            every rank that comes. Or weft is already running with other arguments.
        WireError: not all ranks came within `timeout`; it names the missing ranks.

    Example:
        >>> import weft
        >>> with weft.init() as group:
        ...     group.rank, group.size
        (0, 1)
    """
    return _start(_Asked(backend, rendezvous, timeout, wire, watch), os.environ)


def init_as(rank: int, size: int, backend: str, host: str, port: int) -> Group:
    """`init` with this rank and size, instead of those of the environment; collective.

    For libraries whose programs pass these themselves. If torch.distributed is initialised
    already, weft uses its default group, and ignores host and port.

    Raises:
        WeftError: as `init`; or torch.distributed is initialised with another rank or size.
        WireError: as `init`.
    """
    if (world := dist.group.WORLD) is not None:
        process_group.store_of(world)  # raises in a forked child
        there = dist.get_rank(), dist.get_world_size()
        if (rank, size) != there:
            raise WeftError(
                f"rank {there[0]}: torch.distributed is initialised already, with rank {there[0]} "
                f"of {there[1]}, and rank {rank} of {size} was asked for: pass the same"
            )
        return init(backend)
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # a launcher's, which may not fit
        env.pop(name, None)
    # where the place is the environment's own, torchrun may serve a store there already
    own = (env.get("MASTER_ADDR", "").strip("[]"), env.get("MASTER_PORT")) == (host, str(port))
    url = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    return _start(_Asked(backend, "env://" if own else url), env)


def _after_fork() -> None:
    """Let go of the parent's group, to whose ranks only it says goodbye, and of a lock that a
    thread may hold which is not here."""
    global _running, starting
    keep(_running)
    _running = None
    starting = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def config() -> Config:
    """Say what is in force in this process, and where each value comes from; it sends nothing.

    Versions, the launcher, the group, the wire, the kernels (which are loaded for it), the
    address where this rank listens, and what the variables of the environment set: `WEFT_...` that
    weft does not know are there, too.

    Returns:
        A `Config`, which prints as a table.

    Example:
        >>> import weft
        >>> with weft.init("weft", timeout=60):
        ...     found = weft.config()
        >>> found["group"], found["algorithm"]
        ('rank 0 of 1, timeout 60 s, backend cpu:weft', 'auto')
    """
    return in_force(None if _running is None else _running.group)


def shutdown() -> None:
    """End what `init` started: the group, its threads and sockets, and torch's if weft made it.

    It tells the other ranks that this rank leaves, and waits for none of them: an asynchronous call
    that is under way raises a WireError. If weft is not running it does nothing. It runs by itself
    when the process exits.
    """
    global _running
    running, _running = _running, None
    if running is None:
        return
    default.clear("weft.shutdown() was called; call weft.init() again")
    slow.choose(None)
    process_group.choose_wire(None)
    running.group.end_with(None)
    running.group.close()
    if running.made:
        if dist.is_initialized() and dist.group.WORLD is running.process_group:
            dist.destroy_process_group()
        if sys.exception() is None:  # one on its way out of `with weft.init()` is told by its rank
            _put_back(running.hook)


@atexit.register
def leave() -> None:
    """What is done at exit; for processes that end without that."""
    last_error.note_uncaught()
    shutdown()
    places.forget()


def _start(asked: _Asked, env: Mapping[str, str]) -> Group:
    """`init`, with rank and size from this environment.

    Threads that call it at once get what the first of them has started.
    """
    with starting:
        return _started(asked, env)


def _started(asked: _Asked, env: Mapping[str, str]) -> Group:
    """The group that runs, or else is started."""
    global _running
    if is_duration(asked.timeout):
        asked = asked._replace(timeout=min(asked.timeout, LONGEST))
    if _running is not None:
        if dist.is_initialized() and dist.group.WORLD is _running.process_group:
            _check_same(_running.group, _running.url, asked)
            default.set(_running.group)  # another thread may have started it, for itself alone
            return _running.group
        shutdown()  # the program destroyed the group: what is left of it is of no use
    made = not dist.is_initialized()
    hook = sys.excepthook
    url = asked.rendezvous
    group: Group | None = None
    try:
        slow.choose(asked.watch)
        process_group.choose_wire(asked.wire)
        if made:
            url = _set_up(asked, env)
        else:
            kernels.prepare()
            _adopt(asked)
            _leave_mark(asked, env)
        world = dist.group.WORLD
        assert world is not None  # it was there, or was started
        group = process_group.of_group(None, timeout=asked.timeout)
        if asked.timeout is not None:  # an adopted one may have been used before, with another
            group.set_timeout(asked.timeout)
        group.end_with(shutdown)
        default.set(group)
        _running = _Running(group, world, made, hook, url)
        _log.info("rank %d of %d is ready", group.rank, group.size)
        return group
    except BaseException:  # Ctrl-C, too
        _running = None
        slow.choose(None)
        process_group.choose_wire(None)
        descent.take_mark_back()
        if group is not None:
            default.clear("call weft.init() first")
        if made:
            if group is not None:
                group.close()
            if dist.is_initialized():
                dist.destroy_process_group()
            _put_back(hook)
        raise


def _put_back(hook: _Hook) -> None:
    """Put back a hook around which torch has wrapped its own, for the default group."""
    if sys.excepthook.__module__ == dist.init_process_group.__module__:
        sys.excepthook = hook


def _leave_mark(asked: _Asked, env: Mapping[str, str]) -> None:
    """Mark this process as the rank that the environment says, of a group that is there already."""
    with contextlib.suppress(WeftError):  # a group that was set up without these variables
        launch = launchers.detect(env)
        place = places.place(launch, asked.rendezvous, env)
        if place is not None:
            descent.leave_mark(launch, place)


def _set_up(asked: _Asked, env: Mapping[str, str]) -> str | None:
    """Set up the default group; returns where its ranks met, None if this rank is alone."""
    launch = launchers.Launch("environment", -1, 0, 0, 0)  # until more is known
    refusal = ""
    try:
        launch = launchers.detect(env)
        if asked.backend == "mpi" and launch.kind == "alone":
            launch = mpi.launch()
        if not isinstance(asked.rendezvous, str | None):
            raise WeftError(f"rendezvous is {shown(asked.rendezvous)}: pass a URL as text, or None")
        place = places.place(launch, asked.rendezvous, env)
        refusal = descent.refusal(launch, place, env)
        if not refusal:
            _check_values(asked)
            _check_environment()
            if asked.backend is not None:
                backends.spec(asked.backend)
    except Exception as trouble:  # of a caller's object, too
        error = trouble if isinstance(trouble, WeftError) else WeftError(in_words(trouble))
        _tell(error, launch, asked, env)
        raise error from (trouble.__cause__ if trouble is error else trouble)
    if refusal:  # which is nothing to the others: they have the rank that has started this process
        raise WeftError(refusal)
    kernels.prepare()
    if place is None:
        _tell_alone(launch, env)
        backend = asked.backend or backends.able()[0]
        _alone(backends.spec(backend), asked.limit)
        return None
    _together(launch, place, asked)
    descent.leave_mark(launch, place)
    return asked.rendezvous or "env://"


def _check_same(group: Group, url: str | None, asked: _Asked) -> None:
    """Raise WeftError if the program asks for something else than what runs already."""
    _check_backend(asked.backend)
    _check_values(asked)
    there = {
        "rendezvous": url,
        "timeout": group.timeout,
        "wire": process_group.WIRES[group.session.is_by_group],
        "watch": slow.chosen(),
    }
    for name, found in there.items():
        wanted = getattr(asked, name)
        if wanted is not None and wanted != found:
            raise WeftError(
                f"weft is running already, with {name}={found!r}, and cannot change to "
                f"{wanted!r}: call weft.shutdown() first"
            )


def _check_environment() -> None:
    """Raise WeftError for a value of a variable that means nothing; log which are unknown."""
    if said := os.environ.get("WEFT_SAFE"):
        raise WeftError(
            f"WEFT_SAFE={said} is gone: unset it; WEFT_KERNELS=reference computes without machine "
            "code"
        )
    _check_wire(os.environ.get("WEFT_WIRE") or None, "WEFT_WIRE")
    slow.chosen()
    if (said := os.environ.get("WEFT_KERNELS", "")) not in ("", "reference"):
        raise WeftError(f"WEFT_KERNELS={said!r} means nothing: set it to reference, or unset it")
    registry.asked_for("auto")
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a host speaks for all
        for name, meant in unknown_variables(os.environ).items():
            hint = f"{meant} was meant?" if meant else "weft.config() lists those that it reads"
            _log.warning("weft reads no variable %s: %s", name, hint)


def _check_values(asked: _Asked) -> None:
    """Raise WeftError for a timeout or a wire that means nothing."""
    if asked.timeout is not None and (error := wrong_timeout(asked.timeout)):
        raise WeftError(f"{error}, or None")
    _check_wire(asked.wire)


def _check_wire(wire: str | None, name: str = "wire") -> None:
    if wire is not None and not (is_a(wire, str) and wire in process_group.WIRES):
        raise WeftError(
            f"{name} is {shown(wire)}: leave it out, or say 'tcp' (weft's own), or 'group': then "
            "the process group carries tensors of the CPU, too"
        )


def _check_backend(backend: str | None) -> None:
    there = dist.get_backend_config()
    if backend is not None and not backends.is_in(backend, there):
        raise WeftError(
            f"backend={backend!r} was asked for, but torch.distributed is initialised already "
            f"with {there}: leave backend= out to use that"
        )


def _tell_alone(launch: launchers.Launch, env: Mapping[str, str]) -> None:
    """Log that this is a group of one; as a warning, if the environment means more ranks."""
    several = [name for name in ("SLURM_NTASKS", "SLURM_NNODES") if env.get(name, "1") != "1"]
    meant = several + [name for name in launchers.UNREAD if env.get(name)]
    if launch.kind != "alone":  # a launcher that is known has said that it is one
        meant = []
    _log.log(
        logging.WARNING if meant else logging.INFO,
        "a group of one%s; for more ranks start the program with torchrun --nproc-per-node N, "
        "mpirun or srun, or set RANK and WORLD_SIZE",
        f", though the environment has {meant[0]}={env[meant[0]]}" if meant else "",
    )


def _alone(spec: str, timeout: float) -> None:
    """Set up the default group of one process, which meets nobody."""
    loopbacks = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    # gloo always listens: here, where nobody else can reach it
    interfaces = named_for_gloo() or loopbacks[:1]
    gathering.init_group(spec, dist.HashStore(), 0, 1, timeout, interfaces)


def _together(launch: launchers.Launch, place: places.Place, asked: _Asked) -> None:
    """Meet the other ranks, check that all fit together, and set up the default group."""
    timeout = asked.limit
    deadline = time.monotonic() + timeout
    met = False
    try:
        meeting, decision, space = membership.meet(place, launch, asked.backend, deadline)
        met = True
        _log.info(
            "rank %d of %d met the others at %s; backend %s",
            launch.rank,
            launch.size,
            place.where,
            decision.backend,
        )
        space.set_timeout(timedelta(seconds=timeout))
        interfaces = gloo_interfaces(meeting.store)
        _log.info("network interface %s", ", ".join(interfaces) or "unknown")
        spec = backends.spec(decision.backend)
        connected = gathering.connect_all(
            space, launch.rank, launch.size, spec, timeout, deadline, interfaces
        )
        ago = time.monotonic() - connected
        if ago > timeout + HELD_UP:  # no other rank waits for as long
            raise TimeoutError(f"it was connected to them {ago:.0f} s ago")
    except (RuntimeError, OSError) as failed:  # torch's store and gloo errors are RuntimeErrors
        if isinstance(failed, WireError):
            raise
        raise gathering.lost(failed, launch, place, deadline, met=met) from failed


def _tell(
    error: WeftError, launch: launchers.Launch, asked: _Asked, env: Mapping[str, str]
) -> None:
    """Meet the others only to tell them why this rank cannot take part: else they would wait.

    A process that does not know its rank may be rank 0, which hosts the meeting. So such a process
    hosts it where it can.

    Raises:
        WeftError: what all ranks raise, if anybody was there.
    """
    rendezvous = asked.rendezvous if isinstance(asked.rendezvous, str) else None
    try:
        place = places.place(launch, rendezvous, env)
    except WeftError:
        return
    if place is None or (launch.rank < 0 and isinstance(place, places.Mpi)):
        return
    _log.warning("%s", error)  # now: the others may be long in coming
    slow.choose(math.inf)  # what was asked for may be the error
    until = time.monotonic() + (TELL if launch.rank < 0 else asked.limit)
    with contextlib.suppress(WireError, RuntimeError, OSError):  # then only this rank raises
        membership.meet(place, launch, None, until, str(error))


def _adopt(asked: _Asked) -> None:
    """Check with all ranks that weft can use the default group, which the program has set up."""
    world, error = dist.group.WORLD, ""
    assert world is not None
    store = process_group.store_of(world)
    rank, size = world.rank(), world.size()
    try:
        _check_backend(asked.backend)
        if asked.rendezvous is not None:
            raise WeftError(
                f"rendezvous={shown(asked.rendezvous)} was asked for, but torch.distributed is "
                "initialised already: leave rendezvous= out to use that group"
            )
        _check_values(asked)
        _check_environment()
    except Exception as wrong:  # of a caller's object, too
        error = str(wrong) if isinstance(wrong, WeftError) else in_words(wrong)
        if store is None or size == 1:
            if isinstance(wrong, WeftError):
                raise
            raise WeftError(error) from wrong
        slow.choose(math.inf)  # what was asked for may be the error
    if store is None or size == 1:  # MPI's groups have none
        return
    meeting = places.Rendezvous(
        dist.PrefixStore("weft/adopted", store),
        "the group's store",
        lasts=True,
        round=store.add(f"weft/adopted/{rank}", 1) - 1,
    )
    deadline = time.monotonic() + asked.limit
    try:
        membership.check(meeting, membership.Member.mine(rank, size, store, error=error), deadline)
    except RuntimeError as failed:  # torch's store errors are
        raise WireError(
            f"rank {rank}: the store of the default group failed: {str(failed).splitlines()[0]}",
            rank=rank,
        ) from failed
