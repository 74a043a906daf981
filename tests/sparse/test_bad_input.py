"""Bad input: the same WeftError on every rank, naming the rank, and the next call works."""

from __future__ import annotations

import pytest
import torch

import weft
from cases import alike, in_case
from weft.sparse import ALGORITHMS
from weft.testing import run, spmd


def good(group, width=4):
    return weft.Rows(torch.tensor([1, 5, group.rank % 4]), torch.ones(3, width), 10)


def long_name(a, b):
    return a + b


long_name.__qualname__ = 1000 * "long"


class Mute:
    """Cannot even be named."""

    def __str__(self):
        raise ValueError("no words")


def one(*indices, values=None, height=10, dtype=torch.int64):
    found = torch.tensor(indices, dtype=dtype)
    return weft.Rows(found, torch.ones(found.shape[0], 4) if values is None else values, height)


def beyond_its_columns():
    return torch.sparse_coo_tensor([[1], [2]], torch.ones(1, 4), (5, 2, 4), check_invariants=False)


# what the last rank passes while all others pass good rows, and what everybody must be told
WRONG = {
    "negative": (lambda: {"rows": one(3, -2)}, "index -2 is negative"),
    "too high": (lambda: {"rows": one(3, 10)}, "index 10 is outside a height of 10: indices must"),
    "2 of 2 columns": (
        lambda: {"rows": beyond_its_columns()},
        r"index \(1, 2\) is outside of .*5, 2",
    ),
    "no such height": (lambda: {"rows": one(height=-1)}, "height is -1: pass the number of rows"),
    "float": (lambda: {"rows": one(1, dtype=torch.float32)}, "indices are torch.float32"),
    "short": (lambda: {"rows": one(1, dtype=torch.int16)}, "indices are torch.int16"),
    "2-D": (lambda: {"rows": one([1, 2])}, r"indices have shape \(1, 2\)"),
    "count": (
        lambda: {"rows": one(1, 2, values=torch.ones(3, 4))},
        r"2 indices come with values of shape \(3, 4\)",
    ),
    "no rows of a shape that is none": (
        lambda: {"rows": (torch.empty(0).long(), torch.empty(0, 2**30, 2**30))},
        r"the values have rows of shape \(1073741824, 1073741824\), of which none fits in memory",
    ),
    "row shape": (
        lambda: {"rows": one(1, values=torch.ones(1, 5))},
        r"row shape: rank.* \(4,\), rank \d+ has \(5,\)",
    ),
    "value dtype": (
        lambda: {"rows": one(1, values=torch.ones(1, 4, dtype=torch.float64))},
        r"value dtype: .*torch.float32, rank \d+ has torch.float64",
    ),
    "index dtype": (
        lambda: {"rows": one(1, dtype=torch.int32)},
        r"index dtype: .*torch.int64, rank \d+ has torch.int32",
    ),
    "height": (lambda: {"rows": one(1, height=11)}, r"height: .* 10, rank \d+ has 11"),
    "no height": (lambda: {"rows": one(1, height=None)}, r"height: .*rank \d+ has no height"),
    "op": (lambda: {"op": "max"}, r"op: .* sum, rank \d+ has max"),
    "a function": (
        lambda: {"op": torch.logaddexp},
        r"op: .* sum, rank \d+ has builtin_function_or_method .*logaddexp",
    ),
    "algorithm": (lambda: {"algorithm": "plain"}, r"algorithm: .* auto, rank \d+ has plain"),
    "unknown op": (lambda: {"op": "median"}, "op 'median' is unknown: use one of sum, avg"),
    "unknown op of many rows": (  # which do not fit in what a rank says of itself
        lambda: {
            "rows": weft.Rows(torch.arange(10**5), torch.ones(10**5, 4), None),
            "op": "median",
        },
        "op 'median' is unknown: use one of sum, avg",
    ),
    "unknown algorithm": (
        lambda: {"algorithm": "magic"},
        f"'magic' is unknown: use auto or one of {', '.join(sorted([*ALGORITHMS, 'plain']))}",
    ),
    "dense": (lambda: {"rows": torch.ones(10, 4)}, "rows is a tensor of layout torch.strided"),
    "nonsense": (lambda: {"rows": "rows"}, "rows is a str"),
    "bits of floats": (lambda: {"op": "bor"}, "op bor is for integers and bool"),
    "complex": (
        lambda: {"rows": one(1, values=torch.ones(1, 4, dtype=torch.complex64))},
        "values of torch.complex64 are not supported",
    ),
    "wire dtype": (
        lambda: {"wire_dtype": torch.bfloat16},
        r"wire_dtype: .* None, rank \d+ has torch.bfloat16",
    ),
    "wire dtype of integers": (
        lambda: {
            "rows": one(1, values=torch.ones(1, 4, dtype=torch.int64)),
            "wire_dtype": torch.bfloat16,
        },
        "wire_dtype is torch.bfloat16, which is for floating point, and the values are torch.int64",
    ),
    "unknown wire dtype": (
        lambda: {"wire_dtype": torch.float64},
        "wire_dtype is torch.float64: pass torch.bfloat16, torch.float16, torch.float32 or None",
    ),
    "rows of lists": (
        lambda: {"rows": weft.Rows([1], [2.0])},
        "rows are a Rows of list and list: pass tensors",
    ),
    "a height in words": (lambda: {"rows": one(1, height="ten")}, "height is 'ten': pass the num"),
    "a name too long": (
        lambda: {"op": long_name},
        r"rank \d+ has function .*\.\.\. \(digest \w+\); pass",
    ),
    "no words": (lambda: {"algorithm": Mute()}, "ValueError: no words"),
}


