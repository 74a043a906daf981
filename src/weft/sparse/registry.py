"""The algorithms by name: what `algorithm=` may be, and what `auto` chooses from.

To add an algorithm, write `sparse/algorithms/x.py` with one decorated function, import it in
`sparse/algorithms/__init__.py` and describe it in `docs/algorithms.md`. Tests, selector, bench and
`explain` find it here. An algorithm outside of weft registers in the same way, by `weft.algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import WeftError
from ..rows import Rows
from .cost import Cost, Load

if TYPE_CHECKING:
    from .call import Call
    from .local_rows import LocalRows

Schedule = Callable[["LocalRows", "Call"], Rows]
"""One rank's program: its rows in, the canonical sum out, in memory from `call.result`."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One registered algorithm.

    Attributes:
        name: what `algorithm=` says.
        run: the schedule.
        cost: what it costs for a load.
        applies: None, or why it cannot serve a load.
        pays: None, or why `auto` does not choose it for a load that it can serve.
    """

    name: str
    run: Schedule
    cost: Callable[[Load], Cost]
    applies: Callable[[Load], str | None]
    pays: Callable[[Load], str | None]


def _always(load: Load) -> None:
    return None


ALGORITHMS: dict[str, Algorithm] = {}


def algorithm(
    *,
    cost: Callable[[Load], Cost],
    applies: Callable[[Load], str | None] = _always,
    pays: Callable[[Load], str | None] = _always,
    stays: bool = False,
) -> Callable[[Schedule], Schedule]:
    """Register the decorated function as an algorithm, under its own name.

    The function is one rank's program, `schedule(rows, call) -> Rows`. Every rank runs it, for a
    call with `algorithm=` its name, and for `auto` where it is predicted to be quickest.

    Args:
        cost: what the average rank does, from the sizes of a call (`Load`): rounds, messages sent,
            bytes received, bytes that go through kernels, workspace (`Cost`). All ranks compute it
            from the same figures, so it must give the same on every machine.
        applies: None, or in a few words why the algorithm cannot serve such a load, which is the
            error of a call that asks for it by name; by default it serves all.
        pays: None, or why `auto` should leave it, though it could serve.
        stays: whether it serves tensors of accelerators, too: it makes tensors on `call.device`,
            reads none of their elements on the host, and both ends of a message are posted before
            any rank waits, so that all ranks take part in the same exchanges (`wire.device`).

    The schedule is given:

    * `rows`: this rank's. `rows.indices` are sorted and unique; `rows.values`, `[k, *row_shape]`,
      are combined, and rounded to what travels, when they are first asked for. `rows.take` gives
      some of them without the rest.
    * `call`: `wire` (among whom), `op`, `row_shape`, `dtype` of values, `wire_index` of indices as
      they travel, `partial` of sums that are not complete, `header` and `load` (what all ranks
      said when the call opened), `chunk_rows`. `call.result(count)` is memory for a result of so
      many rows; `call.finish(sums, values)` divides and rounds sums into it.

    It returns the canonical sum, in memory from `call.result`: the same bits on every rank. What it
    posts depends on what all ranks know, never on one rank's data alone. It need not look after
    errors of the caller's functions: none raises inside of it.

    Example:
        >>> import torch, weft
        >>> def cost(load):
        ...     others, table = load.ranks - 1, load.height * load.row
        ...     received = 2 * others / load.ranks * table
        ...     return weft.sparse.Cost(2, 2 * others, received, merged=table, memory=table)
        >>> @weft.algorithm(cost=cost, applies=lambda load: None if load.row else "rows are empty")
        ... def everything(rows, call):  # all rows of the tensor are in the result
        ...     total = call.result(call.load.height)
        ...     total.indices.copy_(torch.arange(call.load.height))
        ...     total.values.zero_()
        ...     total.values[rows.indices.long()] = rows.values
        ...     call.wire.dense_all_reduce(total.values, call.op.name).wait()
        ...     return total
        >>> from weft.testing import run
        >>> def program(wire):
        ...     mine = torch.tensor([wire.rank, 3]), torch.ones(2)
        ...     return weft.sparse_all_reduce(mine, algorithm="everything")
        >>> run(2, program)[0]
        (tensor([0, 1, 2, 3]), tensor([1., 1., 0., 2.]))
        >>> del weft.sparse.ALGORITHMS["everything"]
    """

    def serves(load: Load) -> str | None:
        if load.staying and not stays:
            return "its schedule is for tensors of the CPU"
        return applies(load)

    def register(schedule: Schedule) -> Schedule:
        name = schedule.__name__
        ALGORITHMS[name] = Algorithm(name, schedule, cost, serves, pays)
        return schedule

    return register


def find(name: str, where: str = "") -> Algorithm:
    """The algorithm of that name, which stands there (`where` begins an error).

    Raises:
        WeftError: there is none; the text lists what there is.
    """
    if name not in ALGORITHMS:
        known = ", ".join(sorted(ALGORITHMS))
        raise WeftError(f"{where}algorithm {name!r} is unknown: use auto or one of {known}")
    return ALGORITHMS[name]
