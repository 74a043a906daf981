"""What lies where in the tables of `talk_loops`, all of int64; `cpu_talk` makes them.

A *frame* is a message as it travels: 8 bytes of its length, 8 that number the call, and the rest.
A *table* has a row for each peer and two numbers more, which are scratch. A *step* moves one box of
a tensor. A *record* says how to read the memory of another process.
"""

from __future__ import annotations

__all__ = [
    "ADD",
    "COPY",
    "COUNTS",
    "FD",
    "FRAME",
    "FROM",
    "GOT",
    "GUARD",
    "HERE",
    "IN_X",
    "IN_Y",
    "IN_Z",
    "LENDER",
    "LIKE",
    "MODEL",
    "PLACE",
    "READ",
    "RECORD",
    "ROW",
    "SEEN",
    "SENT",
    "SIZE",
    "SPANS",
    "STEP",
    "TELL",
    "TO",
    "WANT",
    "WIDTH",
    "ZERO",
]

# what a row of a table has
FD = 0  # the number of the socket, which does not block
FRAME, SIZE, SENT = 1, 2, 3  # the frame to send: its address and bytes; bytes that were sent
PLACE, WANT, GOT = 4, 5, 6  # where to receive one, bytes that are expected; bytes that came
MODEL, LIKE = 7, 8  # address of what is expected to come, and for how many bytes
ROW = 9

# what a step has: what to do, from where to where, and how much
COPY, ZERO, TELL, READ, ADD = range(5)  # the last, and those behind it: in each of `_ADDED`
FROM, TO = 1, 5  # in which tensor; where there; bytes between planes (READ: to skip), and rows
COUNTS, WIDTH = 9, 11  # planes, rows of each; bytes of a row, or elements if they are added
LENDER = 12  # address of the record of whose memory is read
STEP = 13

# what a record of a lender has: process, the address of its guard and the guard itself, and then
GUARD, SEEN, SPANS, RECORD = 1, 4, 6, 14  # what was seen of it, and iovecs

# in which tensor something lies
HERE, IN_X, IN_Y, IN_Z = range(4)
