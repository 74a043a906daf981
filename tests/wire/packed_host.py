"""One host's part in the test of a link that is slow: `test_packed_ranks` runs it in a netlab.

Prints a line of JSON: bytes that its interface sent each time that the ranks swap numbers, and how
many these have.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

import weft
from weft.kernels import floats
from weft.kernels.compile import compiler

COUNT, CHUNKS = 1 << 21, 16
ROUNDS = 6  # in the first of which links may not be known to be slow


def gone() -> int:
    """Bytes that eth0 of this namespace has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise OSError("this host has no eth0")


def numbers(rank: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))


def main() -> None:
    torch.set_num_threads(1)
    compiler.make(floats.PIECES)
    wire = weft.init()
    peer, right = 1 - wire.rank, True
    own, theirs, place = numbers(wire.rank), numbers(peer), torch.empty(COUNT)
    counted = []
    for _ in range(ROUNDS):
        weft.barrier()
        before = gone()
        chunks = zip(own.chunk(CHUNKS), place.zero_().chunk(CHUNKS), strict=True)
        posted = [wire.post([(peer, chunk)], [(peer, into)]) for chunk, into in chunks]
        for pending in posted:
            pending.wait()
        weft.barrier()
        counted.append(gone() - before)
        right &= torch.equal(place, theirs)
    said = {"right": right, "counted": counted, "nbytes": own.nbytes}
    os.write(1, f"{json.dumps(said)}\n".encode())  # whole, though others write at the same time
    weft.shutdown()


if __name__ == "__main__":
    main()
