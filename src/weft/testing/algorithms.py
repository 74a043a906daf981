"""Does an algorithm of one's own give what every algorithm of sparse all-reduce must give?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.errors import WeftError
from ..group.group import Group
from ..sparse import sparse_all_reduce
from ..sparse.rows import Rows
from .oracle import expected
from .spmd import run

_SIZES = (2, 3, 8)
_CASES = {"rows that most ranks have": (500, 500), "no rows on some ranks": (0, 60)}  # by parity
_CLOSE = 1e-4  # what the order of additions may change of sums of a few numbers around 1


def check_algorithm(algorithm: str) -> None:
    """Try an algorithm of sparse all-reduce on 2, 3 and 8 ranks, which are threads.

    Its sums are held against `expected`; they have the same bits on every rank and in a second
    call; and what is wrong on one rank raises the same on every rank, after which the next call
    works. It needs no pytest.

    Args:
        algorithm: its name.

    Raises:
        AssertionError: the text says in which case, on how many ranks, what is wrong.
        WeftError: no algorithm has this name, or it refuses such rows.

    Example:
        >>> check_algorithm("split")
    """
    for size in _SIZES:
        for case, counts in _CASES.items():
            parts = [_rows(rank, counts[rank % 2]) for rank in range(size)]
            found = run(size, _calls, parts, algorithm)
            _compare(f"{case}, {size} ranks", found, expected(parts))


def _rows(rank: int, count: int) -> Rows:
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randint(300, (count,), generator=draw)
    return Rows(indices, torch.randn(count, 5, generator=draw), 300)


def _calls(group: Group, parts: Sequence[Rows], algorithm: str) -> tuple[list[Rows], str]:
    """The results of two calls, and the text of an error between them."""
    rows = parts[group.rank]
    wrong = Rows(torch.tensor([-1]), torch.ones(1, 5)) if group.rank == 1 else rows
    first = sparse_all_reduce(rows, algorithm=algorithm, group=group)
    text = "nothing"
    try:
        sparse_all_reduce(wrong, algorithm=algorithm, group=group)
    except WeftError as error:
        text = str(error)
    return [first, sparse_all_reduce(rows, algorithm=algorithm, group=group)], text


def _compare(case: str, found: Sequence[tuple[list[Rows], str]], wanted: Rows) -> None:
    (first, _), told = found[0]
    for rank, (results, text) in enumerate(found):
        for rows in results:
            assert torch.equal(rows.indices, wanted.indices), f"{case}: other rows on rank {rank}"
            for index, row, right in zip(rows.indices, rows.values, wanted.values, strict=True):
                assert torch.allclose(row, right, atol=_CLOSE), (
                    f"{case}: on rank {rank} row {index} is {row.tolist()} for {right.tolist()}"
                )
            assert torch.equal(rows.values, first.values), f"{case}: other bits on rank {rank}"
        assert text == told and "rank 1" in text, (
            f"{case}: what is wrong on rank 1 raises {text!r} on rank {rank}, on rank 0 {told!r}"
        )
