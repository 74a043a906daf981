"""The contract of an algorithm of sparse all-reduce: does it give what every algorithm must give?

A clause is a function that runs programs on ranks that are threads, and asserts. Threads find at
once what hangs elsewhere: a deadlock, memory that changes while it is sent, a rank that leaves the
others alone. Most values are small integers, so sums are exact in any order of addition. The
clauses about bits, dtypes and rounding take real numbers.

What an algorithm refuses by `applies` is left out, since the call raises on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import WeftError, WireError, there_are
from ..base.pace import patient
from ..bootstrap.outcome import results
from ..group.group import Group
from ..kernels.ops import DTYPES, OPS
from ..sparse import ALGORITHMS, Algorithm, Sizes, explain, last_call, sparse_all_reduce
from ..sparse.rate import MOST, set_rate
from ..sparse.registry import find
from ..sparse.rows import Rows
from . import threads
from .clauses import Outcome, asked_for, raise_if_broken, title_of, tried
from .oracle import expected
from .spmd import LIMIT, TIMEOUT

SIZES = (2, 3, 4, 5, 6, 7, 8)
"""Numbers of ranks that clauses run on: a group of one runs no algorithm."""

_KINDS = ("few", "duplicates", "many", "identical", "skew", "some empty", "all empty")
_RATES = ((MOST, "a fast link"), (10, "a slow link"))  # where lists are plain, and packed

_REAL = 60  # rows of real numbers of a rank, where many cases are tried
_WIDTH = 32  # floats a row where bytes are counted
_OPENING = 8 << 10  # bytes of a statement without rows
_LEASED = 416 << 10  # bytes leased for each peer by the opening and the first messages of two lists
_TOLERANCE = 0.25  # of what `traffic` says: it does not know who shares rows with whom
_REFUSED = object()  # what a rank returns whose call `applies` refuses

Op = str | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Trial:
    """The algorithm under test, and the groups that it is tried in.

    Attributes:
        name: what `algorithm=` says.
        sizes: numbers of ranks.
    """

    name: str
    sizes: tuple[int, ...]

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.name]

    @property
    def middle(self) -> int:
        """One number of ranks, for clauses with many cases: 3 where that is among the sizes."""
        return 3 if 3 in self.sizes else self.sizes[-1]

    @functools.cached_property
    def spent(self) -> list[tuple[str, list[_Spent]]]:
        """The cases in which traffic is compared: a name, and what the ranks spent. Run once."""
        cases = []
        for size, kind in product(self.sizes, ("identical", "half", "disjoint")):
            if kind == "disjoint" and size > 4:
                continue  # four places between two rows: no more than four ranks can be disjoint
            spent = _spent(self, size, kind)
            if spent:
                cases.append((f"{kind} rows on {size} ranks", spent))
        return cases

    def run(
        self,
        parts: Sequence[Any],
        program: Callable[[Group, Any], Any],
        op: Op = "sum",
        *,
        groups: Sequence[Group] | None = None,
        **options: Any,
    ) -> list[Any]:
        """What `program(group, part)` returns on each rank; nothing if such a call is refused.

        Args:
            parts: what the ranks reduce: rows, a pair, or a list of tables each.
            program: of one rank.
            op, options: of the call.
            groups: of the ranks; None: new ones.
        """

        def on_rank(group: Group) -> Any:
            part = parts[group.rank]
            for table in part if isinstance(part, list) else [part]:
                sizes = explain(table, op, group=group, **options).sizes
                if self.algorithm.applies(sizes) is not None:
                    return _REFUSED
            return program(group, part)

        groups = groups or threads.group(len(parts), TIMEOUT)
        outcomes = threads.on_groups(groups, on_rank, limit=patient(LIMIT))
        return [each for each in results(outcomes, "threads") if each is not _REFUSED]

    def reduce(self, rows: Any, op: Op = "sum", **options: Any) -> Any:
        return sparse_all_reduce(rows, op, algorithm=self.name, **options)

    def compare(
        self,
        case: str,
        parts: Sequence[Rows],
        op: Op = "sum",
        *,
        bound: Tensor | float = 0.0,
        groups: Sequence[Group] | None = None,
        **options: Any,
    ) -> bool:
        """Reduce the parts, one a rank, and compare with the oracle; whether it was not refused."""

        def program(group: Group, rows: Rows) -> Any:
            return self.reduce(rows, op, **options)

        found = self.run(parts, program, op, groups=groups, **options)
        if found:
            wanted = expected(parts, op, **options)
            for rank, result in enumerate(found):
                _compare(f"{case}, rank {rank} of {len(parts)}", result, wanted, bound)
        return bool(found)


_Body = Callable[[_Trial], None]
_CLAUSES: list[tuple[str, _Body]] = []


def _clause(body: _Body) -> _Body:
    """Register a clause; the first line of its docstring is its title."""
    _CLAUSES.append((title_of(body), body))
    return body


def check_algorithm(
    algorithm: str | Callable[..., Any],
    *,
    sizes: Sequence[int] = SIZES,
    clauses: Iterable[int] = (),
) -> list[Outcome]:
    """Try whether an algorithm of sparse all-reduce keeps its contract.

    It runs the algorithm on ranks that are threads of this process, against `expected`: over sizes,
    kinds of rows, dtypes, operations, row shapes and `wire_dtype`; looks for the same bits on every
    rank and in a second call; holds messages, bytes and memory against what it says of them; and
    has ranks err and abort in the middle. Calls that its `applies` refuses are left out. It takes
    some ten seconds, and needs no pytest.

    Args:
        algorithm: the name of a registered algorithm, or its function.
        sizes: numbers of ranks to try, each from 2.
        clauses: the numbers of those to try; none: all.

    Returns:
        What each clause found; all are good.

    Raises:
        AssertionError: some clauses fail; the text lists each with what is wrong.
        WeftError: no such algorithm is registered, no clause has one of these numbers, or a size
            is below 2.

    Example:
        >>> for outcome in check_algorithm("split", sizes=[3], clauses=[1, 2]):
        ...     print(outcome)
         1  every kind of rows gives the documented result, at every size  ok
         2  real numbers give the same bits on every rank, and in a second call  ok
    """
    if min(sizes, default=0) < 2:
        raise WeftError(f"sizes are {list(sizes)}: an algorithm runs on two ranks or more")
    trial = _Trial(_name_of(algorithm), tuple(sizes))
    asked = asked_for(clauses, len(_CLAUSES))
    outcomes = [
        tried(number, title, functools.partial(body, trial))
        for number, (title, body) in enumerate(_CLAUSES, 1)
        if number in asked
    ]
    raise_if_broken(f"algorithm {trial.name!r}", outcomes)
    return outcomes


def _name_of(algorithm: str | Callable[..., Any]) -> str:
    if isinstance(algorithm, str):
        return find(algorithm).name
    for name, found in ALGORITHMS.items():
        if algorithm == found.run:
            return name
    raise WeftError(
        f"algorithm {algorithm!r} is not registered: decorate it with weft.algorithm; "
        f"{there_are(ALGORITHMS)}"
    )


# Rows and results ------------------------------------------------------------------------------


def _rows(
    kind: str,
    rank: int,
    *,
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
) -> Rows:
    """Rows of small integers that follow from the rank's number."""
    seed = 0 if kind == "identical" else rank + 1
    draw = torch.Generator().manual_seed(seed)
    height, count = {
        "few": (40, 12),
        "duplicates": (7, 60),
        "many": (400, 170),
        "identical": (300, 60),
        "skew": (10_000, 300 if rank == 1 else 3),
        "some empty": (50, 20 * (rank % 2)),
        "all empty": (50, 0),
        "long": (20_000, 6_000),
    }[kind]
    indices = torch.randint(height, (count,), generator=draw)
    if kind == "skew":  # nearly all rows at the low end
        indices = indices**2 // height
    # few values but 1 and -1, so that products stay small
    values = torch.randint(-8, 9, (count, *shape), generator=draw)
    values = torch.where(values.abs() > 2, values.sign(), values)
    if dtype in (torch.bool, torch.uint8):
        values = values.abs()
    return Rows(indices.to(index), values.to(dtype), height)


