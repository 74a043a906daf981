"""The fingerprint of a call: the fields that must be equal on all ranks.

A rank states its call, the ranks that make it, and the arguments that must be equal: a name and a
value each, as text. A value may be unknown to it, as the row shape is to a rank without rows: this
agrees with every other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..base.arguments import printable

UNKNOWN = "?"
"""The value of a field that a rank does not know."""

CALL = "call"
"""The name of the first field, whose value is that of the call."""

_MEMBERS = "ranks"  # the name of the second
# as they travel, what stands between fields, and between the name and the value of a field
_FIELD, _VALUE = "\x1d", "\x1e"
_KEPT = 1 << 10  # fingerprints that are kept as they travel: training makes the same calls

Fields = tuple[tuple[str, str], ...]
"""A fingerprint: name and value of each field; the call and its ranks (`Group.members`) first."""


def fingerprint(call: str, members: str, fields: Mapping[str, object]) -> Fields:
    """The fingerprint of a call, with its arguments by name; None is unknown."""
    arguments = [(k, UNKNOWN if value is None else str(value)) for k, value in fields.items()]
    return _printable(((CALL, call), (_MEMBERS, members), *arguments))


@functools.lru_cache(_KEPT)
def _printable(fields: Fields) -> Fields:
    """The same fields, of which each value can be read."""
    return tuple((name, printable(value)) for name, value in fields)


@functools.lru_cache(_KEPT)
def encoded(fields: Fields) -> bytes:
    """A fingerprint as it travels."""
    return _FIELD.join(f"{name}{_VALUE}{value}" for name, value in fields).encode()


@functools.lru_cache(_KEPT)
def fields_in(text: str) -> Fields:
    """What `encoded` made that of, decoded; raises ValueError if it was not."""
    fields = tuple((name, value) for name, value in (s.split(_VALUE) for s in text.split(_FIELD)))
    names = [name for name, _ in fields[:2]]
    if names != [CALL, _MEMBERS]:
        raise ValueError(f"it states {names}")
    return fields
