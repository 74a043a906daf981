"""The algorithms by name: what `algorithm=` may be, and what `auto` chooses from.

To add an algorithm, write `sparse/algorithms/x.py` with one decorated function, import it in
`sparse/algorithms/__init__.py` and describe it in `docs/algorithms.md`. Tests, selector, bench and
`explain` find it here. An algorithm outside of weft registers in the same way, by `weft.algorithm`.
An installed package offers its algorithms as entry points of the group `weft.algorithms`; they are
imported when algorithms are looked up for the first time.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from ..base.arguments import in_words, shown
from ..base.errors import WeftError, meant, summed_up, there_are
from .rows import Rows
from .sizes import Sizes

if TYPE_CHECKING:
    from .call import Call
    from .local_rows import LocalRows
    from .traffic import Traffic

ALONE = "alone"
"""What "runs" where the group is one rank."""

EAGER = "eager"
"""What runs where all rows travelled in the opening exchange."""

ENTRY_POINTS = "weft.algorithms"
"""The group of entry points by which installed packages offer algorithms."""

_FIELD = 200  # bytes of the fingerprint for the names of a program's own algorithms
_NOT_NAMES = ("auto", ALONE, EAGER)  # what else `algorithm=` and records say

_log = logging.getLogger("weft")

Schedule = Callable[["LocalRows", "Call"], Rows]
"""One rank's program: its rows in, the canonical sum out, in memory from `call.result`."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One registered algorithm.

    Attributes:
        name: what `algorithm=` says.
        run: the schedule.
        applies: None, or why it cannot serve a call of such sizes.
        traffic: what the average rank sends in such a call, given the rows of its result; None:
            nobody has said.
        workspace: bytes that it needs at most, beside the rank's own rows and the result; None:
            nobody has said.
        replaced: the algorithm that had this name before, which `unregister` brings back.
    """

    name: str
    run: Schedule
    applies: Callable[[Sizes], str | None]
    traffic: Callable[[Sizes, int], Traffic] | None
    workspace: Callable[[Sizes], int] | None
    replaced: Algorithm | None = None

    @property
    def builtin(self) -> bool:
        """Whether it is one of weft's own."""
        return self.run.__module__.startswith(_OWN)


_OWN = f"{__package__}.algorithms."


def _always(sizes: Sizes) -> None:
    return None


