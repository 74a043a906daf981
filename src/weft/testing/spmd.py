"""`@spmd` and `run`: a test body is one rank's program."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from ..bootstrap.outcome import results
from ..devices import as_device
from ..errors import WeftError
from ..wire.threads import group
from .pace import patient
from .threads import on_wires

TIMEOUT = 90.0  # seconds that one wait on a wire may last: the machine may be busy
LIMIT = 120.0  # seconds for a whole body, on an idle machine; at most: below the suite's own limit


_TRANSPORTS = {"threads": "", "device": "", "processes": "tcp", "torch": "torch"}


def run(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    on: str = "threads",
    timeout: float = TIMEOUT,
    limit: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `body(wire, *args, **kwargs)` on `size` ranks and return their results, in rank order.

    Inside the body `wire` is also the default wire, so `weft.sparse_all_reduce(rows)` needs no
    group.

    Args:
        size: how many ranks.
        body: one rank's program. On processes: a function of a module, with arguments that can
            be pickled.
        on: "threads"; "device": the same, but tensors of the CPU go the way of those on an
            accelerator, by exchanges that must meet; "processes", which are kept from run to run;
            or "torch": the same, with a wire over a process group of torch's
            (`weft.init(transport="torch")`).
        timeout: seconds that one wait on the wire may last.
        limit: seconds that the whole body may take; then it is reported as hanging, with the
            place where each silent rank is. None: two minutes, more where the machine is busy.

    Raises:
        RankFailure: a process died, or ranks hang.
        BaseException: what a rank raised; the cause, if it made others fail too.

    Example:
        >>> run(3, lambda wire, base: base + wire.rank, 10)
        [10, 11, 12]
    """
    __tracebackhide__ = True  # pytest shows where the body failed, not how it was run
    if on not in _TRANSPORTS:
        raise WeftError(f"ranks run on {' or '.join(_TRANSPORTS)}, not on {on!r}")
    most = patient(LIMIT) if limit is None else limit
    if not _TRANSPORTS[on]:
        with as_device() if on == "device" else nullcontext():
            wires = group(size, timeout, device=on == "device")
            return results(on_wires(wires, body, args, kwargs, limit=most), on)
    from .pool import on_pool  # here: most uses need no processes

    key = _TRANSPORTS[on], size, timeout
    return results(on_pool(key, body, args, kwargs, limit=most), on)


def spmd(
    *sizes: int,
    on: Sequence[str] = ("threads", "processes", "torch"),
    timeout: float = TIMEOUT,
    limit: float | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Make a pytest test of one rank's program, run at each size on each transport.

    The body takes `wire`; its other parameters are pytest's, as in any test, and are given
    alike to every rank. On "processes" they travel to other processes, so they must be picklable.
    See `run` for the options.

    ```python
    @pytest.mark.parametrize("op", ["sum", "max"])
    @spmd(1, 2, 3, 4, 7, 8)
    def test_everybody_gets_the_same(wire, op):
        ...
    ```
    The tests are named `test_everybody_gets_the_same[sum-threads-4]` and so on: `-k processes` runs
    those on processes. On "torch", processes whose wire is a process group of torch's, each test
    has one of its sizes only, of up to 4 ranks.
    """
    import pytest  # here: everything else in this package works without

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        signature = inspect.signature(body)
        names = list(signature.parameters)
        if names[:1] != ["wire"]:
            raise WeftError(
                f"{body.__qualname__} takes ({', '.join(names)}): the body of an spmd test is a "
                "function whose first parameter is wire"
            )
        rest = [signature.parameters[name] for name in names[1:]]
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(body)
        def test(*, world: tuple[str, int], **arguments: Any) -> None:
            __tracebackhide__ = True
            transport, size = world
            run(size, body, on=transport, timeout=timeout, limit=limit, **arguments)

        test.__dict__["__signature__"] = signature.replace(
            parameters=[world, *rest], return_annotation=None
        )
        worlds = [
            pytest.param((transport, size), id=f"{transport}-{size}")
            for transport in on
            for size in (_sample(sizes, body.__qualname__) if transport == "torch" else sizes)
        ]
        marked: Callable[..., None] = pytest.mark.parametrize("world", worlds)(test)
        return marked

    return decorate


def _sample(sizes: Sequence[int], name: str) -> list[int]:
    """One of the sizes, or none: always the same for a test of that name."""
    able = [size for size in sizes if size in (1, 2, 4)]
    return [able[zlib.crc32(name.encode()) % len(able)]] if able else []