def _real(rank: int, dtype: torch.dtype = torch.float32, count: int = 500) -> Rows:
    """Rows of real numbers, most of whose indices the other ranks have, too."""
    draw = torch.Generator().manual_seed(rank + 1)
    height = count * 3 // 5
    indices = torch.randint(height, (count,), generator=draw)
    return Rows(indices, torch.randn(count, 5, generator=draw).to(dtype), height)


def _far(rows: Rows) -> Rows:
    """The same rows, half of them at indices that do not fit into 32 bits."""
    shift = 1 << 31
    assert rows.height is not None
    half = rows.indices % 2 * shift
    return Rows(rows.indices + half, rows.values, rows.height + shift)


def _even(kind: str, rank: int, size: int) -> Rows:
    """Evenly spread rows in order, so that every owner of a range has the same number."""
    count = 4096 * size
    step = 4
    shift = {"identical": 0, "disjoint": rank % step, "half": rank % 2}[kind]
    return Rows(torch.arange(count) * step + shift, torch.ones(count, _WIDTH), step * count)


def _right(left: Tensor, right: Tensor) -> Tensor:
    """Associative, and not commutative: what the highest rank has."""
    return right


def _bound(parts: Sequence[Rows], op: str, wire_dtype: torch.dtype | None = None) -> Tensor:
    """How far each value of a result may be from that of `expected`, in float64.

    Both add what was rounded once, and round the sum once. So the sums differ by the errors of the
    additions, which depend on their order, and the results by those and one unit in the last place.
    """
    dtype = parts[0].values.dtype
    sent = dtype if wire_dtype is None else min(dtype, wire_dtype, key=lambda each: each.itemsize)
    sums = torch.promote_types(dtype, torch.float32)
    result = expected(parts, op, wire_dtype).values.double()
    if not OPS[op].rounds:
        return torch.zeros_like(result)
    sizes = [replace(rows, values=rows.values.abs()) for rows in parts]
    size = expected(sizes, op, wire_dtype).values.double()
    unit = torch.finfo(sent).eps
    smallest = unit * torch.finfo(sent).smallest_normal
    return unit * result.abs() + 2 * len(parts) * torch.finfo(sums).eps * size + smallest


