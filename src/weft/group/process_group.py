"""Groups between processes: from a store, from a process group, from a device mesh.

weft's traffic never mixes with the caller's: a group has sockets of its own (wire "tcp") or a
process group of its own (wire "torch"), made from the store alone (never `new_group`, whose names
and order the caller would have to keep). To add a wire, register it (`registry`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..base import _torch, watch
from ..base.arguments import is_a
from ..base.errors import AbsentError, WeftError, WireError, there_are
from ..base.memory import Pool
from ..failure import last_error
from ..failure.control import HELD_UP, NotJoinedError, join_links
from ..failure.detector import Detector
from ..failure.verdict import SAME_ORDER
from ..records import recorder
from ..records.traffic import Traffic
from ..rendezvous.address import server_of
from ..rendezvous.machine import own_host
from ..rendezvous.store import AnsweringStore, SilentStoreError, has
from ..wire.factory import Factory, Start, make_wire, seconds_left
from ..wire.interface import Wire
from ..wire.registry import is_own, own_wire, wire_alone, wire_named, wire_names
from .group import Group, is_duration
from .session import LONGEST, Session

_wire_of_program: str | None = None  # what `weft.init(wire=)` said; None: nothing
_lock = threading.Lock()
_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


def choose(wire: str | None, slow: float | None = None) -> None:
    """Set the wire of groups that are made from now on, and `slow`, their seconds of a wait until a
    line about it is printed. None: the environment's."""
    global _wire_of_program
    _wire_of_program = wire
    watch.choose(slow)


def chosen() -> str:
    """The name of the wire that `choose` set, else WEFT_WIRE's, else WEFT_SAFE's.

    Raises:
        WeftError: there is no such wire, or WEFT_TRANSPORT is set, as it was called before.
    """
    name = _name()
    try:
        _factory_of(name)
    except WeftError as error:
        raise WeftError(f"{_me()}{error}") from error
    return name


def _name() -> str:
    safe = "torch" if os.environ.get("WEFT_SAFE") == "1" else "tcp"
    return _wire_of_program or os.environ.get("WEFT_WIRE") or safe


def _factory_of(name: str) -> Factory:
    """What makes the wire of this name; or WeftError says why this rank cannot have it."""
    if before := os.environ.get("WEFT_TRANSPORT"):
        raise WeftError(
            f"WEFT_TRANSPORT is called WEFT_WIRE now: set WEFT_WIRE={before} instead; "
            f"{there_are(wire_names())}"
        )
    try:
        return wire_named(name)
    except WeftError as error:
        if _wire_of_program or name != os.environ.get("WEFT_WIRE"):
            raise
        raise WeftError(f"WEFT_WIRE: {error}") from error


def chosen_by() -> str:
    """Where `chosen` is from: an argument, a variable, or "default"."""
    if _wire_of_program:
        return "weft.init(wire=)"
    if os.environ.get("WEFT_WIRE"):
        return "WEFT_WIRE"
    return "WEFT_SAFE" if os.environ.get("WEFT_SAFE") == "1" else "default"


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    name: str = "world",
    wire: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Group:
    """Join ranks that share a store into a group; collective, all with the same name.

    Only this function and `split` use the store, so it may end with its host afterwards. Groups of
    one name may be made at one store, one after the other.

    Args:
        store: any store that all ranks share; all keys begin with `weft/{name}`.
        rank: this rank, from 0.
        size: how many ranks there are; one alone opens nothing.
        timeout: seconds that joining as a whole, and then any one wait, may last; more than
            `LONGEST` are as many.
        name: tells groups that are made at the same time apart.
        wire: the name of what carries bytes, in this group and in those that are split off; the
            same on every rank. None: the chosen one. One that is `lockstep` or `exact` carries
            payloads alone, and "tcp" the openings, or what carries the control links.
        process_group: torch's, that the group is made for; for wires that use it.

    Raises:
        WeftError: the rank is none of them, or the timeout no number of seconds; or, on every rank:
            the ranks were asked for different wires, or for one that some rank does not know, or
            some rank cannot have its end of the wire, or may not open as many files as its
            connections are.
        WireError: somebody did not come in time, or died.

    Example:
        >>> group = connect(dist.HashStore(), 0, 1, timeout=5.0)
        >>> group.rank, group.size
        (0, 1)
        >>> group.close()
    """
    if not 0 <= rank < size:
        raise WeftError(f"rank {rank} is none of {size} ranks")
    if not is_duration(timeout):
        raise WeftError(f"timeout is {timeout!r}: pass a number of seconds above 0")
    timeout = min(timeout, LONGEST)
    return Group(_join(store, rank, size, timeout, name, wire or _name(), process_group))


