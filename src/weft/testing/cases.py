"""Many cases in one group of ranks: what goes wrong in one says in which, and on which hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..group.group import Group


@contextmanager
def in_case(*case: object) -> Iterator[None]:
    """A block for one of several cases, which are tried one after the other in one group of ranks.

    To start a group takes longer than most calls, so tests try many cases in one. Whatever is
    raised in the block, by weft or by an assert, gets a note that names the case.

    Args:
        case: what the case is, in one or more parts.

    Example:
        >>> try:
        ...     with in_case("sum", 3):
        ...         raise ValueError("wrong")
        ... except ValueError as error:
        ...     error.__notes__
        ["in the case 'sum', 3"]
    """
    __tracebackhide__ = True  # pytest shows where the body failed
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(repr, case))}")
        raise


@contextmanager
def on_hosts(group: Group, names: Sequence[str]) -> Iterator[None]:
    """A block in which the ranks of a group are on hosts of these names, one for each rank.

    Ranks of a test share one machine; what they do between hosts is tried so.

    Example:
        >>> from weft.testing import run
        >>> def program(group):
        ...     with on_hosts(group, "aab"):
        ...         return group.hosts
        >>> run(3, program)[0]
        ('a', 'a', 'b')
    """
    before = group.session.hosts
    group.session.hosts = tuple(names)
    try:
        yield
    finally:
        group.session.hosts = before
