"""Specs: what a layer does, as far as it does not depend on the tensors' sizes.

A spec has partitions and arguments. From the shapes of the ranks' tensors it makes a plan, which is
integers only. So every rank makes the same plan, or raises the same error. A layer is a
torch.nn.Module with a spec; its adjoint is the transpose of the plan.

To add a layer, subclass `Spec`, define `plan`, and put a `Layer` around it
(docs/to-write-a-layer.md). A layer from one form of a slice's tensor to another is a `Movement`
(`slices`); another one within the slices of a grid says so by `_connected`, as `all_to_all` does,
and so its ranks wait for those of their slice alone.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ..base.errors import WeftError, conclusion, summed_up
from ..base.tensors import Shape
from .grid import Box, balanced
from .partition import Partition, lengths_of
from .plan import Plan, check_plan

Lengths = Sequence[Sequence[int] | None] | None
"""For each dimension the lengths of the parts that it is cut into; None: balanced."""

CheckedLengths = tuple[Shape | None, ...] | None


_SPELLED = 150  # bytes of settings that are compared as text


@dataclass(frozen=True)
class Spec(abc.ABC):
    """What a layer moves between which ranks, but for the sizes: the base class for those of yours.

    A subclass is a frozen dataclass, with a `name` and a `plan`. Its fields are the layer's
    arguments: at least one `weft.Partition`, whose ranks pass a tensor if it is the first, and what
    else there is, hashable. Every call compares all of them between the ranks that take part: these
    are the ranks of all its partitions. `docs/to-write-a-layer.md` has an example.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in errors and traces."""

    @property
    def summing(self) -> bool:
        """Whether forward adds values of several ranks."""
        return False

    @abc.abstractmethod
    def plan(self, shapes: Mapping[int, Shape]) -> Plan:
        """The plan, given the shapes of the tensors that ranks pass.

        Every rank that takes part makes it, from the fields and these shapes alone. So all make the
        same one, or raise the same error.

        Args:
            shapes: by rank, ascending.

        Raises:
            WeftError: the shapes do not fit together.
        """

    def _connected(self) -> Iterable[Sequence[int]]:
        """Sets of ranks that must know each other's shapes; they may overlap."""
        return [[rank for each in self.partitions for rank in each.ranks]]

    def settings(self) -> str:
        """The arguments besides the partitions, as text that the ranks compare.

        They are all fields, but those with `repr=False`, or None.
        """
        names = [each.name for each in fields(self) if each.repr and each.name not in self._grids]
        told = {name: getattr(self, name) for name in names}
        return ", ".join(f"{name}={value}" for name, value in told.items() if value is not None)

    # what follows from that

    @functools.cached_property
    def _grids(self) -> dict[str, Partition]:
        own = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in own if isinstance(value, Partition)}

    @functools.cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions; the ranks of the first one pass a tensor."""
        return tuple(self._grids.values())

    @functools.cached_property
    def groups(self) -> Mapping[int, tuple[int, ...]]:
        """For each rank that takes part, the ranks of its group, ascending."""
        return _groups(self.integers)

    @functools.cached_property
    def sources(self) -> frozenset[int]:
        """The ranks that pass a tensor; the inputs of others have no elements."""
        return frozenset(self.partitions[0].ranks)

    @functools.cached_property
    def arguments(self) -> str:
        """`settings`, shortened to a digest where they are long."""
        found = self.settings()
        return summed_up(found, _SPELLED, f"{found[:_SPELLED]}...")

    @functools.cached_property
    def grids(self) -> str:
        """The partitions, as text that the ranks compare."""
        return " and ".join(each.brief for each in self.partitions)

    @functools.cached_property
    def integers(self) -> Spec:
        """The same spec without its group: caches that keep it must not keep it open."""
        grids = {name: each.without_group() for name, each in self._grids.items()}
        return replace(self, **grids)


@functools.lru_cache(maxsize=256)
def _groups(spec: Spec) -> Mapping[int, tuple[int, ...]]:
    group: dict[int, set[int]] = {}
    for ranks in spec._connected():
        together = set(ranks).union(*(group.get(rank, ()) for rank in ranks))
        group.update(dict.fromkeys(together, together))
    ascending = {id(each): tuple(sorted(each)) for each in group.values()}
    return {rank: ascending[id(each)] for rank, each in group.items()}


def planned(spec: Spec, shapes: tuple[tuple[int, Shape], ...]) -> Plan:
    """The plan for these shapes, which all ranks stated in this call.

    Args:
        spec: of the layer.
        shapes: of the tensors that ranks pass, by rank, ascending.

    Raises:
        WeftError: the shapes do not fit together; or the spec, one of a program's own, raises
            another exception, makes no plan, or one that does not fit the tensors: as all ranks do,
            or none.
    """
    try:
        return _planned(spec.integers, shapes)
    except MemoryError:  # which lacks on one rank alone
        raise
    except WeftError as error:
        error.is_conclusion = True
        raise
    except (Exception, SystemExit) as error:
        raise conclusion(
            f"{spec.name} makes no plan for tensors of these shapes, by rank, {dict(shapes)}: "
            f"{type(error).__name__}: {error}"
        ) from error


@functools.lru_cache(maxsize=512)
def _planned(spec: Spec, shapes: tuple[tuple[int, Shape], ...]) -> Plan:
    found = dict(shapes)
    plan = spec.plan(found)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan() gave a {type(plan).__name__} and not a weft.nn.plan.Plan")
    check_plan(plan, found, spec.groups[shapes[0][0]])
    return plan


# How tensors are cut


def fitting(
    name: str, places: Mapping[int, Shape], shapes: Mapping[int, Shape], dims: Iterable[int]
) -> list[Shape]:
    """The lengths of the parts along each dimension, for shards that make up a tensor.

    Args:
        name: of the layer, for errors.
        places: each rank's index in the grid.
        shapes: each rank's shape.
        dims: the dimensions along which the tensor is cut.

    Raises:
        WeftError: ranks at the same place along a dimension have parts of different length.
    """
    along, ranks = set(dims), sorted(places)
    first = ranks[0]
    ndim = len(shapes[first])
    for rank in ranks:
        if len(shapes[rank]) != ndim:
            raise WeftError(
                f"{name}: rank {rank} has a tensor of {len(shapes[rank])} dimensions, "
                f"{shapes[rank]}, and rank {first} one of {ndim}, {shapes[first]}"
            )
    for dim in along:
        if dim >= ndim and any(place[dim] for place in places.values()):
            raise WeftError(
                f"{name}: dimension {dim} is cut, and rank {first} has a tensor of {ndim} "
                f"dimensions, {shapes[first]}"
            )
    lengths: list[Shape] = []
    for dim in range(ndim):
        seen: dict[int, int] = {}
        for rank in ranks:
            at = places[rank][dim] if dim in along else 0
            other = seen.setdefault(at, rank)
            if shapes[rank][dim] != shapes[other][dim]:
                place = f", at the same place of the grid ({at})," if dim in along else ""
                raise WeftError(
                    f"{name}: in dimension {dim} rank {rank} has {shapes[rank][dim]}, and rank "
                    f"{other}{place} has {shapes[other][dim]}: shards must fit together"
                )
        lengths.append(tuple(shapes[seen[at]][dim] for at in sorted(seen)))
    return lengths


def parts(name: str, extent: int, count: int, given: Sequence[int] | None, dim: int) -> Shape:
    """The lengths of the parts that a dimension is cut into: those given, or balanced.

    Raises:
        WeftError: those given are not so many, or do not add up.
    """
    if given is None:
        return balanced(extent, count)
    if len(given) != count or sum(given) != extent or min(given) < 0:
        raise WeftError(
            f"{name}: dimension {dim} has {extent} and is cut into {count} parts, which lengths "
            f"{tuple(given)} are not"
        )
    return tuple(given)


def cut(
    name: str, partition: Partition, dims: Iterable[int], shape: Shape, given: Lengths
) -> list[Shape]:
    """The lengths of the parts of a tensor that is cut along some dimensions of a grid.

    Raises:
        WeftError: the tensor has too few dimensions, or what was given does not fit.
    """
    told = tuple(given or ())
    if len(told) > len(shape):
        raise WeftError(
            f"{name}: lengths are given for {len(told)} dimensions, and the tensor has "
            f"{len(shape)}, {shape}: pass one entry for each dimension of the tensor"
        )
    counts = {dim: partition.shape[dim] for dim in dims}
    if any(dim >= len(shape) and count > 1 for dim, count in counts.items()):
        raise WeftError(
            f"{name}: the grid is cut along dims {tuple(counts)}, and the tensor has "
            f"{len(shape)} dimensions, {shape}"
        )
    lengths = (*told, *(None,) * len(shape))
    return [
        parts(name, extent, counts.get(dim, 1), lengths[dim], dim)
        for dim, extent in enumerate(shape)
    ]


def shards(
    places: Mapping[int, Shape], lengths: Sequence[Shape], dims: Iterable[int]
) -> dict[int, Box]:
    """The box of each rank in the tensor of its slice, which is cut along `dims`."""
    along = set(dims)
    found = {}
    for rank, place in places.items():
        at = [place[dim] if dim in along else 0 for dim in range(len(lengths))]
        start = tuple(sum(each[:a]) for each, a in zip(lengths, at, strict=True))
        stop = tuple(sum(each[: a + 1]) for each, a in zip(lengths, at, strict=True))
        found[rank] = Box(start, stop)
    return found


# Arguments


def checked_lengths(lengths: Lengths) -> CheckedLengths:
    """A `lengths=` argument as tuples, or None.

    Raises:
        WeftError: it is no sequence of lengths.
    """
    if lengths is None:
        return None
    try:
        given = [each if each is None else tuple(each) for each in lengths]
    except TypeError as error:
        raise WeftError(
            f"lengths is {lengths!r}: pass for each dimension those of its parts, or None"
        ) from error
    return tuple(each if each is None else lengths_of("lengths", "lengths", each) for each in given)