def _join(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float,
    name: str,
    wire: str,
    process_group: dist.ProcessGroup | None,
) -> Session:
    """This rank's end of a new session; the arguments and errors are those of `connect`."""
    factory: Factory | str
    try:
        factory = _factory_of(wire)
    except WeftError as error:
        factory = str(error)  # which all ranks raise, once they have met
    deadline = time.monotonic() + timeout
    memory = Pool()
    space = store  # later: the part of it that these ranks have, where splits meet, too

    def join(ranks: tuple[int, ...], name: str) -> Session:
        return _join(space, ranks.index(rank), len(ranks), timeout, name, wire, None)

    if size == 1:
        if isinstance(factory, str):
            raise WeftError(f"{_me()}{factory}")
        alone = wire_alone(memory)
        return Session(alone, timeout, [own_host()], detector=None, memory=memory, join=join)
    try:
        generation = AnsweringStore(store, deadline).add(f"weft/{name}/{rank}", 1)
        space = dist.PrefixStore(f"weft/{name}/{generation}", store)
        joined = join_links(space, rank, size, timeout, wire, factory)
    except (RuntimeError, OSError) as error:  # of the store, of the sockets
        failure = _why_not_joined(error, store, rank, deadline, timeout, process_group)
        if space is not store:  # else the store has not even said how these ranks are called there
            lost = error.ranks if isinstance(error, AbsentError) else [failure[1]]
            failure = _first_to_fail(space, failure, rank, set(range(size)).difference(lost))
        why, culprit = failure
        text = f"rank {rank}: group {name!r} of {size} ranks: {why}"
        raise WireError(text, rank=rank, culprit=culprit) from error
    assert not isinstance(factory, str)  # else every rank has raised that
    detector = Detector(rank, timeout, joined.links, watch.chosen())
    detector.start()
    start = Start(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        timeout=seconds_left(deadline),
        host=joined.hosts[rank],
        exchange=functools.partial(detector.exchange, until=deadline),
        memory=memory,
        process_group=process_group,
        store=dist.PrefixStore("wire", space),
    )
    try:
        openings, payloads = _make_wires(
            wire, factory, joined.carrier or "tcp", start, detector.early, deadline
        )
    except BaseException:
        detector.close()
        raise
    registered = "" if is_own(factory) else wire  # errors need not name weft's own
    session = Session(
        openings,
        timeout,
        joined.hosts,
        detector=detector,
        memory=memory,
        join=join,
        registered=registered if payloads is None else "",
    )
    if payloads is not None:
        session.carry_payloads(payloads, wire, registered)
    return session


def _make_wires(
    name: str,
    factory: Factory,
    beside: str,
    start: Start,
    early: Callable[[], list[bytes]],
    deadline: float,
) -> tuple[Wire, Wire | None]:
    """Make a wire; what carries openings, and what carries payloads, if others do.

    Args:
        name: of the wire that was asked for.
        factory: what makes it.
        beside: the name of weft's own that carries openings where the first one cannot.
        start: what the factories are given.
        early: see `make_wire`.
        deadline: when both have to be made.

    Raises:
        WeftError: some rank cannot have its end of one of them; the same on every rank.
        WireError: somebody did not come in time, or died.
    """
    wire = _made_by_all(name, factory, start, early)
    # features are equal on all ranks, so all of them make a second wire, or none does
    if not wire.features.lockstep and not wire.features.exact:
        return wire, None
    store = None if start.store is None else dist.PrefixStore("openings", start.store)
    start = replace(start, store=store, timeout=seconds_left(deadline))
    try:
        return _made_by_all(beside, own_wire(beside), start, early), wire
    except BaseException:
        wire.close()
        raise


def _made_by_all(
    name: str, factory: Factory, start: Start, early: Callable[[], list[bytes]]
) -> Wire:
    """This rank's end of a wire; the arguments and errors are those of `_make_wires`."""
    try:
        return make_wire(name, factory, start, early)
    except WeftError as error:
        raise WeftError(
            f"{error}; mend it there, or give all ranks another weft.init(wire=) or WEFT_WIRE; "
            f"{there_are(wire_names())}"
        ) from error.__cause__


