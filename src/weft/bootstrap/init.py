"""`weft.init` and `weft.shutdown`: from a started process to the default wire, and back.

One process has one default group of torch.distributed, and weft's default wire is that group's.
If the program has set one up, weft adopts it and leaves it as it was; else weft sets it up.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from .. import kernels
from ..errors import Error, WeftError, WireError
from ..wire import default
from ..wire.base import Wire, is_duration
from ..wire.failure import last_error
from ..wire.interface import interface_of, own_address
from . import backends, launchers, meeting, roll

__all__ = ["init", "shutdown"]

_TIMEOUT = 300.0  # seconds, of a group that weft starts
_TELL = 3.0  # seconds in which a process that cannot take part tries to tell the others
_LATE = 0.5  # seconds after the timeout in which others may find it over by themselves
_AWAITED = re.compile(
    r"^wait timeout after \d+ms, keys: \S*/(\d+)$"
)  # gloo's, for a rank's address
_log = logging.getLogger("weft")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """What `init` started and `shutdown` ends."""

    wire: Wire
    group: dist.ProcessGroup
    made: bool  # the group is weft's own
    url: str | None  # where its ranks met, if weft knows
    process: int


_running: _Running | None = None
_GLOO = "GLOO_SOCKET_IFNAME"
_named: list[tuple[str, str | None]] = []  # the interface that weft named to gloo; what was there


def init(
    backend: str | None = None,
    *,
    rendezvous: str | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> Wire:
    """Start weft in this process, and return the wire between all ranks, the default one.

    Collective: every rank calls it. Kernels are compiled before anybody waits for anybody; if an
    earlier process has done that, they are loaded while your program goes on.
    torch.distributed works afterwards, whoever set it up: if the program had its default group,
    weft adopts that, and leaves it alone at the end; else weft sets it up, under torchrun (or
    whatever sets the same variables), mpirun or srun for its ranks, without a launcher for this
    process alone, which uses no network. As a context manager, it shuts down at the end of the
    block. Who launched it, where the ranks met and over which network interface is logged.

    Args:
        backend: "gloo"; "weft", whose collectives are weft's, sparse and uneven ones too;
            "nccl" or "xccl" for a default group whose GPU tensors go over that and whose CPU
            tensors go over gloo; "ccl" or "ucc"; or "mpi", under mpirun, for torch.distributed
            and weft over MPI (needs `pip install weft[mpi]`). None: nccl or xccl if every rank
            has such a GPU, else gloo; or what there is. But for MPI, weft's own traffic goes over
            sockets of its own.
        rendezvous: where the ranks meet, with rank and size from the environment: "env://" (at
            MASTER_ADDR and MASTER_PORT), "tcp://host:port" on the host of rank 0, or
            "file:///path" of a file or folder that all see. None: "env://", and where the
            environment has no such place, one that follows from the launcher.
        timeout: seconds that any wait may last. None: the adopted group's own, else 300.
        transport: what weft's traffic goes over. None: what is best, unless WEFT_TRANSPORT says
            otherwise. "torch": a gloo group of its own, for all of it: slow, and plain.

    Raises:
        WeftError: the environment is incomplete, the backend is not there, or the processes do
            not fit together (a rank given twice, world sizes or versions that differ): the same
            on every rank that comes. Or weft is already running with other arguments.
        WireError: not all ranks came within `timeout`; it names who is missing.

    Example:
        >>> import weft
        >>> with weft.init() as wire:
        ...     wire.rank, wire.size
        (0, 1)
    """
    global _running
    if timeout is not None and not is_duration(timeout):
        raise WeftError(f"timeout is {timeout!r}: pass a number of seconds above 0, or None")
    if _running is not None:
        if dist.is_initialized() and dist.group.WORLD is _running.group:
            _check_same(_running.wire, _running.url, backend, rendezvous, timeout, transport)
            return _running.wire
        shutdown()  # the program has destroyed that group: what is left of it is of no use
    from ..wire import process_group  # here: `import weft` shall be quick

    if dist.is_initialized():
        made, url = False, None
        _check_backend(backend)
        process_group.chosen(transport)
        if rendezvous is not None:
            raise WeftError(
                f"rendezvous={rendezvous!r} was asked for, but torch.distributed is initialised "
                "already: leave rendezvous= out to use that group"
            )
        load = kernels.prepare()
        _agree_on_versions(timeout)
    else:
        made, url = True, None
        limit = _TIMEOUT if timeout is None else timeout
        try:
            launch = launchers.detect()
            place = meeting.place(launch, rendezvous)
        except WeftError as error:
            raise _told(error, rendezvous) from error
        try:
            process_group.chosen(transport)
            if backend is not None:
                backends.spec(backend)
        except WeftError as error:
            if place is None:
                raise
            raise _refused(error, launch, place, backend, limit) from error
        load = kernels.prepare()
        if place is None:
            _alone(backends.spec(backend or backends.best([backends.able()])), limit)
        else:
            url = rendezvous or "env://"
            _together(launch, place, backend, limit)
    group = dist.group.WORLD
    assert group is not None  # it was there, or was started
    try:
        process_group.choose(transport)
        wire = process_group.of_group(None, timeout=timeout)
        _check_same(wire, url, None, None, timeout, None)
    except BaseException:
        process_group.choose(None)
        if made:
            dist.destroy_process_group()
            _unname_interface()
        raise
    load()  # only now, since it would slow the meeting down
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
    _unname_interface()
    from ..wire import process_group  # here: `import weft` shall be quick

    process_group.choose(None)
    running.wire.leave = None
    running.wire.close()
    if running.made and dist.is_initialized() and dist.group.WORLD is running.group:
        dist.destroy_process_group()


@atexit.register
def _leave() -> None:
    last_error.note_uncaught()
    shutdown()
    meeting.forget()


def _check_same(
    wire: Wire,
    url: str | None,
    backend: str | None,
    rendezvous: str | None,
    timeout: float | None,
    transport: str | None,
) -> None:
    """Refuse to be asked for something else than there is."""
    from ..wire import process_group  # here: `import weft` shall be quick

    _check_backend(backend)
    for name, asked, there in (
        ("rendezvous", rendezvous, url),
        ("timeout", timeout, wire.timeout),
        ("transport", transport, process_group.chosen().name),
    ):
        if asked is not None and asked != there:
            raise WeftError(
                f"weft is running already, with {name}={there!r}, and cannot change to "
                f"{asked!r}: call weft.shutdown() first"
            )


def _check_backend(backend: str | None) -> None:
    there = dist.get_backend_config()
    if backend is not None and not backends.is_in(backend, there):
        raise WeftError(
            f"backend={backend!r} was asked for, but torch.distributed is initialised already "
            f"with {there}: leave backend= out to use that"
        )


def _alone(spec: str, timeout: float) -> None:
    """Set up the default group of one process, which meets nobody."""
    with _loopback_only():
        dist.init_process_group(
            spec, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout)
        )


def _together(
    launch: launchers.Launch,
    place: meeting.Place,
    backend: str | None,
    timeout: float,
    error: str = "",
) -> None:
    """Meet the other ranks, see that all fit together, and set up the default group.

    With an error of this rank's all of them raise that instead.
    """
    deadline = time.monotonic() + timeout
    met = False
    try:
        with meeting.at(place, launch, deadline) as (there, times):
            decision, space = roll.call(
                dist.PrefixStore(_space(times), there.store),
                _entry(launch, backend, there.store, error),
                max(deadline - time.monotonic(), 0.001),
                where=place.where,
                hosts=there.hosts,
                elastic=_is_elastic(),
            )
        met = True
        _log.info(
            "rank %d of %d met the others at %s; backend %s",
            launch.rank,
            launch.size,
            place.where,
            decision.backend,
        )
        _name_interface(there.store)
        dist.init_process_group(
            backends.spec(decision.backend),
            store=dist.PrefixStore("group", space),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, OSError) as failed:  # torch's store and gloo errors are RuntimeErrors
        if isinstance(failed, WireError):
            raise
        said = str(failed).splitlines()[0]
        late = _AWAITED.search(said) if met else None
        who = f"rank {late[1]}" if late else "some ranks"
        why = (
            f"all {launch.size} ranks came to {place.where}, and then {who} did not connect: is it "
            "stopped, did it end, or does a firewall close the ports that the system chooses?"
            if met
            else f"the {launch.size} ranks did not meet at {place.where} within {timeout:g} s: are "
            "all of them started, and is that address reachable?"
        )
        if met and there.hosts:
            time.sleep(_LATE)  # the others wait for the same at a store that ends with this process
        raise WireError(
            f"rank {launch.rank}: {why} ({said})",
            rank=launch.rank,
            culprit=int(late[1]) if late else None,
        ) from failed


def _refused(
    error: WeftError,
    launch: launchers.Launch,
    place: meeting.Place,
    backend: str | None,
    timeout: float,
) -> WeftError:
    """Come to the meeting only to say why this rank cannot take part: else the others wait.

    Returns:
        What all raise; the error itself if nobody came.
    """
    _log.warning("rank %d: %s", launch.rank, error)  # now: the others may be long in coming
    try:
        _together(launch, place, backend, timeout, str(error))
    except WeftError as agreed:
        return agreed
    except WireError:  # they did not come: only this rank raises
        pass
    return error


def _space(times: int) -> str:
    """Where in the store this process's group of that number has its keys.

    torchrun's store outlives its workers, and what it tells them of restarts differs between
    hosts: one that starts its workers again since another's failed does not count that. So the
    roll call finds out which round this is (`roll.call`).
    """
    return f"weft/group{times}"


def _agree_on_versions(timeout: float | None) -> None:
    """The roll call of a group that is there already: what differs is told before it hurts."""
    group = dist.group.WORLD
    assert group is not None  # it is adopted
    from ..wire import process_group  # here: `import weft` shall be quick

    store = process_group.store_of(group)
    rank, size = group.rank(), group.size()
    if store is None or size == 1:  # MPI's groups have none
        return
    times = store.add(f"weft/adopted/{rank}", 1)
    try:
        roll.call(
            dist.PrefixStore(f"weft/adopted/roll{times}", store),
            _entry(launchers.Launch("adopted", rank, size, rank, size), None, store),
            _TIMEOUT if timeout is None else timeout,
            where="the group's store",
            hosts=False,
        )
    except RuntimeError as error:  # torch's store errors are
        raise WireError(
            f"rank {rank}: the store of the default group failed: {str(error).splitlines()[0]}",
            rank=rank,
        ) from error


def _is_elastic() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _entry(
    launch: launchers.Launch, backend: str | None, store: dist.Store, error: str = ""
) -> roll.Entry:
    """What this rank says at the roll call; if it cannot take part, why."""
    try:
        address = own_address(store)
    except OSError as wrong:
        address, error = "", error or str(wrong)
    return roll.Entry.mine(launch.rank, launch.size, backend=backend, address=address, error=error)


def _told(error: WeftError, rendezvous: str | None) -> WeftError:
    """Let the others know, if they wait somewhere or come soon, that this process cannot come.

    It may be rank 0, without which they have no place: so where it can, it opens that.

    Returns:
        What all raise; the error itself if nobody was there.
    """
    unknown = launchers.Launch("environment", -1, 0, 0, 0)
    with contextlib.suppress(Error, RuntimeError, OSError):  # they are not there: only this raises
        place = meeting.place(unknown, rendezvous)
        if place is None or isinstance(place, meeting.Mpi | meeting.Ports):
            return error
        _log.warning("%s", error)  # now: the others may be long in coming
        if meeting.can_host(place):
            unknown = dataclasses.replace(unknown, rank=0)
        deadline = time.monotonic() + _TELL
        with meeting.at(place, unknown, deadline) as (there, times):
            try:
                roll.call(
                    dist.PrefixStore(_space(times), there.store),
                    roll.Entry.mine(-1, 0, error=str(error)),
                    _TELL,
                    where=place.where,
                    hosts=there.hosts,
                    elastic=_is_elastic(),
                )
            except WeftError as agreed:
                return agreed
    return error


def _name_interface(store: dist.Store) -> None:
    """Let gloo listen where weft does: by itself it takes what the host's name means.

    What gloo understands itself, a list of names, is left to it.
    """
    name, there = interface_of(own_address(store)), os.environ.get(_GLOO)
    names = {each for _, each in socket.if_nameindex()}
    if name is None or (there is not None and names.issuperset(there.split(","))):
        return
    os.environ[_GLOO] = name
    _named.append((name, there))
    _log.info("network interface %s", name)


def _unname_interface() -> None:
    while _named:
        name, before = _named.pop()
        if os.environ.get(_GLOO) == name:
            if before is None:
                del os.environ[_GLOO]
            else:
                os.environ[_GLOO] = before


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
