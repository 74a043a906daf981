"""What ranks conclude from the statements of all: the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.errors import conclusion
from ..failure.verdict import differing
from .fingerprint import CALL, UNKNOWN
from .statement import Statement


def conclusion_of(statements: Mapping[int, Statement]) -> dict[str, str]:
    """The fields in which statements agree; what some ranks do not know has the others' value.

    Args:
        statements: by rank, as errors call it.

    Raises:
        WeftError: some rank stated an error, of which that of the lowest is raised, or fingerprints
            differ, of which the first field is told: others may follow from that; or some record
            gradients, and others are under `torch.no_grad()`.
    """
    erring = [rank for rank, each in statements.items() if each.error]
    if erring:
        raise conclusion(statements[min(erring)].error.decode(errors="replace"))
    holders: dict[str, dict[str, list[int]]] = {}  # by field and value, the ranks that state it
    for rank, each in statements.items():
        for name, value in each.fields:
            values = holders.setdefault(name, {})
            if value != UNKNOWN:
                values.setdefault(value, []).append(rank)
    for name, values in holders.items():
        if len(values) > 1:
            raise conclusion(_difference(name, values, statements))
    fields = {name: next(iter(values), UNKNOWN) for name, values in holders.items()}
    recording = [rank for rank, each in statements.items() if each.records]
    without = [rank for rank, each in statements.items() if not each.enabled]
    if recording and without:
        raise conclusion(
            f"rank {recording[0]} records gradients of {fields[CALL]}, rank {without[0]} is under "
            "torch.no_grad(): call it under the same mode on every rank"
        )
    return fields


def _difference(
    name: str, values: Mapping[str, Sequence[int]], statements: Mapping[int, Statement]
) -> str:
    """That ranks differ in a field, of which each of these values is stated by some of them."""
    holders = sorted(values.items(), key=lambda held: min(held[1]))
    if name != CALL:
        how = f"the ranks differ in {name}"
        return differing(how, holders, "pass the same on every rank")
    then = "make the same calls in the same order on every rank"
    if any("backward of call" in call for call in values):
        then += ", and add 0 * output.sum() to the loss of a rank that uses no output"
    calls = []
    for call, ranks in holders:
        number = max(statements[rank].number for rank in ranks)
        calls.append((f"{call} (call {number})", ranks))
    return differing("the ranks are in different calls", calls, then)