def _why_not_joined(
    error: Exception,
    store: dist.Store,
    rank: int,
    deadline: float,
    timeout: float,
    process_group: dist.ProcessGroup | None,
) -> tuple[str, int | None]:
    """What is said where the store, the sockets or gloo failed, and the rank to blame."""
    remedy = "; see that all ranks were started and reach each other"
    late = time.monotonic() - deadline
    if isinstance(error, NotJoinedError):  # it says itself what to do
        why = str(error) if error.culprit is not None else f"it was not joined: {error}"
        return why, error.culprit
    if late > HELD_UP:
        return f"rank {rank} came {late:.0f} s too late to join it: was it stopped?", rank
    if isinstance(error, AbsentError):
        why = f"{error} before the timeout of {timeout:g} s"
        if process_group is None or process_group is dist.group.WORLD:
            return f"{why}{remedy}", error.ranks[0]
        if where := _where(process_group, error.ranks):  # they may wait there for one that is here
            return f"{why}: {where}; see that {SAME_ORDER}", None
        return f"{why}{remedy}, and that {SAME_ORDER}", error.ranks[0]
    if isinstance(error, OSError) or server_of(store)[0] is None:  # not of a store that has a host
        return f"it was not joined (timeout {timeout:g} s): {error}{remedy}", None
    host, culprit = "the process that hosts it", None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host = "the launcher, which hosts it,"
    elif process_group is not None and process_group is dist.group.WORLD:
        # in other groups rank 0 may be another one than the program's
        host, culprit = "rank 0, which hosts it,", 0
    if isinstance(error, SilentStoreError):
        return f"{error}: is {host} stopped or cut off?", culprit
    said = str(error).splitlines()[0]
    return (
        f"the store failed ({said}): has {host} ended, or was this rank stopped meanwhile?",
        culprit,
    )


def _first_to_fail(
    space: dist.Store, failure: tuple[str, int | None], rank: int, there: Collection[int]
) -> tuple[str, int | None]:
    """What the first rank said that gave up, which is what all say; this rank may be the first.

    A rank that goes on after it was stopped finds nobody, and hears by this that it is to blame.
    Others may give up a moment later, and the store may end with this program: they are waited for.
    """
    store = AnsweringStore(space, time.monotonic())
    with contextlib.suppress(RuntimeError):  # the store may be what failed
        store.compare_set("failure", "", json.dumps(failure))
        why, culprit = json.loads(store.get("failure"))
        failure = why, culprit
        store.set(f"read/{rank}", "")
        until = time.monotonic() + HELD_UP
        for each in there:
            has(store, f"read/{each}", until, len(there))
    return failure


def of(handle: object) -> Group:
    """The group that a ProcessGroup or a 1-D DeviceMesh stands for.

    Raises:
        WeftError: it is neither, the mesh has more dimensions, or as `of_group`.
    """
    if is_a(handle, DeviceMesh):
        return of_group(_of_mesh(handle))
    if is_a(handle, dist.ProcessGroup) or handle is dist.GroupMember.NON_GROUP_MEMBER:
        return of_group(cast(dist.ProcessGroup, handle))
    raise WeftError(
        f"{_me()}{type(handle).__name__} is no group: pass None, a weft.Group, a "
        "torch.distributed.ProcessGroup or a 1-D DeviceMesh"
    )


def _me() -> str:
    """The beginning of an error that this rank raises alone: its number, if it is known."""
    return f"rank {dist.get_rank()}: " if has_default() else ""