def _compare(case: str, found: Rows, wanted: Rows, bound: Tensor | float = 0.0) -> None:
    """Assert that a result is the wanted one, and that no value is further off than its bound."""
    assert found.indices.tolist() == wanted.indices.tolist(), (
        f"{case}: the result has {len(found)} rows with other indices than the {len(wanted)} that "
        "the ranks have"
    )
    dtypes = (found.indices.dtype, found.values.dtype)
    assert dtypes == (wanted.indices.dtype, wanted.values.dtype), f"{case}: dtypes are {dtypes}"
    shape = tuple(found.values.shape)
    assert shape == tuple(wanted.values.shape), f"{case}: values have shape {shape}"
    if torch.equal(found.values, wanted.values):
        return
    near = found.values == wanted.values  # infinite ones, too
    near |= (found.values.double() - wanted.values.double()).abs() <= bound
    near |= found.values.isnan() & wanted.values.isnan()
    if not near.all():
        row = int((~near).view(len(near), -1).any(1).nonzero()[0])
        raise AssertionError(
            f"{case}: row {int(found.indices[row])} is {found.values[row].tolist()} and should be "
            f"{wanted.values[row].tolist()}"
        )


def _allocated(count: int, shape: tuple[int, ...], dtypes: Any) -> tuple[Tensor, Tensor]:
    """Memory for a result, as a caller's `out` makes it."""
    index, value = dtypes
    return torch.empty(count, dtype=index), torch.empty(count, *shape, dtype=value)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


# The clauses -----------------------------------------------------------------------------------


@_clause
def sums(trial: _Trial) -> None:
    """every kind of rows gives the documented result, at every size."""
    served = False
    for size in trial.sizes:
        for kind in _KINDS:
            served |= trial.compare(kind, [_rows(kind, rank) for rank in range(size)])
    assert served, "`applies` refuses every call"


@_clause
def bits(trial: _Trial) -> None:
    """real numbers give the same bits on every rank, and in a second call."""

    def program(group: Group, rows: Rows) -> list[Rows]:
        return [trial.reduce(rows) for _ in range(2)]

    for size in trial.sizes:
        found = trial.run([_real(rank) for rank in range(size)], program)
        for rank, calls in enumerate(found):
            first = found[0][0]
            for call, each in enumerate(calls, 1):
                same = _is_same(each.indices, first.indices) and _is_same(each.values, first.values)
                assert same, f"call {call} on rank {rank} of {size} has other bits than rank 0 had"


@_clause
def packed(trial: _Trial) -> None:
    """long index lists arrive, of indices above 2^31, too, and packed, as on slow links."""
    apart = [f"host {rank}" for rank in range(trial.middle)]
    for (rate, where), index in product(_RATES, (torch.int32, torch.int64)):
        groups = threads.group(trial.middle, TIMEOUT, hosts=apart)
        for group in groups:
            set_rate(group, rate)
        parts = [_rows("long", rank, index=index) for rank in range(trial.middle)]
        if index is torch.int64:
            parts = [_far(rows) for rows in parts]
        trial.compare(f"{index} on {where}", parts, groups=groups)


