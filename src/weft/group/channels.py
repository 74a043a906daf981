"""The channels of messages: the one table. Posts match by pair of ranks, channel and order.

Numbers below `OWN` are those of algorithms, a program's included: one runs at a time. What may run
beside an algorithm, or beside the opening of the next call, has a channel of its own.
"""

from __future__ import annotations

OWN = 1 << 16
"""The first of weft's own."""

LISTS = 0
"""Index lists, and the messages of an algorithm that has one kind."""

VALUES = 1
"""Rows on their way to who sums them, or to all."""

SUMS = 2
"""What was summed, on its way to all."""

OPENINGS = OWN
"""What opens a call, between hosts. On it alone, and in meetings within a host, does what ranks of
different groups say meet: there ranks that are in calls of different groups learn that they are
(`weft.call.opening`)."""

SMALL = OWN + 1
"""Small messages inside a call: lengths, heads of index lists."""

SCATTERS = (OWN + 2, OWN + 3)
"""Parts of a dense reduction on their way to who adds them; reductions alternate between two."""

GATHERS = (OWN + 4, OWN + 5)
"""Their sums, on their way to all."""

CHAIN = OWN + 6
"""What goes along a chain of ranks."""

TENSORS = OWN + 7
"""Tensors of `weft.all_to_all` and `weft.exchange`."""

LAYERS = OWN + 8
"""Boxes of tensors that layers move."""

VERBS = OWN + 9
"""What verbs move, where posts carry them."""
