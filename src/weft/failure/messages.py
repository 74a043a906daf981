"""What failure detectors say to each other on control links.

A message is a line of JSON, and one of these:

* `verdict`: [culprit, text], once: from whoever settled it, and from each that learns it;
* `bye`: the values of a `Place`, as the last, where there was no verdict: where this rank leaves;
* `data`, and the number `of` the exchange: what a rank exchanges, in base64;
* `ask`: the number of an inquiry, to all, at any time;
* `here`: the values of a `Place`, and `to` which inquiry: to the one that asks.

A peer may send anything. So a line is checked before anything is read of it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Set
from dataclasses import astuple
from typing import Any

from .verdict import Entered, Place

Message = dict[str, Any]


def line_of(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes, ranks: Set[int]) -> Message:
    """Read and check a message of another rank's detector.

    Args:
        line: without its end.
        ranks: that there are.

    Raises:
        ValueError, TypeError, OverflowError, RecursionError: it is invalid.

    Example:
        >>> parse(b'{"verdict": [1, "rank 1 died"]}', {0, 1})
        {'verdict': [1, 'rank 1 died']}
    """
    message = json.loads(line)
    _require(isinstance(message, dict))
    check = _CHECKS.get(tuple(sorted(message)))
    if check is None:
        raise ValueError("no message of this kind is known")
    check(message, ranks)
    checked: Message = message
    return checked


def values_of(place: Place) -> list[object]:
    """A place, as `here` and `bye` have it."""
    return list(astuple(place))


def place_of(values: list[Any]) -> Place:
    """The place that a checked message has in `here` or `bye`."""
    calls, doing, awaits, seconds, raised, at, awaited, entered, opens, history, *rest = values
    in_round, elsewhere = rest
    return Place(
        calls,
        doing,
        awaits,
        seconds,
        raised,
        at,
        awaited=tuple(awaited),
        entered=None if entered is None else Entered(*entered),
        opens=opens,
        history=tuple(Entered(*each) for each in history),
        in_round=in_round,
        elsewhere=elsewhere,
    )


def _check_verdict(message: Message, ranks: Set[int]) -> None:
    culprit, text = message["verdict"]
    _require(culprit is None or (_is_number(culprit) and culprit in ranks))
    _require(isinstance(text, str))


def _check_bye(message: Message, ranks: Set[int]) -> None:
    _check_place(message["bye"], ranks)


def _check_data(message: Message, ranks: Set[int]) -> None:
    _require(isinstance(message["data"], str))
    _require(_is_number(message["of"]))
    base64.b64decode(message["data"], validate=True)


def _check_ask(message: Message, ranks: Set[int]) -> None:
    _require(_is_number(message["ask"]))


def _check_here(message: Message, ranks: Set[int]) -> None:
    _require(_is_number(message["to"]))
    _check_place(message["here"], ranks)


def _check_place(values: Any, ranks: Set[int]) -> None:
    calls, doing, awaits, seconds, raised, at, awaited, entered, *rest = values
    opens, history, in_round, elsewhere = rest
    _require(_is_number(calls))
    _require(awaits is None or (_is_number(awaits) and awaits in ranks))
    _require(isinstance(seconds, float) or _is_number(seconds))
    float(seconds)  # which an integer may be too large for
    for text in (doing, raised, at, elsewhere):
        _require(isinstance(text, str))
    _require(
        isinstance(awaited, list) and all(_is_number(rank) and rank in ranks for rank in awaited)
    )
    _require(isinstance(opens, bool) and isinstance(in_round, bool))
    _require(isinstance(history, list))
    for each in history if entered is None else [entered, *history]:
        of_ranks, number, name = each
        _require(isinstance(of_ranks, str) and _is_number(number) and isinstance(name, str))


_CHECKS: dict[tuple[str, ...], Callable[[Message, Set[int]], None]] = {
    ("verdict",): _check_verdict,
    ("bye",): _check_bye,
    ("data", "of"): _check_data,
    ("ask",): _check_ask,
    ("here", "to"): _check_here,
}
"""What checks a message, by its keys in alphabetical order."""


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(is_valid: bool) -> None:
    if not is_valid:
        raise ValueError("a value of the message is of another kind")