@_clause
def dtypes(trial: _Trial) -> None:
    """every dtype of values and indices is served, in every operation that takes it."""
    for dtype, op in product(DTYPES, OPS):
        if OPS[op].refuses(dtype) is None:
            case = f"{op} of {dtype}"
            if dtype.is_floating_point:
                parts = [_real(rank, dtype, _REAL) for rank in range(trial.middle)]
                bound = _bound(parts, op)
                trial.compare(case, parts, op, bound=bound)
            else:
                parts = [_rows("few", rank, dtype=dtype) for rank in range(trial.middle)]
                trial.compare(case, parts, op)
    parts = [_rows("few", rank, index=torch.int32) for rank in range(trial.middle)]
    trial.compare("indices of torch.int32", parts)


@_clause
def functions(trial: _Trial) -> None:
    """a function that is not commutative gets its operands in rank order, or is refused."""
    for size in trial.sizes:
        parts = [_rows("duplicates", rank) for rank in range(size)]
        trial.compare("a function that returns its right operand", parts, _right)


@_clause
def shapes(trial: _Trial) -> None:
    """every row shape is served, narrow, wide and without elements."""
    for shape in ((), (1,), (2, 3), (0,), (300,)):
        parts = [_rows("few", rank, shape=shape) for rank in range(trial.middle)]
        trial.compare(f"rows of shape {shape}", parts)
    parts = [_rows("long", rank, shape=(256,)) for rank in range(trial.middle)]
    trial.compare("rows that fill many chunks", parts)


@_clause
def heights(trial: _Trial) -> None:
    """pairs without a height, and lists of tables, give the documented results."""
    tables = [[_rows(kind, rank) for kind in ("few", "many")] for rank in range(trial.middle)]
    pairs = [(many.indices, many.values) for _, many in tables]
    wanted = [expected(parts) for parts in zip(*tables, strict=True)]

    def program(group: Group, part: Any) -> Any:
        return trial.reduce(part)

    for indices, values in trial.run(pairs, program):
        found = replace(wanted[1], indices=indices, values=values)
        _compare("a pair without a height", found, wanted[1])
    for listed in trial.run(tables, program):
        for number, (found, right) in enumerate(zip(listed, wanted, strict=True)):
            _compare(f"table {number} of a list", found, right)


@_clause
def rounding(trial: _Trial) -> None:
    """values that travel narrower, or wider, are rounded as documented."""
    travelling = (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    )
    for (dtype, wire_dtype), op in product(travelling, ("sum", "avg", "max")):
        parts = [_real(rank, dtype, _REAL) for rank in range(trial.middle)]
        case = f"{op} of {dtype} with wire_dtype={wire_dtype}"
        bound = _bound(parts, op, wire_dtype)
        trial.compare(case, parts, op, bound=bound, wire_dtype=wire_dtype)


@_clause
def memory(trial: _Trial) -> None:
    """the caller's rows stay as they are, and a result is nobody else's memory."""

    def program(group: Group, rows: Rows) -> None:
        before = rows.indices.clone(), rows.values.clone()
        first = trial.reduce(rows)
        wanted = first.indices.clone(), first.values.clone()
        second = trial.reduce(rows)
        second.indices.fill_(99)
        second.values.fill_(99)
        for name, now, then in (
            ("the indices of the caller's rows", rows.indices, before[0]),
            ("the values of the caller's rows", rows.values, before[1]),
            ("the indices of an earlier result", first.indices, wanted[0]),
            ("the values of an earlier result", first.values, wanted[1]),
        ):
            assert torch.equal(now, then), f"{name} changed on rank {group.rank}"

    for size in trial.sizes:
        trial.run([_rows("many", rank) for rank in range(size)], program)


@_clause
def outs(trial: _Trial) -> None:
    """the result is where the caller wants it."""

    def program(group: Group, rows: Rows) -> None:
        made: list[tuple[Tensor, Tensor]] = []

        def allocate(count: int, shape: tuple[int, ...], dtypes: Any) -> tuple[Tensor, Tensor]:
            made.append(_allocated(count, shape, dtypes))
            return made[-1]

        found = trial.reduce(rows, out=allocate)
        assert len(made) == 1, f"the allocator was called {len(made)} times on rank {group.rank}"
        assert found.values.data_ptr() == made[0][1].data_ptr(), (
            f"rank {group.rank} has its result elsewhere than in the memory of `out`"
        )
        buffers = torch.empty(1000, dtype=torch.int64), torch.empty(1000, 3)
        again = trial.reduce(rows, out=buffers)
        assert again.values.data_ptr() == buffers[1].data_ptr(), (
            f"rank {group.rank} has its result elsewhere than in the buffers of `out`"
        )

    trial.run([_rows("many", rank) for rank in range(trial.middle)], program)


