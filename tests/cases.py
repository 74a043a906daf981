"""Many cases in one group of ranks, of hosts and rates, too: what goes wrong says in which.

And a group of torch.distributed's around what needs one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft import Rows, kernels
from weft.group.group import Group
from weft.sparse import rate
from weft.sparse.header import Header
from weft.sparse.rate import GUESS

COMBINE = {  # what torch does with two terms, by the name of an operation
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@contextmanager
def in_case(*case: object) -> Iterator[None]:
    """A block for one of several cases, which are tried one after the other in one group of ranks.

    To start a group takes longer than most calls, so tests try many cases in one. Whatever is
    raised in the block, by weft or by an assert, gets a note that names the case.

    Args:
        case: what the case is, in one or more parts.
    """
    __tracebackhide__ = True  # pytest shows where the body failed
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(repr, case))}")
        raise


@contextmanager
def in_default_group(group: Group, folder: Path, backend: str = "gloo") -> Iterator[None]:
    """A block in which the ranks of a group are torch.distributed's default group.

    That outlives what is made in the block, such as models: one that goes with its model waits for
    a thread that may wait for this one (torch's destructor keeps the interpreter; pytorch#56297).

    Args:
        group: of processes.
        folder: in which the ranks meet.
        backend: of the group.
    """
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, meeting, rank=group.rank, world_size=group.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def on_hosts(group: Group, names: Sequence[str]) -> Iterator[None]:
    """A block in which the ranks of a group are on hosts of these names, one for each rank.

    Ranks of a test share one machine; what they do between hosts is tried so.
    """
    before = group.session.hosts
    group.session.hosts = tuple(names)
    try:
        yield
    finally:
        group.session.hosts = before


def header_of(indices: torch.Tensor, ranks: int = 1, rank: int = 0) -> Header:
    """The header of a rank, of so many, with these indices, sorted and unique."""
    highest = int(indices[-1]) if len(indices) else -1
    return Header(len(indices), highest, GUESS, 1).with_points(indices, ranks, rank)


def set_rate(group: Group, number: int) -> None:
    """Have this rank state a rate of the link from here on, until a call is quicker."""
    group.state[rate.RATE] = number


def exchange(group: Group) -> None:
    """Every rank sends its number to every other one."""
    assert sorted([group.rank, *group.peers]) == list(range(group.size))
    sends = [(peer, torch.tensor([group.rank])) for peer in group.peers]
    got = group.post(sends, [(peer, torch.tensor([-1])) for peer in group.peers]).wait()
    assert [each.item() for each in got] == group.peers


def same(found: Rows | tuple[Tensor, Tensor], want: Rows) -> None:
    """Fails unless two results have the same rows."""
    indices, values = found if isinstance(found, tuple) else (found.indices, found.values)
    assert torch.equal(indices, want.indices)
    assert torch.equal(values, want.values)


def alike(group: Group, *said: Tensor | str) -> None:
    """Fails unless all ranks have the same bits."""
    told = hashlib.sha256()
    for each in said:
        text = each.encode() if isinstance(each, str) else bytes_of(each)
        told.update(text)
    assert len(set(group.all_gather_bytes(told.digest(), bytes))) == 1


def check_stages(done: Any) -> None:
    """Fails unless in a simulated split rows go to the block, its sums to others, and all to it."""
    sizes = done.sizes
    counts = [len(ranks) for ranks in sizes.ranks_of_hosts]
    of_block = min(max(counts) * sizes.mean, done.union)
    between = (len(counts) - 1) * of_block / min(counts)
    values = (sizes.mean + done.union) * sizes.row + between * sizes.partial_row
    indices = 4 * (sizes.mean + done.union + between)
    assert done.bytes <= 1.05 * (values + indices)


def bytes_of(tensor: Tensor) -> bytes:
    """What a tensor holds."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def on_stand_in():
    """Whether rows are sorted and merged as on a device."""
    return not kernels.on_host(torch.empty(0))


def refuses_the_largest_index(call):
    """It stands behind the indices of a rank that has few, on a device."""
    rows = torch.tensor([2**63 - 1]), torch.ones(1)
    with pytest.raises(weft.WeftError, match=f"index {2**63 - 1} is too large for a device"):
        call(rows)
    call((torch.tensor([2**63 - 2]), torch.ones(1)))
