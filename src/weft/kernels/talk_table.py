"""What lies where in the tables of `talk_loops`, all of int64; `cpu_talk` makes them.

A *frame* is a message as it travels: 8 bytes of its length, 8 that number the call, and the rest.
A *table* has a row for each peer, or for each message, and two numbers more, which are scratch. A
*step* moves one box of a tensor. A *record* says how to read the memory of another process. A
*pipe* is memory that two processes share: one puts bytes into it, the other takes them out
(`weft.wire.pipe`).
"""

from __future__ import annotations

__all__ = [
    "ADD",
    "ARENA",
    "AT",
    "BYTES",
    "COPY",
    "COUNTS",
    "DONE",
    "FD",
    "FRAME",
    "FROM",
    "GOT",
    "GUARD",
    "HERE",
    "INWARD",
    "IN_X",
    "IN_Y",
    "IN_Z",
    "LENDER",
    "LENGTH",
    "LIKE",
    "MESSAGE",
    "MODEL",
    "OUTWARD",
    "PIPE",
    "PLACE",
    "PUT",
    "READ",
    "RECORD",
    "ROW",
    "SEEN",
    "SENT",
    "SIZE",
    "SLEEPS",
    "SPANS",
    "STEP",
    "TAKEN",
    "TELL",
    "TO",
    "VIA",
    "WAITS",
    "WANT",
    "WIDTH",
    "ZERO",
]

# what a row of a table has
FD = 0  # the number of the socket, which does not block
FRAME, SIZE, SENT = 1, 2, 3  # the frame to send: its address and bytes; bytes that were sent
PLACE, WANT, GOT = 4, 5, 6  # where to receive one, bytes that are expected; bytes that came
MODEL, LIKE = 7, 8  # address of what is expected to come, and for how many bytes
OUTWARD, INWARD = 9, 10  # addresses of the pipes to this peer and from it; 0: over the socket
ROW = 11

# what a row of a table of messages through pipes has, behind the number of the socket: the pipe's
# address; the message's, or where it goes; its bytes, or at most how many; whether it is through
VIA, AT, LENGTH, DONE, MESSAGE = 1, 2, 3, 4, 5

# what a pipe begins with; each side writes its own half, in a line of the caches of its own
PUT, WAITS = 0, 1  # bytes that were ever put in; whether who puts them in sleeps, for want of room
TAKEN, SLEEPS = (
    8,
    9,
)  # bytes that were ever taken out; whether who takes them sleeps, for want of any
PIPE = 128  # bytes of that; behind it lie
BYTES = 1 << 18  # those under way: byte n at n modulo this. Each message begins at a multiple of 8

# what a step has: what to do, from where to where, and how much
COPY, ZERO, TELL, READ, ADD = range(5)  # the last, and those behind it: in each of `_ADDED`
FROM, TO = 1, 5  # in which tensor; where there; bytes between planes (READ: to skip), and rows
COUNTS, WIDTH = 9, 11  # planes, rows of each; bytes of a row, or elements if they are added
LENDER = 12  # address of the record of whose memory is read
STEP = 13

# what a record of a lender has: process, the address of its guard and the guard itself, and then
GUARD, SEEN, SPANS = 1, 4, 6  # what was seen of it, and iovecs
# and of its arena (`weft.wire.arena`), if that is mapped here: its address there, its bytes or 0,
# its address here, and that of the guard in it
ARENA, RECORD = 14, 18

# in which tensor something lies
HERE, IN_X, IN_Y, IN_Z = range(4)
