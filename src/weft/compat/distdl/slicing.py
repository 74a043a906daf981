"""`distdl.utilities.slicing` and `index_tricks`: how a tensor is cut along a grid, in integers.

The cut is balanced: in each dimension the first `shape % parts` parts have one element more than
the others. Shapes and indices are anything that NumPy makes an array of, of length dim. Results are
int64 arrays [dim] if nothing else is said. `P_shape` is the shape of the grid, `index` a cell of
it, and `shape` the shape of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arguments import Integers, integers


def compute_subshape(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> Integers:
    """The shape of the part in the cell at `index` of a grid.

    Example:
        >>> compute_subshape([2, 3], [0, 2], [5, 7])
        array([3, 2])
    """
    return compute_stop_index(P_shape, index, shape) - compute_start_index(P_shape, index, shape)


def compute_subshape_along_axis(
    P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike, axis: ArrayLike
) -> Integers:
    """The shape of the part at `index`, if the tensor is cut along the dimensions `axis` only.

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
    """The first index, in the whole tensor, of the part at `index`.

    Example:
        >>> compute_start_index([2, 3], [1, 2], [5, 7])
        array([3, 5])
    """
    parts, at, extents = integers(P_shape), integers(index), integers(shape)
    start: Integers = extents // parts * at + np.minimum(at, extents % parts)
    return start


def compute_stop_index(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> Integers:
    """The index after the last one, in the whole tensor, of the part at `index`.

    Example:
        >>> compute_stop_index([2, 3], [0, 2], [5, 7])
        array([3, 7])
    """
    return compute_start_index(P_shape, integers(index) + 1, shape)


def compute_intersection(
    r0_start_index: ArrayLike,
    r0_stop_index: ArrayLike,
    r1_start_index: ArrayLike,
    r1_stop_index: ArrayLike,
) -> tuple[Integers, Integers, Integers]:
    """Start, stop and shape of the intersection of two boxes.

    In a dimension in which they do not intersect the shape is 0.

    Example:
        >>> compute_intersection([0, 0], [3, 4], [2, 1], [5, 9])
        (array([2, 1]), array([3, 4]), array([1, 3]))
    """
    start = np.maximum(integers(r0_start_index), integers(r1_start_index))
    stop = np.minimum(integers(r0_stop_index), integers(r1_stop_index))
    return start, stop, np.maximum(stop - start, 0)


def assemble_slices(start_index: ArrayLike, stop_index: ArrayLike) -> tuple[slice, ...]:
    """The slices of a box.

    Example:
        >>> assemble_slices([2, 0], [5, 3])
        (slice(2, 5, None), slice(0, 3, None))
    """
    return tuple(map(slice, integers(start_index).tolist(), integers(stop_index).tolist()))


def compute_partition_intersection(
    P_x_r_shape: ArrayLike,
    P_x_r_index: ArrayLike,
    P_x_s_shape: ArrayLike,
    P_x_s_index: ArrayLike,
    x_shape: ArrayLike,
) -> tuple[slice, ...] | None:
    """The intersection of a part of grid r and a part of grid s, as slices of the part of grid r.

    None if they do not intersect. `x_shape` is the shape of the whole tensor.

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
    """The intersection of boxes x and y, as slices relative to the start of x; None if empty.

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
    """The shape of a box, given its slices.

    Example:
        >>> compute_nd_slice_shape((slice(2, 5), slice(0, 3)))
        (3, 3)
    """
    return tuple(each.stop - each.start for each in slices)


def compute_nd_slice_volume(slices: Sequence[slice]) -> int:
    """The number of elements of a box, given its slices.

    Example:
        >>> compute_nd_slice_volume((slice(2, 5), slice(0, 3)))
        9
    """
    return int(np.prod(compute_nd_slice_shape(slices)))


def range_index(shape: ArrayLike) -> Iterator[tuple[int, ...]]:
    """The index of each cell of a grid, in row-major order.

    Example:
        >>> list(range_index((1, 2)))
        [(0, 0), (0, 1)]
    """
    yield from np.ndindex(*integers(shape).tolist())


def filtered_range_index(
    shape: ArrayLike, filter: Sequence[int | None]
) -> Iterator[tuple[int, ...]]:
    """The index of each cell that agrees with the filter where the filter is not None.

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
    """A filter for `filtered_range_index`: the index in the dimensions `dims`, None in the others.

    With `invert` it is the index in the others, and None in `dims`.

    Example:
        >>> assemble_index_filter((4, 3, 2), (1,)), assemble_index_filter((4, 3, 2), (1,), True)
        ((None, 3, None), (4, None, 2))
    """
    return tuple(at if (dim in dims) != invert else None for dim, at in enumerate(index))


def get_rearrange_ordering(num_dims: int, axis: int) -> tuple[str, str]:
    """The two sides of an einops pattern that merges the first dimension, of workers, into another.

    Args:
        num_dims: the number of dimensions without that of the workers.
        axis: the dimension to merge it into; the workers are the slower index there.

    Returns:
        The left and the right side, for `einops.rearrange(x, f"{left} -> {right}")`.

    Example:
        >>> get_rearrange_ordering(3, 1)
        ('p a b c', 'a (p b) c')
    """
    names = [chr(ord("a") + dim) for dim in range(num_dims)]
    before = " ".join(["p", *names])
    names[axis] = f"(p {names[axis]})"
    return before, " ".join(names)


def worker_layout(shape: ArrayLike) -> Integers:
    """The rank in each cell of a grid, in row-major order: an int64 array of the grid's shape.

    Example:
        >>> worker_layout([2, 2]).tolist()
        [[0, 1], [2, 3]]
    """
    extents = integers(shape)
    return np.arange(extents.prod(), dtype=np.int64).reshape(extents)


def cartesian_index_c(shape: Sequence[int], index: Sequence[int]) -> int:
    """The number of a cell in row-major order.

    Example:
        >>> cartesian_index_c((2, 3), (1, 0))
        3
    """
    return int(np.ravel_multi_index(tuple(index), tuple(shape)))


def cartesian_index_f(shape: Sequence[int], index: Sequence[int]) -> int:
    """The number of a cell in column-major order.

    Example:
        >>> cartesian_index_f((2, 3), (1, 0))
        1
    """
    return int(np.ravel_multi_index(tuple(index), tuple(shape), order="F"))
