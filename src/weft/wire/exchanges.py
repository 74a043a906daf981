"""For tests: CPU tensors go by the exchanges of accelerators, which are checked.

In a schedule for accelerators all ranks must take part in the same exchanges, and each must expect
as many bytes as the others send it (`wire.device`); else NCCL hangs. Here ranks first tell each
other how many bytes they send and expect, and raise if these differ.
"""

from __future__ import annotations

import struct
from itertools import permutations

import torch
from torch import Tensor

from .base import Group
from .device import DeviceWire, Staged

_MARK = b"exchange"  # other messages do not begin so


class Checked(Staged):
    """An exchange over the CPU wire, of which every rank first says what it is about to do."""

    name = "checked"

    def exchange(self, out: Tensor, data: Tensor, came: list[int], goes: list[int]) -> None:
        ranks = range(self._beside.size)
        numbers = struct.Struct(f"<8s{2 * len(ranks)}q")

        def read(message: bytes) -> tuple[int, ...]:
            mark, *said = numbers.unpack(message)
            if mark != _MARK:
                raise ValueError("the rank is not in an exchange")
            return tuple(said)

        mine = numbers.pack(_MARK, *goes, *came)
        said = self._beside.all_gather_bytes(mine, read, "what it exchanges")
        for source, target in permutations(ranks, 2):
            sent, awaited = said[source][target], said[target][len(ranks) + source]
            assert sent == awaited, (
                f"in an exchange rank {source} sends rank {target} {sent} bytes, which awaits "
                f"{awaited}"
            )
        super().exchange(out, data, came, goes)

    def among_some(self) -> Staged:
        return Staged(self._beside)  # who is in none says nothing


def check_exchanges(wire: Group) -> None:
    """Have tensors of the CPU, `as_device`, go over the wire by exchanges that must meet."""
    cpu = torch.device("cpu")
    wire._devices[cpu] = DeviceWire(wire, cpu, Checked(wire))
