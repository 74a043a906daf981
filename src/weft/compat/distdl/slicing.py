"""`distdl.utilities.slicing` and `index_tricks`: how a tensor is cut along a grid, as NumPy arrays.

The balanced cut, the first `shape % parts` parts have one more. Shapes and
indices are whatever NumPy makes an array of; results are arrays of dtype int64, shape [dim].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arguments import Integers, integers


def compute_subshape(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> Integers:
    """The shape of the part at `index` of a grid, of a tensor of this shape.

    Example:
        >>> compute_subshape([2, 3], [0, 2], [5, 7])
        array([3, 2])
    """
    return compute_stop_index(P_shape, index, shape) - compute_start_index(P_shape, index, shape)


def compute_subshape_along_axis(
    P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike, axis: ArrayLike
) -> Integers:
    """The same, if the tensor is cut along some dimensions of the grid alone.

    Example:
        >>> compute_subshape_along_axis([2, 3], [0, 2], [5, 7], 1)
        array([5, 2])
    """
    found, axes = integers(shape).copy(), integers(axis)
    found[axes] = compute_subshape(
        integers(P_shape)[axes], integers(index)[axes], integers(shape)[axes]
    )
    return found


def compute_start_index(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> Integers:
    """Where the part at `index` begins in the tensor.

    Example:
        >>> compute_start_index([2, 3], [1, 2], [5, 7])
        array([3, 5])
    """
    parts, at, extents = integers(P_shape), integers(index), integers(shape)
    start: Integers = extents // parts * at + np.minimum(at, extents % parts)
    return start


def compute_stop_index(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> Integers:
    """The first index behind that part."""
    return compute_start_index(P_shape, integers(index) + 1, shape)


def compute_intersection(
    r0_start_index: ArrayLike,
    r0_stop_index: ArrayLike,
    r1_start_index: ArrayLike,
    r1_stop_index: ArrayLike,
) -> tuple[Integers, Integers, Integers]:
    """Start, stop and shape of what two regions have in common; the shape is 0 where nothing.

    Example:
        >>> compute_intersection([0, 0], [3, 4], [2, 1], [5, 9])
        (array([2, 1]), array([3, 4]), array([1, 3]))
    """
    start = np.maximum(integers(r0_start_index), integers(r1_start_index))
    stop = np.minimum(integers(r0_stop_index), integers(r1_stop_index))
    return start, stop, np.maximum(stop - start, 0)


def assemble_slices(start_index: ArrayLike, stop_index: ArrayLike) -> tuple[slice, ...]:
    """What indexes a tensor with a region."""
    return tuple(map(slice, integers(start_index).tolist(), integers(stop_index).tolist()))


def compute_partition_intersection(
    P_x_r_shape: ArrayLike,
    P_x_r_index: ArrayLike,
    P_x_s_shape: ArrayLike,
    P_x_s_index: ArrayLike,
    x_shape: ArrayLike,
) -> tuple[slice, ...] | None:
    """What the parts at two places of two grids have in common, seen from the first; or None.

    Example:
        >>> compute_partition_intersection([2], [1], [3], [1], [6])
        (slice(0, 1, None),)
    """
    return compute_subtensor_intersection_slice(
        compute_start_index(P_x_r_shape, P_x_r_index, x_shape),
        compute_stop_index(P_x_r_shape, P_x_r_index, x_shape),
        compute_start_index(P_x_s_shape, P_x_s_index, x_shape),
        compute_stop_index(P_x_s_shape, P_x_s_index, x_shape),
    )


def compute_subtensor_intersection_slice(
    x_start_index: ArrayLike,
    x_stop_index: ArrayLike,
    y_start_index: ArrayLike,
    y_stop_index: ArrayLike,
) -> tuple[slice, ...] | None:
    """What two regions have in common, seen from the first; None if nothing.

    Example:
        >>> compute_subtensor_intersection_slice([2, 0], [5, 3], [4, 1], [9, 2])
        (slice(2, 3, None), slice(1, 2, None))
    """
    start, stop, shape = compute_intersection(
        x_start_index, x_stop_index, y_start_index, y_stop_index
    )
    origin = integers(x_start_index)
    return assemble_slices(start - origin, stop - origin) if shape.all() else None


def compute_nd_slice_shape(slices: Sequence[slice]) -> tuple[int, ...]:
    """The shape of a region that is given by slices."""
    return tuple(each.stop - each.start for each in slices)


def compute_nd_slice_volume(slices: Sequence[slice]) -> int:
    """How many elements it has."""
    return int(np.prod(compute_nd_slice_shape(slices)))


def range_index(shape: ArrayLike) -> Iterator[tuple[int, ...]]:
    """The index of each cell of a grid, in row-major order."""
    yield from np.ndindex(*integers(shape).tolist())


def filtered_range_index(
    shape: ArrayLike, filter: Sequence[int | None]
) -> Iterator[tuple[int, ...]]:
    """The same for the cells whose index is as the filter's where that is not None.

    Example:
        >>> list(filtered_range_index((2, 3), (1, None)))
        [(1, 0), (1, 1), (1, 2)]
    """
    for index in range_index(shape):
        if all(want is None or at == want for at, want in zip(index, filter, strict=False)):
            yield index


def assemble_index_filter(
    index: Sequence[int], dims: Sequence[int], invert: bool = False
) -> tuple[Any, ...]:
    """A filter that keeps an index in some dimensions; with `invert`, in all others.

    Example:
        >>> assemble_index_filter((4, 3, 2), (1,)), assemble_index_filter((4, 3, 2), (1,), True)
        ((None, 3, None), (4, None, 2))
    """
    return tuple(at if (dim in dims) != invert else None for dim, at in enumerate(index))


def get_rearrange_ordering(num_dims: int, axis: int) -> tuple[str, str]:
    """What einops.rearrange needs to merge a dimension of workers, the first, into another.

    Args:
        num_dims: dimensions without that of the workers.
        axis: the one that they go into, as the slower index.

    Returns:
        The order before and after.

    Example:
        >>> get_rearrange_ordering(3, 1)
        ('p a b c', 'a (p b) c')
    """
    names = [chr(ord("a") + dim) for dim in range(num_dims)]
    before = " ".join(["p", *names])
    names[axis] = f"(p {names[axis]})"
    return before, " ".join(names)


def worker_layout(shape: ArrayLike) -> Integers:
    """The rank of each cell of a grid, as an array of its shape."""
    extents = integers(shape)
    return np.arange(extents.prod(), dtype=np.int64).reshape(extents)


def cartesian_index_c(shape: Sequence[int], index: Sequence[int]) -> int:
    """The number of a cell in row-major order."""
    return int(np.ravel_multi_index(tuple(index), tuple(shape)))


def cartesian_index_f(shape: Sequence[int], index: Sequence[int]) -> int:
    """The number of a cell in column-major order."""
    return int(np.ravel_multi_index(tuple(index), tuple(shape), order="F"))
