"""The same inputs give the same bits: over any link, with any kernels."""

from __future__ import annotations

import functools
import hashlib
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from cases import on_hosts, set_rate
from weft import kernels
from weft.sparse import ALGORITHMS, last_call
from weft.testing import expected, processes, run

RANKS = 4
MOST = 8  # ranks
NAMES = ("auto", "plain", *sorted(ALGORITHMS))
FAMILY = (weft.sparse_reduce, weft.sparse_reduce_scatter)
# where each rank has a host of its own
IN_ORDER = ("gather", "holders", "split", "sparse_reduce")
HOSTS = ("aaaa", "abcd", "aabb", "abbb")
SOME_HOSTS = HOSTS[1:3]  # for what takes a second each
PAIRS = "aabb"
OF_OTHER_SIZES = ("ab", "abb", "aabbccd", "aaaabbbb", "abcdefgh")
RATE = 16  # of middling chunks
LOW, HIGH = 10, 40  # of the smallest and the largest


def plus(left, right):
    return left + right


def part(rank, count, dtype=torch.float32):
    """Rows of normal values, of which most are several ranks'."""
    draw = torch.Generator().manual_seed(rank)
    indices = torch.randperm(count * 3 // 2, generator=draw)[:count]
    values = torch.randn(count, 64, generator=draw).to(dtype)
    return weft.Rows(indices, values, 3 * count)


def calls(rank):
    """Rows and op of each call: some fit in the opening, some are little, some are large."""
    few, some, large = (part(rank, count) for count in (100, 700, 2500))
    # ranks 0 and 3 have the same, which come to nothing: what is lost beside them is seen
    half = part(rank % 3, 2500, torch.bfloat16)
    half.values.mul_({0: 2.0**20, 3: -(2.0**20)}.get(rank, 1.0))
    lacking = part(rank, 900)
    if rank % 3 == 1:
        lacking = weft.Rows(lacking.indices[:0], lacking.values[:0], lacking.height)
    return {
        "few": (few, "sum"),
        "some": (some, "sum"),
        "large": (large, "sum"),
        "half": (half, "avg"),
        "function": (large, plus),
        "none of some": (lacking, "sum"),
        "list": ([some, few, half], "sum"),
    }


def bits_of(total):
    """The bits of a result, in short."""
    tables = total if isinstance(total, list) else [total]
    found = hashlib.sha256()
    for rows in tables:
        found.update(rows.indices.numpy().tobytes())
        found.update(rows.values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@functools.cache
def calls_of_all():
    return [calls(rank) for rank in range(MOST)]


def calls_in(group):
    """Of more than four ranks two calls; the list has what is little, too."""
    own = calls_of_all()[group.rank]
    return own if group.size <= RANKS else {what: own[what] for what in ("large", "list")}


def program(group, hosts, rate):
    """For each call and algorithm what ran, and the bits that it gave, over links of a rate.

    Also of what rank 0 gets of the rest of the family.
    """
    found = {}
    names = [name for name in NAMES if name != "holders" or kernels.is_compiled()]
    with on_hosts(group, hosts):
        for (what, (rows, op)), name in product(calls_in(group).items(), names):
            if op is plus and name not in ("auto", "plain"):
                continue
            set_rate(group, rate + 7 * group.rank if rate == LOW else rate)
            total = weft.sparse_all_reduce(rows, op, algorithm=name, group=group)
            found[what, name] = {(last_call(group).algorithm, bits_of(total))}
        for what, (rows, op) in calls_in(group).items():
            for reduce in FAMILY if what != "list" else ():
                part = reduce(rows, op, group=group)
                found[what, reduce.__name__] = {("", bits_of(part))} if group.rank == 0 else set()
    return found


@functools.cache
def bits_over(hosts, rate=RATE):
    """For each call and algorithm what ran, and its bits: of all ranks together."""
    calls_of_all()  # once, not on each thread
    return together(run(len(hosts), program, hosts, rate))


def together(of_ranks):
    return {case: set().union(*(found[case] for found in of_ranks)) for case in of_ranks[0]}


@pytest.mark.parametrize("hosts", [*HOSTS, *OF_OTHER_SIZES])
def test_whatever_the_link(hosts):
    # those of one host have chunks of one length
    rates = [LOW, HIGH] if hosts in SOME_HOSTS else [LOW]
    found = [bits_over(hosts), *(bits_over(hosts, rate) for rate in rates)]
    for case, bits in together(found).items():
        assert len(bits) == 1, case


def plain_bits():
    """The same in a process without machine code."""
    return kernels.describe(), bits_over(PAIRS)


def test_with_and_without_machine_code():
    ((serves, plain),) = processes(1, plain_bits, env={"WEFT_KERNELS": "reference"})
    assert serves.startswith("torch operations (WEFT_KERNELS=reference)")
    assert kernels.describe().startswith("numba")
    both = bits_over(PAIRS)
    assert plain == {case: both[case] for case in both if case[1] != "holders"}


def test_ranks_are_added_in_their_order():
    """By those that came with the opening, too, and by all on one host."""
    for hosts, names in (("abcd", IN_ORDER), ("aaaa", (*IN_ORDER, "auto"))):
        found = bits_over(hosts)
        for what in calls(0):
            ran = [found[what, name] for name in names if (what, name) in found]
            assert len({bits for each in ran for _, bits in each}) == 1, (hosts, what)
    assert bits_over("abcd")["few", "auto"] == bits_over("aaaa")["few", "auto"]
    parts = [each["large"][0] for each in calls_of_all()[:RANKS]]
    assert bits_of(expected(parts)) in {bits for _, bits in bits_over("abcd")["large", "gather"]}


def test_data_on_which_algorithms_differ():
    """Else these tests could not fail."""
    apart, pairs = bits_over("abcd"), bits_over("aabb")
    for what in {what for what, _ in apart} - {"function"}:
        ((_, flat),) = apart[what, "split"]
        ((_, in_pairs),) = pairs[what, "split"]
        ((_, doubled),) = apart[what, "doubling"]
        assert flat not in (in_pairs, doubled), what
    ran = {what: {name for name, _ in apart[what, "auto"]} for what in calls(0)}
    assert ran["few"] == {"eager"} and ran["some"] == {"doubling"} and ran["large"] == {"holders"}


class Towers(nn.Module):
    """Tables of which one is little and the others large, before layers of as many buckets."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(height, 64, sparse=True) for height in (400, 4000, 3000)
        )
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in self.tables)

    def forward(self, words):
        looked_up = (table(words % len(table.weight)) for table in self.tables)
        return sum(layer(rows) for layer, rows in zip(self.layers, looked_up, strict=True)).tanh()


def trained():
    """The bits of a model after some steps with DistributedDataParallel."""
    with weft.init() as group, on_hosts(group, "aabb"):
        torch.manual_seed(0)
        towers = Towers()
        model = DistributedDataParallel(towers, bucket_cap_mb=0.02)
        weft.ddp.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + group.rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(4000, (3000,))).sum().backward()
            optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in towers.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def test_a_training_on_other_links():
    slow = processes(RANKS, trained, env={"WEFT_LINK": "0.01"})
    quick = processes(RANKS, trained, env={"WEFT_LINK": "100"})
    assert len({*slow, *quick}) == 1
