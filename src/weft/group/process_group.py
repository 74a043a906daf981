"""Groups beside process groups of the caller's: each is joined once, at its first use.

"world" is the default group, which has no name of its own that ranks share.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..base import _torch
from ..base.arguments import is_a
from ..base.errors import WeftError
from ..failure import last_error
from ..records.calls import CallStats
from ..records.traffic import Traffic
from ..rendezvous.world import has_default, own_rank
from .group import Group
from .joining import connect


class _Ranks:
    """The ranks of a process group, as far as they are joined.

    Attributes:
        turn: of the one thread that joins them; others wait for it.
        group: theirs; None: it was not made yet. Who has closed it makes the next one.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.group: Group | None = None


WIRES = ("tcp", "group")
"""What `weft.init(wire=)` may be: weft's own way between CPUs, or the process group for all."""

_wire_of_program: str | None = None  # what `weft.init(wire=)` said; None: nothing


def choose_wire(name: str | None) -> None:
    """Set what carries CPU tensors in groups that are made from now on; None: the environment's."""
    global _wire_of_program
    _wire_of_program = name


def chosen_wire() -> tuple[str, str]:
    """One of `WIRES`, and where it is from: an argument, a variable, or "default"."""
    if _wire_of_program is not None:
        return _wire_of_program, "weft.init(wire=)"
    said = os.environ.get("WEFT_WIRE")
    return (said, "WEFT_WIRE") if said else (WIRES[0], "default")


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ranks] = weakref.WeakKeyDictionary()


def joined(process_group: dist.ProcessGroup) -> Group | None:
    """The group of a process group's ranks, if it was made already; nothing is sent."""
    ranks = _known.get(process_group)
    return None if ranks is None else ranks.group


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
        f"{own_rank()}{type(handle).__name__} is no group: pass None, a weft.Group, a "
        "torch.distributed.ProcessGroup or a 1-D DeviceMesh"
    )


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
        raise WeftError(f"{own_rank()}the caller is not in this group: only its ranks may call")
    _check_process(process_group)  # first: a child has locks that nobody gives back
    with _lock:
        ranks = _known.setdefault(process_group, _Ranks())
    with ranks.turn:  # joining has a deadline
        store = store_of(process_group)
        if store is None:
            if ranks.group is not None:
                ranks.group.close()
            raise _destroyed(process_group)
        if ranks.group is None or ranks.group.closed:
            ranks.group = _new_group(process_group, store, timeout)
        return ranks.group


def _destroyed(process_group: dist.ProcessGroup) -> WeftError:
    return WeftError(
        f"rank {process_group.rank()}: this process group was destroyed, or has no store that "
        "ranks could meet at: pass a group that is alive, not of MPI"
    )


def _new_group(process_group: dist.ProcessGroup, store: dist.Store, timeout: float | None) -> Group:
    """A new group of the ranks of a process group; collective among them."""
    name = "world" if process_group is dist.group.WORLD else process_group.group_name
    rank = process_group.rank()
    everyone = tuple(dist.get_process_group_ranks(process_group))  # none once it is destroyed
    joining = CallStats("join", name, rank, 0, Traffic(rank))  # so others learn what it waits for
    try:
        group = connect(
            store,
            rank,
            process_group.size(),
            timeout or _timeout_of(process_group),
            name=name,
            where=None if name == "world" else functools.partial(_where, process_group),
            global_ranks=everyone,
        )
        if store_of(process_group) is None:  # another thread has destroyed it meanwhile
            group.close()
            raise _destroyed(process_group)
    except BaseException as error:
        last_error.note(error)  # before the join ends: whoever asks is told of one or the other
        joining.end(str(error))
        raise
    joining.end()
    group.session.name = name
    group.session.process_group = weakref.ref(process_group)
    group.session.is_by_group = chosen_wire()[0] == "group"
    return group


def _timeout_of(process_group: dist.ProcessGroup) -> float:
    """Seconds that joining the ranks of a process group, and any one wait, may last.

    `dist.new_group()` mostly gets no timeout, and torch's default is half an hour.
    """
    limit = _torch.timeout_of(process_group)
    default = None if dist.group.WORLD is None else joined(dist.group.WORLD)
    if limit == _torch.default_timeout() and default is not None:
        return min(limit, default.timeout)
    return limit


def _where(process_group: dist.ProcessGroup, absent: Sequence[int]) -> str:
    """Where ranks are that have not come to be joined, as a clause, as far as they answer.

    They are asked over the links of another group that this rank and they are in.
    """
    if store_of(process_group) is None:
        return "this process group was destroyed meanwhile"
    everyone = dist.get_process_group_ranks(process_group)
    wanted = {everyone[rank] for rank in absent}
    # `keys` would raise where another thread comes to a new one meanwhile
    alive = [reference() for reference in _known.keyrefs()]
    for group in [joined(each) for each in alive if each is not None]:
        if group is None or group.closed or not wanted <= {*group.global_ranks}:
            continue
        detector = group.session.detector
        if detector is None:
            continue
        places = detector.ask_all()
        texts = [
            f"rank {group.global_ranks[rank]} of the job {place}"
            for rank, place in sorted(places.items())
            if group.global_ranks[rank] in wanted
        ]
        return "; ".join(texts)
    return ""


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a 1-D device mesh."""
    if mesh.ndim != 1:
        raise WeftError(
            f"{own_rank()}a mesh of shape {tuple(mesh.shape)} has {mesh.ndim} dimensions, and a "
            "group one: pass mesh[name] of one of them"
        )
    if mesh.get_coordinate() is None:
        raise WeftError(f"rank {mesh.get_rank()}: the caller is not in this mesh of {mesh.size()}")
    return mesh.get_group()


def _check_process(group: dist.ProcessGroup) -> None:
    """Raise WeftError where this process was forked from the one that made the group."""
    if _torch.is_inherited(group):
        raise WeftError(
            f"{own_rank()}this process was forked from one whose process group it cannot use: "
            "start processes by spawn or forkserver, or fork them before weft.init and before "
            "torch.distributed.init_process_group; in a DataLoader's worker call no weft"
        )


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store of a group that torch still knows: its own, unlike that of any other group.

    Raises:
        WeftError: this process was forked from the one that made the group.
    """
    _check_process(group)
    store = _torch.store_of(group)
    if store is None:
        return None
    # torch's may have been that of a group of this name that is gone; one of weft's knows better,
    # or its backend for the CPU, where there are others for other devices
    own_store: dist.Store | None = getattr(group, "space", None)
    return own_store or getattr(_torch.backend_of(group, torch.device("cpu")), "space", store)
