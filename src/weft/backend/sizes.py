"""What ranks compare of the tensors of a call: dtypes and sizes, and the sizes of each pair."""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Sequence

from torch import Tensor

from ..base.errors import summed_up
from ..call.terms import MODULUS
from ..group.group import Group

_MOST = 200  # characters of sizes that ranks compare as text; longer texts by a digest


def fields_of(*lists: Sequence[Tensor]) -> dict[str, object]:
    """The dtype of each list of tensors, and the sizes of all, as a fingerprint."""
    dtypes = [tensors[0].dtype for tensors in lists if tensors]
    if len({*dtypes}) < 2:
        dtypes = dtypes[:1]
    sizes = as_text([tensor.numel() for tensors in lists for tensor in tensors])
    return {"dtype": as_text(dtypes) if dtypes else None, "sizes": sizes}


def as_text(values: Sequence[object]) -> str:
    """Values as a text that ranks can compare."""
    text = ", ".join(map(str, values))
    return summed_up(text, _MOST, f"{text[:20]} ... of {len(values)}")


def summand(group: Group, counts: Sequence[int]) -> int:
    """This rank's summand of a sum over all ranks, which is 0 if outputs have the sizes of their
    inputs, and else with a probability of 2^-56 at most.

    So all pairs are compared in the opening, and only after an error ranks tell their sizes.
    """
    weighted = zip(_weights(group.rank, group.size), counts, strict=False)
    return sum(weight * count for weight, count in weighted) % MODULUS


@functools.lru_cache(maxsize=64)  # calls ask again and again
def _weights(rank: int, size: int) -> list[int]:
    """By what a rank multiplies the counts that it sends to each, then those it takes from each.

    The ends of a pair have the same weight with opposite signs: equal counts add up to 0.
    """
    sends = [_weight(rank, peer) for peer in range(size)]
    takes = [-_weight(peer, rank) for peer in range(size)]
    return sends + takes


def _weight(source: int, target: int) -> int:
    """A number of 56 bits, as if drawn, and the same on every rank."""
    pair = struct.pack("<2q", source, target)
    return int.from_bytes(hashlib.blake2b(pair, digest_size=7).digest(), "little")


def unequal(group: Group, counts: Sequence[int]) -> str:
    """The error of an output that is not as large as its input; collective, the same everywhere."""
    size = group.size
    form = struct.Struct(f"<{2 * size}q")
    counts_of_all = group.all_gather_bytes(form.pack(*counts), form.unpack, "its sizes")
    for source, target in itertools.product(range(size), repeat=2):
        sends = counts_of_all[source][target]
        takes = counts_of_all[target][size + source]
        if sends != takes:
            return (
                f"rank {source} has {sends} elements for rank {target}, which has room for {takes} "
                "from it: split sizes must match"
            )
    raise AssertionError("sizes that all match add up to 0")
