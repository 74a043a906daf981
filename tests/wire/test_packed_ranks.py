"""Ranks on hosts of their own, between which messages are packed: results are what they were.

They are processes of this machine with names of hosts of their own, and with links that are said to
be slow; those of the last test are slow.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft import WireError
from weft.kernels import floats
from weft.kernels.compile import compiler
from weft.sparse import ALGORITHMS
from weft.testing import processes, run
from weft.wire import pieces
from weft.wire.pieces import Pace, Packer
from weft.wire.process_group import connect

HERE = Path(__file__).parent
NETLAB = HERE.parents[1] / "tools" / "netlab"
FRESH = {"hierarchical"}  # whose wires among leaders are new, and peers say later what they read


class Slow(Pace):
    """Of links that are slow whatever is seen."""

    def __init__(self):
        super().__init__()
        self.slow = True

    def see(self, line, rate, now):
        pass


def compiled():
    compiler.make(floats.PIECES)
    assert compiler.made(floats.PIECES)


@contextlib.contextmanager
def between_hosts(rank, *, pack=True):
    """What makes ranks of one machine pack; what kinds of messages were, so far."""
    packed, real = [], Packer.begin

    def counted(packer, kind, frames, message):
        packed.append(kind)
        real(packer, kind, frames, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_HOST", f"host{rank}")
        patch.setenv("WEFT_PACK", str(int(pack)))
        patch.setattr(pieces, "Pace", Slow)
        patch.setattr(Packer, "begin", counted)
        yield packed


def both_ways(wire, body):
    """How many messages each call packs, where links are slow; its results are the same without.

    Args:
        wire: of processes on this machine.
        body: given a wire; yields the name of each call and its results.
    """
    compiled()
    counts, found = {}, []
    for pack in (True, False):
        with between_hosts(wire.rank, pack=pack) as packed:
            part = wire.sub(range(wire.size))
            try:
                assert not any(part.lends(peer) for peer in part.peers)
                for name, results in body(part):
                    if pack:
                        counts[name] = counts.get(name, 0) + len(packed)
                    found.append([name, *(each.contiguous() for each in results)])
                    assert pack or not packed, name
                    packed.clear()
            finally:
                part.close()
    half = len(found) // 2
    for (name, *results), (again, *plain) in zip(found[:half], found[half:], strict=True):
        assert name == again and len(results) == len(plain) > 0
        for one, other in zip(results, plain, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            assert torch.equal(bits_of(one), bits_of(other)), name
    return counts


def bits_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def normal(rank, *shape, dtype=torch.float32):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, 3e38, 1.0])
    numbers.view(-1)[:7] = special[: numbers.numel()]
    return numbers.to(dtype)


DTYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]


def every_algorithm(part):
    indices = torch.randperm(3000, generator=torch.Generator().manual_seed(part.rank))[:1500]
    for name, (dtype, wire_dtype) in itertools.product(sorted(ALGORITHMS), DTYPES):
        rows = weft.Rows(indices, normal(part.rank, 1500, 64, dtype=dtype), 3000)
        total = weft.sparse_all_reduce(rows, group=part, algorithm=name, wire_dtype=wire_dtype)
        yield name, [total.indices, total.values]


def algorithms_both_ways(wire):
    counts = both_ways(wire, every_algorithm)
    return sorted(name for name, count in counts.items() if count)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_s_sums_are_what_they_were(size):
    by_rank = run(size, algorithms_both_ways, on="processes")
    packing = set().union(*by_rank)
    assert packing >= set(ALGORITHMS) - FRESH, by_rank


def module_of(rank):
    module = nn.Sequential(nn.Embedding(3000, 64, sparse=True), nn.Linear(64, 900), nn.Linear(9, 5))
    module.to(torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(10 * rank + number, *parameter.shape))
    module.register_buffer("steps", torch.tensor(rank))
    module.register_buffer("narrow", normal(rank, 30_000, dtype=torch.bfloat16))
    module.register_buffer("wide", normal(rank, 3000, dtype=torch.float64))
    module.register_buffer("waves", torch.complex(normal(1, 5000), normal(rank, 5000)))
    module.register_buffer("turned", normal(rank, 200, 100).t())
    return module


def routines(part):
    rank, size = part.rank, part.size
    for dtype in (torch.float32, torch.bfloat16):
        yield str(dtype), [weft.all_reduce(normal(rank, 300, 700, dtype=dtype), group=part)]
    narrow = weft.all_reduce(normal(rank, 200_000), group=part, wire_dtype=torch.bfloat16)
    yield "all_reduce, narrow", [narrow]

    module = module_of(rank)
    weft.sync_params(module, size - 1, part)
    expected, synced = module_of(size - 1).state_dict(), module.state_dict()
    for name, tensor in synced.items():
        assert torch.equal(bits_of(tensor), bits_of(expected[name])), name
    yield "sync_params", list(synced.values())

    for number, parameter in enumerate(module.parameters()):
        parameter.grad = normal(100 * rank + number, *parameter.shape)
    rows = torch.randint(3000, (1, 2000), generator=torch.Generator().manual_seed(rank))
    values, shape = normal(rank, 2000, 64), (3000, 64)
    sparse = torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)
    module[0].weight.grad = sparse
    weft.sync_grads(module, group=part)
    yield "sync_grads", [each.grad.to_dense() for each in module.parameters()]

    shards = [normal(rank + 7 * peer, 10_000 * (peer + 1) + rank, 2) for peer in range(size)]
    got = weft.all_to_all(shards, part)
    for peer, shard in enumerate(got):
        want = normal(peer + 7 * rank, 10_000 * (rank + 1) + peer, 2)
        assert torch.equal(bits_of(shard), bits_of(want))
    yield "all_to_all", got

    to = [torch.randperm(4000, generator=torch.Generator().manual_seed(p)) for p in range(size)]
    got = weft.exchange(normal(rank, 4000, 16), to, part)
    for peer, rows in enumerate(got):
        assert torch.equal(bits_of(rows), bits_of(normal(peer, 4000, 16)[to[rank]]))
    yield "exchange", got


def routines_both_ways(wire):
    return both_ways(wire, routines)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_the_routines_return_is_what_it_was(size):
    by_rank = run(size, routines_both_ways, on="processes")
    packing = {name for counts in by_rank for name, count in counts.items() if count}
    expected = {"torch.float32", "torch.bfloat16", "all_reduce, narrow", "sync_params"}
    assert packing >= expected, by_rank


# ranks that differ


def differing():
    rank = int(os.environ["RANK"])
    if rank == 1:  # as if the environment said so from the start
        compiler.unusable = "WEFT_KERNELS=reference"
    else:
        compiled()
    with between_hosts(rank, pack=rank != 0) as packed:
        wire = weft.init()
        rows = weft.Rows(torch.arange(3000), normal(rank, 3000, 40), 3000)
        found = [
            weft.sparse_all_reduce(rows, algorithm=name).values
            for name in ("split", "ring", "dense")
        ]
        found.append(weft.all_reduce(normal(rank, 200_000)))
        known = {peer: (line.unpacks, line.offered) for peer, line in _lines(wire).items()}
        weft.shutdown()
    return found, len(packed), known


def _lines(wire):
    return wire._connections.mover.lines


def test_ranks_that_do_not_pack_are_not_packed_for():
    """One has WEFT_PACK=0, one WEFT_KERNELS=reference: two are left that pack for each other."""
    said = processes(4, differing)
    for rank, (found, packed, known) in enumerate(said):
        for one, other in zip(found, said[0][0], strict=True):
            assert torch.equal(one, other) or torch.equal(one.isnan(), other.isnan())
        assert (packed > 0) == (rank > 1), (rank, packed)
        for peer, (unpacks, offered) in known.items():
            assert bool(unpacks) == (peer > 1) and bool(offered) == (rank > 1)


def trained(pack):
    compiled()
    rank = int(os.environ["RANK"])
    with between_hosts(rank, pack=pack) as packed:
        weft.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(5000, 64, sparse=True), nn.Linear(64, 2000))
        parallel = nn.parallel.DistributedDataParallel(model)
        weft.ddp.register(parallel)
        for step in range(2):
            model.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            parallel(torch.randint(5000, (64, 20), generator=draw)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad.to_dense()
        weights = [each.detach() for each in model.parameters()]
        weft.shutdown()
    return weights, len(packed)


def test_a_model_under_ddp_learns_the_same():
    (first, some), (second, more) = processes(2, trained, True)
    plain, none = processes(2, trained, False)[0]
    assert some > 0 and more > 0 and none == 0
    for one, two, other in zip(first, second, plain, strict=True):
        assert torch.equal(one, two) and torch.equal(one, other)


# ranks that die

RANKS, VICTIM, COUNT = 3, 1, 1 << 20


def endless_ring(path, rank, how, timeout):
    """Packed messages go round until one rank is killed or stopped in the middle of some."""
    torch.set_num_threads(1)
    before, after = (rank - 1) % RANKS, (rank + 1) % RANKS
    with between_hosts(rank) as packed:
        wire = connect(dist.FileStore(path, RANKS), rank, RANKS, timeout)
        right, number = True, 0
        try:
            while True:
                own, other = normal(rank, COUNT) + number, torch.empty(COUNT)
                step = COUNT // 4
                posted = [
                    wire.post([(after, own[at : at + step])], [(before, other[at : at + step])])
                    for at in range(0, COUNT, step)
                ]
                for pending in posted:
                    pending.wait()
                right &= torch.equal(other, normal(before, COUNT) + number)
                number += 1
                if number == 3 and rank == VICTIM:
                    threading.Timer(0.01, os.kill, (os.getpid(), how)).start()
        except WireError as error:
            return {"culprit": error.culprit, "right": right, "packed": len(packed) > 0}


def test_everybody_names_a_rank_that_dies_or_freezes_among_packed_messages(survivors):
    compiled()
    said = survivors(endless_ring, RANKS, VICTIM)
    assert len(said) == 2 * (RANKS - 1)
    for case, words in said.items():
        assert words == {"culprit": VICTIM, "right": True, "packed": True}, case


@pytest.mark.network
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2",
)
def test_a_slow_link_carries_fewer_bytes_than_are_sent():
    command = [sys.executable, str(NETLAB), "-n", "2", "--rate", "1gbit", "--timeout", "100", "--"]
    ran = subprocess.run(
        [*command, sys.executable, str(HERE / "packed_host.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = [json.loads(line.partition("] ")[2]) for line in ran.stdout.splitlines() if "{" in line]
    assert len(said) == 2 and all(each["right"] for each in said)
    for each in said:
        assert each["counted"][-1] < 0.9 * each["nbytes"], each  # with headers of packets
