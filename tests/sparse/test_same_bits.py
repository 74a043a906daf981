"""The same inputs give the same bits: whatever the link, and with and without machine code."""

from __future__ import annotations

import functools
import hashlib
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft import kernels
from weft.sparse import ALGORITHMS, last_call
from weft.sparse.rate import set_rate
from weft.testing import expected, processes, run
from weft.testing.cases import on_hosts

RANKS = 4
NAMES = ("auto", *sorted(ALGORITHMS))
IN_ORDER = ("gather", "holders", "mask", "split")  # where each rank has a host of its own
HOSTS = ("aaaa", "abcd", "aabb")
RATES = (10, 16, 40, None)  # of the smallest, middling and largest chunks; as calls reached it


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
    return {
        "few": (few, "sum"),
        "some": (some, "sum"),
        "large": (large, "sum"),
        "half": (half, "avg"),
        "function": (large, plus),
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
    return [calls(rank) for rank in range(RANKS)]


def program(group, hosts, rates):
    """For each call and algorithm the bits that it gave, over links of these rates."""
    found = {}
    with on_hosts(group, hosts):
        for (what, (rows, op)), name in product(calls_of_all()[group.rank].items(), NAMES):
            if name == "mask" and op is plus:
                continue  # which it refuses
            bits = found[what, name] = set()
            for rate in rates:
                if rate is not None:
                    set_rate(group, rate + 7 * group.rank if rate == 10 else rate)
                total = weft.sparse_all_reduce(rows, op, algorithm=name)
                bits.add((last_call().algorithm, bits_of(total)))
    return found


@functools.cache
def bits_over(hosts, rates=RATES):
    """For each call and algorithm what ran, and its bits: of all ranks and rates together."""
    calls_of_all()  # once, not on each thread
    of_ranks = run(RANKS, program, hosts, rates)
    return {case: set().union(*(found[case] for found in of_ranks)) for case in of_ranks[0]}


@pytest.mark.parametrize("hosts", HOSTS)
def test_whatever_the_link(hosts):
    for case, bits in bits_over(hosts).items():
        assert len(bits) == 1, case


def plain_bits():
    """The same in a process without machine code, for one rate."""
    return kernels.describe(), {hosts: bits_over(hosts, RATES[1:2]) for hosts in HOSTS}


def test_with_and_without_machine_code():
    ((serves, plain),) = processes(1, plain_bits, env={"WEFT_KERNELS": "reference"})
    assert serves.startswith("torch operations (WEFT_KERNELS=reference)")
    assert kernels.describe().startswith("numba")
    for hosts in HOSTS:
        assert plain[hosts] == bits_over(hosts)


def test_ranks_are_added_in_their_order():
    """By those that came with the opening, too, and by all on one host."""
    for hosts, names in (("abcd", IN_ORDER), ("aaaa", (*IN_ORDER, "auto"))):
        found = bits_over(hosts)
        for what in calls(0):
            ran = [found[what, name] for name in names if (what, name) in found]
            assert len({bits for each in ran for _, bits in each}) == 1, (hosts, what)
    assert bits_over("abcd")["few", "auto"] == bits_over("aaaa")["few", "auto"]
    parts = [each["large"][0] for each in calls_of_all()]
    assert bits_of(expected(parts)) in {bits for _, bits in bits_over("abcd")["large", "gather"]}


def test_data_on_which_algorithms_differ():
    """Else these tests could not fail."""
    apart, pairs = bits_over("abcd"), bits_over("aabb")
    for what in calls(0):
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
    with weft.init() as group, on_hosts(group, "abcd"):
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


def test_a_training_on_other_wires_and_links():
    slow = processes(RANKS, trained, env={"WEFT_LINK": "0.01"})
    quick = processes(RANKS, trained, env={"WEFT_LINK": "100", "WEFT_WIRE": "torch"})
    assert len({*slow, *quick}) == 1
