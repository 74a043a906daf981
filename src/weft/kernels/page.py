"""What lies where on the page by which a rank meets others: integers of 64 bits.

`wire.tcp.meeting` says what they are for. They stand here since the machine code of `shared` is
compiled with them, and a process that loads that code does not import Numba.

At the start of a page is the number of its owner's sleep, or 0: it is awake. Then, for each rank of
the wire, the owner's *line* for that rank.
"""

LINE = 128
"""Bytes of a line, and of what comes before the first; two lines of the cache."""

DEPTH = 4
"""Meetings of two ranks that may be begun and not yet read: of so many a line has an entry."""

# On a line for a rank, by the first byte of each:
BEGUN = 0
"""How many meetings with that rank the owner has begun, and left its message for."""

READ = 8
"""How many messages of that rank the owner has copied."""

WANTS = 16
"""The number of the meeting with that rank that the owner sleeps for, or 0."""

ROOM = 24
"""Whether the owner sleeps until that rank has read more, too: 0 or 1."""

ENTRIES = 32
"""The last meetings, number n at n % DEPTH: first byte of the message in the owner's segment, and
its length."""

ENTRY = 16
"""Bytes of an entry."""