@spmd(2, 3, on=("threads", "stand-in", "processes"))
def test_one_rank_errs_and_all_are_told(group):
    """Of each error in turn, in one group: so all calls after an error work, too."""
    culprit = group.size - 1
    for what, (make, text) in WRONG.items():
        with in_case(what):
            arguments = {"rows": good(group), **(make() if group.rank == culprit else {})}
            with pytest.raises(weft.WeftError, match=text) as caught:
                weft.sparse_all_reduce(**arguments)
            assert f"rank {culprit}" in str(caught.value)
            alike(group, str(caught.value))

            total = weft.sparse_all_reduce(good(group))
            assert total.values[total.indices == 5].eq(group.size).all()


@spmd(8, 20, on=("threads", "stand-in"))
def test_many_ranks_are_told_too(group):
    culprit = group.size * 2 // 3
    for what in ("op", "negative", "row shape", "height"):
        with in_case(what):
            make, text = WRONG[what]
            arguments = {"rows": good(group), **(make() if group.rank == culprit else {})}
            with pytest.raises(weft.WeftError, match=text) as caught:
                weft.sparse_all_reduce(**arguments)
            assert f"rank {culprit}" in str(caught.value)
            alike(group, str(caught.value))
    total = weft.sparse_all_reduce(good(group, width=4))
    assert total.values[total.indices == 5].eq(group.size).all()


@pytest.mark.parametrize("count", [3, 9000])
@spmd(1, 4, on=("threads", "stand-in", "processes"))
def test_a_function_that_raises(group, count):
    rows = weft.Rows(torch.arange(count), torch.ones(count, 4), count)

    def fails(left, right):
        if group.rank == group.size - 1:
            raise KeyError("no such thing")
        return left + right

    both = weft.Rows(rows.indices.repeat(2), rows.values.repeat(2, 1), count)
    with pytest.raises(weft.WeftError, match=rf"rank {group.size - 1}: KeyError: 'no such thing'"):
        weft.sparse_all_reduce(both, fails)
    with pytest.raises(weft.WeftError, match="op returned"):
        weft.sparse_all_reduce(both, lambda left, right: left[:, :1] + right[:, :1])
    with pytest.raises(weft.WeftError, match="algorithm split takes no function as op: use auto"):
        weft.sparse_all_reduce(both, fails, algorithm="split")
    assert torch.equal(weft.sparse_all_reduce(rows).values, rows.values * group.size)