class Registry(Mapping[str, Algorithm]):
    """The algorithms by name, those of installed packages included.

    `algorithm` adds to it, `unregister` removes.

    Attributes:
        changes: how often it has changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._registered: dict[str, Algorithm] = {}
        self._missing: dict[str, str] = {}  # offered by a package, and why it is not here
        self._lock = threading.RLock()  # again by the same thread: a package registers while read
        self._is_reading = False
        self._is_read = False

    def __getitem__(self, name: str) -> Algorithm:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def add(self, added: Algorithm) -> None:
        """Enter an algorithm, in place of another of its name."""
        with self._lock:
            self._registered[added.name] = added
            self.changes += 1

    def remove(self, name: str) -> None:
        """Remove the algorithm of this name, and enter again what it had replaced."""
        with self._lock:
            before = self._registered.pop(name).replaced
            if before is not None:
                self._registered[name] = before
            self.changes += 1

    def loaded(self) -> dict[str, Algorithm]:
        """Those that are here already: no package is imported."""
        return self._registered

    def why_missing(self, name: str) -> str | None:
        """Why an algorithm that a package offers is not here; None if none offers it."""
        self._all()
        return self._missing.get(name)

    def _all(self) -> dict[str, Algorithm]:
        """All of them, after the packages that offer some are imported.

        Other threads wait until all are; a package that looks here while it is imported sees those
        that came before it.
        """
        if not self._is_read:
            with self._lock:
                if not self._is_reading:
                    self._is_reading = True
                    for offer in entry_points(group=ENTRY_POINTS):
                        self._load(offer)
                    self._is_read = True
        return self._registered

    def _load(self, offer: EntryPoint) -> None:
        """Import what a package offers, which registers it.

        A package that cannot be imported must not end a call that does not need it. Ranks that
        differ in what they have raise an error that says so, since `spelled` is in the fingerprint.
        """
        why = ""
        try:
            offer.load()
            if offer.name not in self._registered:
                why = f"{offer.value} does not register it"
        except Exception as error:
            why = f"{offer.value} raised {in_words(error)}"
        if why:
            self._missing[offer.name] = why
            _log.warning("algorithm %r of an installed package is missing: %s", offer.name, why)


ALGORITHMS = Registry()
"""All algorithms, by name."""


def algorithm(
    *,
    applies: Callable[[Sizes], str | None] = _always,
    traffic: Callable[[Sizes, int], Traffic] | None = None,
    workspace: Callable[[Sizes], int] | None = None,
    lockstep: bool = False,
    replace: bool = False,
) -> Callable[[Schedule], Schedule]:
    """Register the decorated function as an algorithm, under its own name.

    The function is one rank's program, `schedule(rows, call) -> Rows`. Every rank runs it, for a
    call with `algorithm=` its name; `auto` takes weft's own. Every rank registers the same
    algorithms; where they differ, a call raises on all of them. `weft.testing.check_algorithm`
    tries one. `weft.sparse.unregister` removes it.

    A package that is installed beside weft offers algorithms by entry points of the group
    `weft.algorithms`, `name = "package.module:name"`, whose module registers them. Then they are
    there in every program, and in `weft bench --algorithm`.

    Args:
        applies: None, or in a few words why the algorithm cannot serve a call of such sizes
            (`call.sizes`), which is the error of a call that asks for it; by default it serves all.
        traffic: rounds that the average rank waits for after the opening, messages that it sends
            and bytes that it receives at most (`weft.sparse.Traffic`), given the sizes and the rows
            of the result: `weft.explain` prints them.
        workspace: bytes that it leases at most, beside its own rows and the result, given the
            sizes.
        lockstep: whether it serves wires in rounds, those that are `exact`, and tensors of
            accelerators: both ends know the length of a message before they post it, and both are
            posted before any rank waits, so that all ranks take part in the same rounds
            (`weft.wire.Features`); it makes tensors on `call.device`, and reads none of their
            elements on the host. One that does read them refuses accelerators by `applies`
            (`sizes.staying`).
        replace: take the place of an algorithm that has this name already.

    Raises:
        WeftError: an algorithm of this name is registered, and `replace` is not set; or the name
            has another meaning (auto, alone, eager).

    The schedule is given:

    * `rows`: this rank's. `rows.indices` are sorted and unique; `rows.values`, `[k, *row_shape]`,
      are combined, and rounded to what travels, when they are first asked for. `rows.take` gives
      some of them without the rest.
    * `call`: `group` (among whom), `op`, `row_shape`, `dtype` of values, `wire_index` of indices as
      they travel, `partial` of sums that are not complete, `header` and `sizes` (what all ranks
      said when the call opened), `chunk_rows`. `call.result(count)` is memory for a result of so
      many rows; `call.finish(sums, values)` divides and rounds sums into it.

    It returns the canonical sum, in memory from `call.result`: the same bits on every rank. What it
    posts depends on what all ranks know, never on one rank's data alone. It need not look after
    errors of the caller's functions: none raises inside of it.

    Example:
        >>> import torch, weft
        >>> @weft.algorithm(applies=lambda sizes: None if sizes.row else "rows are empty")
        ... def everything(rows, call):  # all rows of the tensor are in the result
        ...     total = call.result(call.sizes.height)
        ...     total.indices.copy_(torch.arange(call.sizes.height))
        ...     total.values.zero_()
        ...     total.values[rows.indices.long()] = rows.values
        ...     weft.schedules.dense_all_reduce(call.group, total.values, call.op.name).wait()
        ...     return total
        >>> from weft.testing import run
        >>> def program(group):
        ...     mine = torch.tensor([group.rank, 3]), torch.ones(2)
        ...     return weft.sparse_all_reduce(mine, algorithm="everything")
        >>> run(2, program)[0]
        (tensor([0, 1, 2, 3]), tensor([1., 1., 0., 2.]))
        >>> weft.sparse.unregister("everything")
    """

    def serves(sizes: Sizes) -> str | None:
        if sizes.staying and not lockstep:
            return "its schedule is for tensors of the CPU"
        if sizes.lengths_known and not lockstep:
            return "its schedule is not for a wire in rounds, or one that is exact"
        return applies(sizes)

    def register(schedule: Schedule) -> Schedule:
        name = schedule.__name__
        if name in _NOT_NAMES:
            raise WeftError(
                f"algorithm {name!r}: that name has another meaning; use another; "
                f"{there_are(ALGORITHMS.loaded())}"
            )
        before = ALGORITHMS.loaded().get(name)
        if before is not None and not replace:
            whose = "one of weft's own" if before.builtin else f"that of {before.run.__module__}"
            raise WeftError(
                f"algorithm {name!r} is registered already, {whose}: use another name, or "
                f"replace=True to take its place; {there_are(ALGORITHMS.loaded())}"
            )
        ALGORITHMS.add(Algorithm(name, schedule, serves, traffic, workspace, before))
        return schedule

    return register


def unregister(name: str) -> None:
    """Remove an algorithm that `weft.algorithm` registered; one that it had replaced is back.

    Call it on every rank, between the same two calls.

    Args:
        name: of the algorithm.

    Raises:
        WeftError: there is no such algorithm, or it is one of weft's own.

    Example:
        >>> import weft
        >>> @weft.algorithm()
        ... def mine(rows, call):
        ...     raise NotImplementedError
        >>> weft.sparse.unregister("mine")
        >>> "mine" in weft.sparse.ALGORITHMS
        False
    """
    if find(name).builtin:
        raise WeftError(
            f"algorithm {name!r} is one of weft's own, which stay; {there_are(ALGORITHMS)}"
        )
    ALGORITHMS.remove(name)


def find(name: str, where: str = "") -> Algorithm:
    """The algorithm of that name, which stands there (`where` begins an error).

    Raises:
        WeftError: there is none; the text lists what there is.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    why = ALGORITHMS.why_missing(name)
    if why is not None:
        raise WeftError(
            f"{where}algorithm {name!r} of an installed package is missing: {why}; "
            f"{there_are(ALGORITHMS)}"
        )
    known = ", ".join(sorted(ALGORITHMS))
    hint = meant(name, ["auto", *ALGORITHMS])
    raise WeftError(f"{where}algorithm {shown(name)} is unknown{hint}: use auto or one of {known}")


def spelled() -> str:
    """The algorithms beside weft's own, for the fingerprint of a call: all ranks have the same."""
    return _spelled(ALGORITHMS.changes)


@functools.lru_cache(1)
def _spelled(changes: int) -> str:
    own = [found for found in ALGORITHMS.values() if not found.builtin]
    if not own:
        return "weft's own"
    names = ", ".join(sorted(f"{found.name} ({found.run.__qualname__})" for found in own))
    return summed_up(f"weft's own, {names}", _FIELD, f"weft's own and {len(own)} more")
