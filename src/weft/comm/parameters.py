"""`sync_params`: every rank's module becomes what it is on one rank.

All names, dtypes, shapes and shared tensors are compared before anything is overwritten. Then the
bytes go in `buckets`: on the wire along a chain of ranks, in chunks (`schedules.chain`), so that
each rank receives and sends them at most once; what it does not carry goes by one verb a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..base.arguments import root_in, wrong_root
from ..base.errors import check, entry
from ..base.tensors import as_bytes, mark_overwritten, plain
from ..call.attempt import preparing
from ..call.opening import opened
from ..group import default
from ..group.group import Group
from ..group.pending import Pending
from ..schedules.chain import Chain
from ..verbs.carrier import verbs_of
from .buckets import carriers_of, in_buckets
from .named import digest, local, of_module, raise_difference

_NAME = "sync_params"


@entry
def sync_params(module: torch.nn.Module, group_src: int = 0, group: object = None) -> None:
    """Give every rank the parameters and buffers of one rank, in place.

    Args:
        module: has the same names, dtypes, shapes and kinds of devices on every rank. A tensor
            with several names stays one tensor. Buffers that are not persistent are included. For a
            DTensor every rank must have the same shard: pass the group of a mesh dimension along
            which it is replicated.
        group_src: the rank, in the group, that gives its values.
        group: None (the default group), a Group, a ProcessGroup, or a 1-D DeviceMesh.

    Raises:
        WeftError: modules or arguments differ, naming the first difference and the ranks, or two
            tensors lie in one memory, unless it is the same for both; the same text on every rank.
            Nothing was overwritten, and the next call works.
        WireError: a peer or a link failed; names the culprit. The group is lost, and the values
            are undefined.

    Example:
        >>> import torch, weft
        >>> from weft.testing import run
        >>> def program(group):
        ...     model = torch.nn.Linear(2, 1)
        ...     torch.nn.init.constant_(model.weight, group.rank)
        ...     weft.sync_params(model, group_src=1)
        ...     return model.weight.tolist()
        >>> run(2, program)
        [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    group = default.resolve(group)
    with preparing(group, _NAME):
        found, manifest = of_module(module, buffers=True)
        root = root_in(group_src, group.size)
        check(wrong_root("group_src", root, group_src, group.size))

    def job() -> None:
        with preparing(group, _NAME):
            fields = {"group_src": root, "device": carriers_of(group, found.values())}
        with torch.no_grad():
            opening = opened(group, _NAME, fields, digest=digest(manifest))
            if not opening.equal:
                raise_difference(group, _NAME, manifest)
            _broadcast(group, root, found.values())

    group.worker.call(_NAME, job)


def _broadcast(group: Group, source: int, owners: Iterable[Tensor]) -> None:
    """Fill tensors with what they are on one rank; collective."""
    here = group.rank == source
    places = [local(owner) for owner in owners]
    values = [plain(place) for place in places]
    chain = [*range(source, group.size), *range(source)]

    def start(memory: Tensor) -> Pending | None:
        verbs = verbs_of(group, memory.device)
        if verbs is None:
            return Chain(group, chain, memory).start()
        verbs.broadcast(memory, source)
        return None

    in_buckets(group, map(as_bytes, values), start, reads=here, writes=not here)
    if here:
        return
    for place, value in zip(places, values, strict=True):
        if value is not place:
            place.copy_(value)
    mark_overwritten(owners)