@spmd(3, on=("threads", "stand-in", "processes"))
def test_different_calls_are_told_apart(group):
    if group.rank == 1:  # this rank has already made one call more: it explained, then reduces
        with pytest.raises(weft.WeftError, match=r"different calls.*explain"):
            weft.explain(good(group))
    else:
        with pytest.raises(weft.WeftError, match=r"different calls.*sparse_all_reduce"):
            weft.sparse_all_reduce(good(group))
    total = weft.sparse_all_reduce(good(group))
    assert total.values[total.indices == 5].eq(group.size).all()


@pytest.mark.parametrize("values", [torch.ones(2), torch.ones(2, 3)])
def test_a_pair_in_the_wrong_order_is_told_of(values):
    with (
        weft.init(),
        pytest.raises(weft.WeftError, match=r"pass \(indices, values\), in this order"),
    ):
        weft.sparse_all_reduce((values, torch.tensor([3, 1])))


def test_outside_of_a_group_nothing_is_sent():
    with pytest.raises(weft.WeftError, match=r"call weft.init\(\)"):
        weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)))
    with pytest.raises(weft.WeftError, match="str is no group"):
        weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)), group="world")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"op": "mean"}, r"op 'mean' is unknown \(did you mean 'avg'\?\): use one of"),
        ({"op": "summ"}, r"\(did you mean 'sum'\?\)"),
        ({"algorithm": "spilt"}, r"algorithm 'spilt' is unknown \(did you mean 'split'\?\): use"),
        ({"algorithm": "oak"}, r"algorithm 'oak' is unknown: use auto"),
    ],
)
def test_a_mistyped_name_hears_which_was_meant(arguments, says):
    with weft.init(), pytest.raises(weft.WeftError, match=says):
        weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)), **arguments)


@pytest.mark.parametrize("size", [1, 2])
def test_a_list_in_place_of_a_tuple_is_told_so(size):
    def program(group):
        with pytest.raises(weft.WeftError, match=r"pass them as a tuple, \(indices, values\)"):
            weft.sparse_all_reduce([torch.tensor([1]), torch.ones(1)])
        return weft.sparse_all_reduce((torch.tensor([1]), torch.ones(1)))[0].tolist()

    assert run(size, program) == [[1]] * size


def test_the_mean_of_tensors_is_called_avg():
    with weft.init(), pytest.raises(weft.WeftError, match=r"did you mean 'avg'"):
        weft.all_reduce(torch.ones(1), "mean")


OF_TWO_DIMENSIONS = {
    "all_reduce": lambda rows: weft.sparse_all_reduce(rows),
    "a list": lambda rows: weft.sparse_all_reduce([rows, rows]),
    "reduce": lambda rows: weft.sparse_reduce(rows),
    "reduce_scatter": lambda rows: weft.sparse_reduce_scatter(rows),
    "all_gather": lambda rows: weft.sparse_all_gather(rows),
}


@pytest.mark.parametrize("call", OF_TWO_DIMENSIONS)
@spmd(2, 3)
def test_sparse_shapes_of_one_product_differ(group, call):
    """Their rows are counted alike, and stand for others."""
    for shapes in (((6, 2), (4, 3)), ((2, 2, 3), (4, 3)), ((12,), (4, 3))):
        shape = shapes[group.rank == 0]
        where = torch.tensor([[size - 1] for size in shape])
        rows = torch.sparse_coo_tensor(where, torch.ones(1, 2), (*shape, 2), check_invariants=True)
        with pytest.raises(weft.WeftError, match=r"\(4, 3\)"):
            OF_TWO_DIMENSIONS[call](rows)
    weft.barrier()
