"""The fingerprint of a call: the fields that must be equal on all ranks, and what is said if not.

A rank states its call, the ranks that make it, and the arguments that must be equal: a name and a
value each, as text. A value may be unknown to it, as the row shape is to a rank without rows: this
agrees with every other. Ranks with equal fingerprints are a *cohort*.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..base.arguments import printable
from ..base.errors import conclusion
from ..failure.verdict import NAMED, differing

LONGEST = 1152
"""Bytes that the fingerprint of a rank may have."""

UNKNOWN = "?"
"""The value of a field that a rank does not know."""

# as they travel, what stands between fields (and the numbers of a cohort), between the name and the
# value of a field, and between cohorts
_FIELD, _VALUE, _COHORT = "\x1d", "\x1e", "\x1f"
_CALL, _MEMBERS = "call", "ranks"  # the names of the first two fields
_KEPT = 1 << 10  # fingerprints that are kept as they travel: training makes the same calls

Fields = tuple[tuple[str, str], ...]
"""A fingerprint: name and value of each field; the call and its ranks (`Group.members`) first."""


class Cohort(NamedTuple):
    """Ranks that state the same fingerprint; the first few are named, all are counted. `number` is
    that of the call on the rank that has made most."""

    fields: Fields
    ranks: tuple[int, ...]
    total: int
    number: int

    @property
    def members(self) -> str:
        """The ranks of the call, in words."""
        return self.fields[1][1]

    @property
    def place(self) -> str:
        """Where these ranks are, as a clause."""
        return f"is in call {self.number} ({self.fields[0][1]}) of {self.members}"

    def spelled(self) -> str:
        """As it travels."""
        ranks = ",".join(map(str, self.ranks[:NAMED]))
        return _FIELD.join([_spelled(self.fields), ranks, str(self.total), str(self.number)])


def call_of(name: str, members: str) -> Fields:
    """The fingerprint of a call without its arguments."""
    return ((_CALL, printable(name)), (_MEMBERS, members))


def stated(fields: Mapping[str, object]) -> Fields:
    """Arguments as fields of a fingerprint; None is unknown."""
    values = (UNKNOWN if value is None else printable(str(value)) for value in fields.values())
    return tuple(zip(fields, values, strict=True))


@functools.lru_cache(_KEPT)
def _spelled(fields: Fields) -> str:
    return _FIELD.join(f"{name}{_VALUE}{value}" for name, value in fields)


@functools.lru_cache(_KEPT)
def encoded(fields: Fields) -> bytes:
    """A fingerprint as it travels."""
    return _spelled(fields).encode()


@functools.lru_cache(_KEPT)
def fields_in(text: str) -> Fields:
    """What `encoded` made that of, decoded; raises ValueError if it was not."""
    fields = tuple((name, value) for name, value in (s.split(_VALUE) for s in text.split(_FIELD)))
    names = [name for name, _ in fields[:2]]
    if names != [_CALL, _MEMBERS]:
        raise ValueError(f"it states {names}")
    return fields


def written(cohorts: Sequence[Cohort]) -> bytes:
    """Cohorts as they travel."""
    return _COHORT.join(cohort.spelled() for cohort in cohorts).encode()


def cohorts_in(raw: bytes) -> tuple[Cohort, ...]:
    """What `written` made that of; raises ValueError if it was not."""
    cohorts = []
    for text in raw.decode().split(_COHORT):
        fields, ranks, count, number = text.rsplit(_FIELD, 3)
        if int(number) < 0:
            raise ValueError(f"it is of call {number}")
        named = tuple(map(int, ranks.split(",")))
        cohorts.append(Cohort(fields_in(fields), named, int(count), int(number)))
    return tuple(cohorts)


def joined(cohorts: Iterable[Cohort], most: int) -> tuple[Cohort, ...]:
    """The same, those of equal fingerprints brought together, in at most so many bytes."""
    found: dict[Fields, Cohort] = {}
    for cohort in cohorts:
        found[cohort.fields] = _united(found.get(cohort.fields), cohort)
    kept = tuple(found.values())
    while len(kept) > 1 and len(written(kept)) > most:
        kept = kept[:-1]
    return kept


def _united(some: Cohort | None, more: Cohort) -> Cohort:
    """Two cohorts as one, with the fields of the second."""
    if some is None:
        return more
    ranks, number = some.ranks + more.ranks, max(some.number, more.number)
    return Cohort(more.fields, ranks, some.total + more.total, number)


def agreed_fields(cohorts: Sequence[Cohort]) -> dict[str, str]:
    """The fields on which cohorts agree; what some do not know has the others' value.

    Raises:
        WeftError: they differ.
    """
    differences = _differences(cohorts)
    if differences:
        raise conclusion("; ".join(differences))
    fields: dict[str, str] = {}
    for name, value in (pair for cohort in cohorts for pair in cohort.fields):
        if fields.get(name, UNKNOWN) == UNKNOWN:
            fields[name] = value
    return fields


def _differences(cohorts: Sequence[Cohort]) -> list[str]:
    """A sentence for each field in which ranks differ, up to one that others follow from."""
    holders: dict[str, dict[str, Cohort]] = {}  # by field and value, those that state it
    for cohort in cohorts:
        for name, value in cohort.fields:
            if value != UNKNOWN:
                held = holders.setdefault(name, {})
                held[value] = _united(held.get(value), cohort)
    texts = []
    for name, values in holders.items():
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: min(item[1].ranks))
            how, then = f"the ranks differ in {name}", "pass the same on every rank"
            if name == _CALL:
                how = "the ranks are in different calls"
                then = "make the same calls in the same order on every rank"
                if any("backward of call" in call for call in values):
                    then += ", and add 0 * output.sum() to the loss of a rank that uses no output"
                ordered = [(f"{call} (call {cohort.number})", cohort) for call, cohort in ordered]
            said = [(value, cohort.ranks, cohort.total) for value, cohort in ordered]
            texts.append(differing(how, said, then))
            if name in (_CALL, "tensors"):  # from which other fields follow
                break
    return texts
