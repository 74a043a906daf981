"""What failure detectors say to each other on control links.

A message is a line of JSON, and one of these:

* `verdict`: [culprit, text], once: from whoever settled it, and from each that learns it;
* `bye`: the values of a `Place`, as the last, where there was no verdict: where this rank leaves;
* `data`, and the number `of` the exchange: what a rank exchanges, in base64;
* `ask`: the number of an inquiry, to all, at any time;
* `here`: the values of a `Place`, and `to` which inquiry: to the one that asks.

Links are authenticated, and all ranks have one version, so only a fault of weft's can send anything
else. What cannot be read names the rank that sent it.
"""

from __future__ import annotations

import base64
import json
from dataclasses import astuple, replace
from typing import Any

from .verdict import Entered, Place

Message = dict[str, Any]
UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)  # what `read` raises


def line_of(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def read(line: bytes) -> Message:
    """A message of another rank's detector, without the line's end; `UNREADABLE` if it is none.

    Example:
        >>> read(b'{"verdict": [1, "rank 1 died"]}')
        {'verdict': [1, 'rank 1 died']}
    """
    message: Message = json.loads(line)
    for name in ("bye", "here"):
        if name in message:
            message[name] = place_of(message[name])
    if "data" in message:
        message["data"] = base64.b64decode(message["data"], validate=True)
    return message


def values_of(place: Place) -> list[object]:
    """A place, as `here` and `bye` have it."""
    return list(astuple(place))


def place_of(values: list[Any]) -> Place:
    """The place of `values_of`."""
    place = Place(*values)
    return replace(
        place,
        awaited=tuple(place.awaited),
        entered=place.entered and Entered(*place.entered),
        history=tuple(Entered(*each) for each in place.history),
    )
