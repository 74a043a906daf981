"""`@spmd` and `run`: the body of a test is the program of one rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import WeftError
from ..base.pace import patient
from ..bootstrap.outcome import Outcome, results
from .threads import group, on_groups

TIMEOUT = 90.0  # seconds that one wait on a group may last; long, because the machine may be busy
LIMIT = 120.0  # seconds that a whole body may take on an idle machine


def _on_threads(
    world: tuple[int, float], body: Callable[..., Any], args: Any, kwargs: Any, limit: float
) -> list[Outcome]:
    return on_groups(group(*world), body, args, kwargs, limit=limit)


def _on_processes(
    world: tuple[int, float], body: Callable[..., Any], args: Any, kwargs: Any, limit: float
) -> list[Outcome]:
    from .pool import on_pool  # here: most uses need no processes

    return on_pool(world, body, args, kwargs, limit=limit)


KINDS = {"threads": _on_threads, "processes": _on_processes}
"""What runs a body on ranks, by what these are. weft's own tests add one."""


def run(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    on: str = "threads",
    timeout: float = TIMEOUT,
    limit: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `body(group, *args, **kwargs)` on `size` ranks; return their results in rank order.

    Inside the body `group` is also the default group, so `weft.sparse_all_reduce(rows)` needs no
    `group=`.

    Args:
        size: the number of ranks.
        body: the program of one rank. On "processes" it must be a function at the top of a module,
            and its arguments and results are pickled.
        on: what the ranks are. "threads": threads of this process. "processes": processes, which
            are kept for later runs.
        timeout: seconds that any one wait may last.
        limit: seconds that the whole body may take. Ranks that have not ended then are reported as
            hanging, with their stacks. None: 120, up to four times as many on a busy machine.

    Raises:
        RankFailure: a process died, or ranks hang. It is a `WireError`.
        WeftError: `on` is unknown, or the body cannot be sent to other processes.
        BaseException: what a rank raised, with a note that says which rank. If several raised, the
            error that caused the others.

    Example:
        >>> run(3, lambda group, base: base + group.rank, 10)
        [10, 11, 12]
    """
    __tracebackhide__ = True  # pytest shows where the body failed, not how it was run
    if on not in KINDS:
        raise WeftError(f"ranks run on {' or '.join(KINDS)}, not on {on!r}")
    most = patient(LIMIT) if limit is None else limit
    return results(KINDS[on]((size, timeout), body, args, kwargs, most), on)


def spmd(
    *sizes: int,
    on: Sequence[str] = ("threads", "processes"),
    timeout: float = TIMEOUT,
    limit: float | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a pytest test of the program of one rank; pytest runs it at each size, on each of `on`.

    The first parameter of the body is `group`. Its other parameters are fixtures and parameters of
    pytest's, as in any test. Every rank gets the same values, which are pickled for "processes".

    Args:
        sizes: numbers of ranks.
        on, timeout, limit: as for `run`, but `on` has several.

    Raises:
        WeftError: the first parameter of the body is not `group`.

    ```python
    @pytest.mark.parametrize("op", ["sum", "max"])
    @spmd(1, 2, 3, 4, 7, 8)
    def test_everybody_gets_the_same(group, op):
        ...
    ```
    The tests are named `test_everybody_gets_the_same[sum-threads-4]` and so on, so `-k processes`
    runs those on processes.
    """
    import pytest  # here: everything else in this package works without

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        signature = inspect.signature(body)
        names = list(signature.parameters)
        if names[:1] != ["group"]:
            raise WeftError(
                f"{body.__qualname__} takes ({', '.join(names)}): the body of an spmd test is a "
                "function whose first parameter is group"
            )
        _, *rest = signature.parameters.values()
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(body)
        def test(*, world: tuple[str, int], **arguments: Any) -> None:
            __tracebackhide__ = True
            on, size = world
            run(size, body, on=on, timeout=timeout, limit=limit, **arguments)

        test.__dict__["__signature__"] = signature.replace(
            parameters=[world, *rest], return_annotation=None
        )
        worlds = [pytest.param((kind, size), id=f"{kind}-{size}") for kind in on for size in sizes]
        marked: Callable[..., None] = pytest.mark.parametrize("world", worlds)(test)
        return marked

    return decorate