def has_default() -> bool:
    """Whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def of_group(process_group: dist.ProcessGroup | None, *, timeout: float | None = None) -> Group:
    """The group that a process group of the caller's stands for; None is the default one.

    Its first use is collective among the ranks, and joins them beside the process group; later ones
    return the same, until it is closed. It closes by itself when the process group goes.

    Args:
        process_group: any of torch.distributed's, whatever its backend, but for MPI's.
        timeout: seconds that joining, and any one wait, may last, when the ranks are joined here;
            None: the process group's own or, if that is torch's default, no more than those of the
            default group.

    Raises:
        WeftError: the caller is not in the process group, it was destroyed, or it has no store.
        WireError: somebody did not come in time.
    """
    if process_group is None:
        if not has_default():
            raise WeftError("there is no default group: call weft.init() first")
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup) or process_group.rank() < 0:
        raise WeftError(f"{_me()}the caller is not in this group: only its ranks may call")
    with _lock:
        making = _locks.setdefault(process_group, threading.Lock())
    with making:  # one thread joins the ranks, which has a deadline; others wait for it
        group = _groups.get(process_group)
        store = store_of(process_group)
        if store is None:
            if group is not None:
                group.close()
            raise WeftError(
                f"rank {process_group.rank()}: this process group was destroyed, or has no store "
                "that ranks could meet at: pass a group that is alive, not of MPI"
            )
        if group is None or group.closed:
            group = _joined(process_group, store, timeout)
            _groups[process_group] = group
        return group


def _joined(process_group: dist.ProcessGroup, store: dist.Store, timeout: float | None) -> Group:
    """A new group of the ranks of a process group; collective among them."""
    name = "world" if process_group is dist.group.WORLD else process_group.group_name
    rank = process_group.rank()
    joining = recorder.Call(name, 0, "join", Traffic(rank))  # so others learn what it waits for
    try:
        group = connect(
            store,
            rank,
            process_group.size(),
            timeout or _timeout_of(process_group),
            name=name,
            # a backend of weft's says itself how its ranks are joined
            wire=getattr(process_group, "wire_name", None),
            process_group=process_group,
        )
    except BaseException as error:
        last_error.note(error)  # before the join ends: whoever asks is told of one or the other
        joining.close(str(error))
        raise
    joining.close()
    session = group.session
    session.name = recorder.begin(dist.get_rank(), dist.get_world_size(), name)
    session.global_ranks = tuple(dist.get_process_group_ranks(process_group))
    session.process_group = weakref.ref(process_group)
    return group


def _timeout_of(process_group: dist.ProcessGroup) -> float:
    """Seconds that joining the ranks of a process group, and any one wait, may last.

    `dist.new_group()` mostly gets no timeout, and torch's default is half an hour.
    """
    own: float | None = getattr(process_group, "timeout", None)  # of a backend of weft's
    limit = own or _torch.timeout_of(process_group)
    default = None if dist.group.WORLD is None else _groups.get(dist.group.WORLD)
    if limit == _torch.default_timeout() and default is not None:
        return min(limit, default.timeout)
    return limit


def _where(process_group: dist.ProcessGroup, absent: Sequence[int]) -> str:
    """Where ranks are that have not come to be joined, as a clause, as far as they answer.

    They are asked over the links of another group that this rank and they are in.
    """
    everyone = dist.get_process_group_ranks(process_group)
    wanted = {everyone[rank] for rank in absent}
    for group in list(_groups.values()):
        detector = group.session.detector
        if detector is None or group.closed or not wanted <= set(group.global_ranks):
            continue
        places = detector.ask_all()
        texts = [
            f"rank {group.global_ranks[rank]} {place}"
            for rank, place in sorted(places.items())
            if group.global_ranks[rank] in wanted
        ]
        return "; ".join(texts)
    return ""


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a 1-D device mesh."""
    if mesh.ndim != 1:
        raise WeftError(
            f"{_me()}a mesh of shape {tuple(mesh.shape)} has {mesh.ndim} dimensions, and a group "
            "one: pass mesh[name] of one of them"
        )
    if mesh.get_coordinate() is None:
        raise WeftError(f"rank {mesh.get_rank()}: the caller is not in this mesh of {mesh.size()}")
    return mesh.get_group()


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store of a group that torch still knows: its own, unlike that of any other group.

    Raises:
        WeftError: this process was forked from the one that made the group.
    """
    if _torch.is_inherited(group):
        raise WeftError(
            f"{_me()}this process was forked from one whose process group it cannot use: start "
            "processes by spawn or forkserver, or fork them before weft.init and before "
            "torch.distributed.init_process_group; in a DataLoader's worker call no weft"
        )
    store = _torch.store_of(group)
    if store is None:
        return None
    # torch's may have been that of a group of this name that is gone; one of weft's knows better,
    # or its backend for the CPU, where there are others for other devices
    own_store: dist.Store | None = getattr(group, "space", None)
    return own_store or getattr(_torch.backend_of(group, torch.device("cpu")), "space", store)