@_clause
def errors(trial: _Trial) -> None:
    """what is wrong on one rank raises on every rank, and the next call works."""

    class Refused(Exception):
        pass

    def refuses(*_: Any) -> Any:
        raise Refused("no memory here")

    def program(group: Group, rows: Rows) -> list[str]:
        negative = Rows(rows.indices - 100, rows.values)
        texts = [
            _text_of(lambda: trial.reduce(negative if group.rank == 1 else rows)),
            _text_of(lambda: trial.reduce(rows, out=refuses if group.rank == 1 else None)),
        ]
        trial.reduce(rows)
        return texts

    found = trial.run([_rows("few", rank) for rank in range(trial.middle)], program)
    for texts in zip(*found, strict=True):
        assert len(set(texts)) == 1, f"ranks raised different errors: {sorted(set(texts))}"
        assert "rank 1" in texts[0], f"the error does not name rank 1: {texts[0]}"


def _text_of(call: Callable[[], object]) -> str:
    """The text of the error that a call raises."""
    try:
        call()
    except WeftError as error:
        return str(error)
    raise AssertionError("a call raised nothing, which was wrong on rank 1")


@_clause
def aborts(trial: _Trial) -> None:
    """an abort in the middle of the schedule ends the call on every rank, by name."""

    def program(group: Group, rows: Rows) -> None:
        def allocate(count: int, shape: tuple[int, ...], dtypes: Any) -> tuple[Tensor, Tensor]:
            if group.rank == 1:
                group.abort("tried by check_algorithm")
            return _allocated(count, shape, dtypes)

        try:
            trial.reduce(rows, out=allocate)
        except WireError as error:
            assert error.culprit == 1, f"rank {group.rank} blames rank {error.culprit}: {error}"
        else:
            raise AssertionError(f"rank {group.rank} did not notice that rank 1 had given up")

    for size in trial.sizes:
        trial.run([_rows("many", rank) for rank in range(size)], program)


class _Spent(NamedTuple):
    """What one rank spent on a call, without the opening exchange.

    Attributes:
        sizes: of the call.
        union: rows of its result.
        messages: that it sent.
        bytes: that it sent.
        peak: bytes that it had leased at most, beyond its own rows.
    """

    sizes: Sizes
    union: int
    messages: int
    bytes: int
    peak: int


def _spent(trial: _Trial, size: int, kind: str) -> list[_Spent]:
    """What each rank spends on a call with evenly spread rows; nothing if it is refused."""

    def program(group: Group, rows: Rows) -> _Spent:
        sizes = explain(rows, algorithm=trial.name).sizes
        pool = group.memory
        pool.peak = pool.lent
        group.traffic.reset()
        result = trial.reduce(rows)
        assert pool.lent == 0, f"rank {group.rank} did not give back {pool.lent} bytes of leases"
        record = last_call(group)
        assert record is not None
        nbytes = sum(each - _OPENING for each in group.traffic.to.values())
        own = len(rows) * sizes.row
        return _Spent(sizes, len(result), record.messages - (size - 1), nbytes, pool.peak - own)

    return trial.run([_even(kind, rank, size) for rank in range(size)], program)


@_clause
def traffic(trial: _Trial) -> None:
    """the average rank sends no more messages and bytes than `traffic` says, if that is given."""
    if trial.algorithm.traffic is None:
        return
    for case, spent in trial.spent:
        said = trial.algorithm.traffic(spent[0].sizes, spent[0].union)
        messages = sum(one.messages for one in spent) / len(spent)
        assert messages <= (1 + _TOLERANCE) * said.messages + 1, (
            f"{case}: {messages:.1f} messages were sent, `traffic` says {said.messages}"
        )
        nbytes = sum(one.bytes for one in spent) / len(spent)
        assert nbytes <= (1 + _TOLERANCE) * said.bytes + _OPENING * len(spent), (
            f"{case}: {nbytes:.0f} bytes were sent, `traffic` says {said.bytes:.0f}"
        )


@_clause
def workspaces(trial: _Trial) -> None:
    """all workspace is given back, and no more is leased than `workspace` says, if it is given."""
    for case, spent in trial.spent:
        # A receive of unknown length is leased for the most that may come, which is much more than
        # comes where all have the same rows. No page is touched that nothing comes into.
        if trial.algorithm.workspace is None or case.startswith("identical"):
            continue
        for rank, one in enumerate(spent):
            said = trial.algorithm.workspace(one.sizes)
            assert one.peak <= said + _LEASED * (len(spent) - 1), (
                f"{case}: rank {rank} leases {one.peak} bytes, `workspace` says {said}"
            )
