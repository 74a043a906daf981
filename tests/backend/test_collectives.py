"""The collectives over a group: uneven, of every dtype, small and large, and their errors."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from torch import Tensor

import weft
from weft.backend import collectives
from weft.schedules import dense
from weft.testing import run, spmd
from weft.testing.cases import on_hosts

SIZES = (0, 1, 5000, 40_000)  # elements: the last do not go along with an opening
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def on(group, hosts, body, *args):
    """The body on a group whose ranks are on hosts of these names."""
    with on_hosts(group, hosts):
        return body(group, *args)


def part(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A rank's values: small integers, so that sums are exact in every dtype."""
    return ((torch.arange(count) * 7 + 3 * rank + seed) % 5).to(dtype)


def strided(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room that is not contiguous."""
    return torch.zeros(2, count, dtype=dtype).t()[:, 1]


@spmd(1, 2, 3, 5, on=["threads"])
def test_all_gather_of_any_sizes(group):
    for count in SIZES:
        for dtype in DTYPES:
            counts = [count + 2 * rank for rank in range(group.size)]
            outs = [strided(each, dtype) for each in counts]
            mine = part(group.rank, counts[group.rank], dtype)
            filled = collectives.all_gather(group, [outs], [mine])
            assert [*map(id, filled)] == [*map(id, outs)]
            for rank, out in enumerate(outs):
                assert torch.equal(out, part(rank, counts[rank], dtype)), (dtype, count, rank)


LENGTHS = [0, 3, 1 << 16, 5, 1 << 18, 7, 1 << 17, 1 << 17, 1, 0, 2]  # of up to 1 MiB and more
KINDS = [torch.float32] * 7 + [torch.int16] * 2 + [torch.float64] * 2


@spmd(1, 2, 3, on=["threads"])
def test_several_calls_at_once_are_each_done(group):
    """Runs of what is small travel together; a run ends with a dtype, and with a large tensor."""
    size, rank, root = group.size, group.rank, group.size - 1
    cases = [*zip(LENGTHS, KINDS, strict=True)]
    own = [
        torch.full((count,), rank + 1 + number).to(kind)
        for number, (count, kind) in enumerate(cases)
    ]
    of_all = [[each - rank + other for other in range(size)] for each in own]
    outs = [[strided(count, kind) for _ in range(size)] for count, kind in cases]
    collectives.all_gather(group, outs, own)
    assert all(map(torch.equal, chain(*outs), chain(*of_all)))

    outs = [
        [strided(count, kind) for _ in range(size if rank == root else 0)] for count, kind in cases
    ]
    collectives.gather(group, outs, own, root)
    assert rank != root or all(map(torch.equal, chain(*outs), chain(*of_all)))

    places = [strided(count, kind) for count, kind in cases]
    given = of_all if rank == root else [[] for _ in cases]
    assert [*map(id, collectives.scatter(group, places, given, root))] == [*map(id, places)]
    assert all(map(torch.equal, places, own))

    places = [strided(count, kind) for count, kind in cases]
    given = [[each + 2 * part for part in range(size)] for each in own]
    collectives.reduce_scatter(group, places, given, "sum")
    wanted = [sum(parts) + 2 * rank * size for parts in of_all]
    assert all(map(torch.equal, places, wanted))

    wholes = [strided(size * count, kind) for count, kind in cases]
    collectives.all_gather_single(group, wholes, own)
    assert all(map(torch.equal, wholes, map(torch.cat, of_all)))

    sums = [each.clone() for each, kind in zip(own, KINDS, strict=True) if kind == torch.float32]
    collectives.all_reduce(group, sums, "sum")
    assert all(map(torch.equal, sums, map(sum, of_all)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint4])  # which torch does not copy
@spmd(3, on=["threads"])
def test_several_small_calls_take_the_messages_of_one(group, dtype):
    own = torch.full((8,), group.rank, dtype=torch.uint8).view(dtype)
    messages = []
    for count in (1, 50):
        outs = [[torch.empty_like(own) for _ in range(3)] for _ in range(count)]
        before = group.traffic.messages
        collectives.all_gather(group, outs, [own] * count)
        messages.append(group.traffic.messages - before)
        for places in outs:
            assert [each.view(torch.uint8)[7].item() for each in places] == [0, 1, 2]
    assert messages[0] == messages[1] > 0


@pytest.mark.parametrize("inside", [True, False])
@spmd(2, on=["threads"])
def test_several_tensors_of_inference_mode_are_reduced(group, inside):
    """One rank has made them in it, and calls inside of it, or outside."""
    with torch.inference_mode(group.rank == 0):
        tensors = [torch.ones(30_000) for _ in range(3)]
    with torch.inference_mode(inside):
        collectives.all_reduce(group, tensors, "sum")
    assert all(each.eq(2).all() for each in tensors)


SMALL_CALLS = {
    "all_reduce": lambda group, ins, outs: collectives.all_reduce(group, ins[:2], "sum"),
    "all_gather": lambda group, ins, outs: collectives.all_gather(group, [outs], [ins[0]]),
    "reduce_scatter": lambda group, ins, outs: collectives.reduce_scatter(
        group, [outs[0]], [ins], "sum"
    ),
    "reduce": lambda group, ins, outs: collectives.reduce(group, ins[0], 1, "sum"),
    "broadcast": lambda group, ins, outs: collectives.broadcast(group, ins[0], 1),
    "gather": lambda group, ins, outs: collectives.gather(
        group, [outs if group.rank == 1 else []], [ins[0]], 1
    ),
    "scatter": lambda group, ins, outs: collectives.scatter(
        group, [outs[0]], [ins if group.rank == 1 else []], 1
    ),
    "all_to_all": lambda group, ins, outs: collectives.all_to_all(group, outs, ins),
}


@pytest.mark.parametrize("call", SMALL_CALLS)
@spmd(2, 3, on=["threads", "processes"])
def test_what_is_small_goes_along_with_the_opening(group, call):
    """So a call is one message to each other rank; a large one is more."""
    messages = []
    for count in (100, 100_000):
        ins = [torch.ones(count) for _ in range(group.size)]
        before = group.traffic.messages
        SMALL_CALLS[call](group, ins, [torch.zeros(count) for _ in range(group.size)])
        messages.append(torch.tensor([group.traffic.messages - before]))
    peers = group.size - 1
    few, many = (int(weft.all_reduce(each, "max", group=group)) for each in messages)
    assert few == peers < many


def called(group, counts):
    """What each call gives this rank, for tensors of several sizes."""
    found = []
    for count, (name, call) in product(counts, SMALL_CALLS.items()):
        ins = [part(group.rank, count, seed=to) for to in range(group.size)]
        outs = [torch.zeros(count) for _ in range(group.size)]
        call(group, ins, outs)
        found.append((name, count, torch.stack([*ins, *outs])))
    return found


@pytest.mark.parametrize("hosts", ["abbb", "aabb", "aaab", "abcd", "aab", "ab"])
def test_what_goes_along_may_differ_from_rank_to_rank(hosts):
    """By how many others share a rank's host."""
    counts = [1500, 9000, 15_000, 40_000]
    wanted = run(len(hosts), called, counts)
    found = run(len(hosts), on, hosts, called, counts)
    for rank, of_rank in enumerate(wanted):
        for (name, count, right), (_, _, here) in zip(of_rank, found[rank], strict=True):
            assert torch.equal(here, right), (name, count, rank)


def gathered_unevenly(group):
    """What this rank sent to ranks of other hosts."""
    counts = [40_000 * (rank % 3) + rank for rank in range(group.size)]
    outs = [torch.zeros(count) for count in counts]
    collectives.all_gather(group, [outs], [part(group.rank, counts[group.rank])])
    for rank, (count, out) in enumerate(zip(counts, outs, strict=True)):
        assert torch.equal(out, part(rank, count))
    far = [peer for peer in group.peers if group.hosts[peer] != group.hosts[group.rank]]
    return sum(group.traffic.to.get(peer, 0) for peer in far)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aabbcc", "aaabbb", "aab"])
def test_the_link_of_a_host_carries_what_is_gathered_once(hosts):
    sent = run(len(hosts), on, hosts, gathered_unevenly)
    if hosts == "aab":  # not as many ranks each: every rank sends to all others
        return
    for rank, nbytes in enumerate(sent):
        large = 4 * 40_000 * (rank % 3) * (len({*hosts}) - 1)
        assert large <= nbytes < large + 20_000


def same(group, count):
    """One buffer as every output, also where the input is."""
    whole = part(group.rank, count)
    return [whole] * group.size, whole


def shifted(group, count):
    """Outputs that overlap from one to the next."""
    whole = torch.zeros(2 * count)
    outs = [whole[rank : rank + count] for rank in range(group.size)]
    return outs, part(group.rank, count)


def crossed(group, count):
    """The input is where another rank's is received."""
    outs = [torch.zeros(count) for _ in range(group.size)]
    outs[group.rank - 1] = mine = part(group.rank, count)
    return outs, mine


OVERLAPPING = {each.__name__: each for each in (same, shifted, crossed)}


def in_lists(group, outs, mine):
    """The second of two tensors of each rank, which is sent when the first was received."""
    seconds = [torch.zeros_like(out) for out in outs]
    lists = [[out, second] for out, second in zip(outs, seconds, strict=True)]
    collectives.all_gather_coalesced(group, lists, [torch.ones_like(mine), mine])
    return seconds


TO_ALL = (
    lambda group, outs, mine: collectives.all_gather(group, [outs], [mine]),
    in_lists,
    lambda group, outs, mine: collectives.all_to_all(group, outs, [mine] * group.size),
)


def gathered_beside(group, name, careless):
    """Some ranks do not need what they receive; the others get what is right."""
    for count, call in product((100, 40_000), TO_ALL):
        if group.rank in careless:
            call(group, *OVERLAPPING[name](group, count))
            continue
        outs = [torch.zeros(count) for _ in range(group.size)]
        for rank, out in enumerate(call(group, outs, part(group.rank, count))):
            assert torch.equal(out, part(rank, count)), (count, rank)


@pytest.mark.parametrize("careless", [(0,), (0, 3)])
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab", "aabbcc", "aab"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_outputs_that_overlap_are_no_harm_to_other_ranks(hosts, careless, name):
    """Also where a rank hands on to its host what came from another one."""
    args = (name, careless)
    run(len(hosts), on, hosts, gathered_beside, *args)


@pytest.mark.parametrize("count", [10, 40_000])
@spmd(3, on=["threads"])
def test_a_tensor_that_is_reduced_twice_is_no_harm_to_other_ranks(group, count):
    tensors = [part(group.rank, count), part(group.rank, count)]
    if group.rank == 1:
        tensors[0] = tensors[1]
    collectives.all_reduce(group, tensors, "sum")
    total = sum(part(rank, count) for rank in range(group.size))
    assert all(torch.equal(tensor, total) for tensor in tensors)


def reduce_scattered(group, op, sizes):
    for count in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            if op == "avg" and not dtype.is_floating_point:
                continue  # refused
            counts = [(count + 3 * rank) * (rank != 1) for rank in range(group.size)]
            ins = [part(group.rank, n, dtype, to) for to, n in enumerate(counts)]
            before = [each.clone() for each in ins]
            out = strided(counts[group.rank], dtype)
            collectives.reduce_scatter(group, [out], [ins], op)
            assert torch.equal(out, reduced(group, op, counts[group.rank], dtype)), (dtype, count)
            assert all(map(torch.equal, ins, before)), "the inputs changed"


@pytest.mark.parametrize("op", ["sum", "avg", "max", "prod"])
@spmd(1, 2, 3, 5, on=["threads"])
def test_reduce_scatter_of_any_sizes(group, op):
    reduce_scattered(group, op, SIZES)


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aabbcc"])
def test_a_host_reduces_what_is_scattered_before_it_sends_that(monkeypatch, hosts, op):
    """In chunks, one of which is shorter, and from some ranks nothing."""
    monkeypatch.setattr(dense, "SCRATCH", 1 << 16)
    for sizes in ([10], [7000]):
        run(len(hosts), on, hosts, reduce_scattered, op, sizes)


@pytest.mark.parametrize(("count", "shift"), [(4, 1), (1 << 17, 1 << 15), (1 << 21, 1 << 20)])
@spmd(2, on=["threads"])
def test_a_result_may_lie_in_what_is_reduced(group, count, shift):
    """Chunks of it are written before others are sent."""
    whole = part(group.rank, 2 * count)
    out = whole[shift : shift + count] if group.rank == 0 else torch.empty(count)
    wanted = sum(part(rank, 2 * count).view(2, count)[group.rank] for rank in range(2))
    collectives.reduce_scatter(group, [out], [[*whole.chunk(2)]], "sum")
    assert torch.equal(out, wanted)


@spmd(2, on=["threads"])
def test_the_root_of_a_reduction_writes_to_memory_of_its_own(group):
    tensor = torch.ones(1).expand(4) if group.rank == 1 else torch.ones(4)
    with pytest.raises(weft.WeftError, match="rank 1: elements of a tensor to be written share"):
        collectives.reduce(group, tensor, 1, "sum")
    collectives.reduce(group, tensor, 0, "sum")
    assert tensor.tolist() == [2 - group.rank] * 4


def reduced_on_the_last(group, op):
    count = collectives.BY_ROOT // 2 + 1  # elements of two bytes: the parts are not equal
    for dtype in (torch.bfloat16, torch.float32):
        for tensor in (torch.zeros(count, dtype=dtype), strided(count, dtype)):
            root = group.size - 1
            tensor.copy_(mine := part(group.rank, count, dtype, root))
            before = group.traffic.bytes
            assert collectives.reduce(group, tensor, root, op)[0] is tensor
            wanted = reduced(group, op, count, dtype) if group.rank == root else mine
            assert torch.equal(tensor, wanted), dtype
            sent = group.traffic.bytes - before
            if group.rank == root:  # its parts, to those that reduce them
                assert sent > tensor.nbytes // 3, f"{sent} bytes were sent"


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("hosts", ["ab", "abc", "aab", "aaabbbb", "aabb", "abab", "aabbcc"])
def test_a_large_tensor_is_reduced_by_all_for_a_root_on_another_host(hosts, op):
    run(len(hosts), on, hosts, reduced_on_the_last, op)


@spmd(1, 2, 3, 4, 7, 17, on=["threads"])
def test_each_rank_has_several_tensors_for_all(group):
    """As many as ranks, too: what is gathered comes as one list for each rank, and not for each
    tensor."""
    for tensors in (0, 1, 3, group.size):
        for dtype in (torch.float32, torch.complex64, torch.int16):
            # of different sizes, some empty, and rank 1 has one tensor more
            def given(rank, tensors=tensors, dtype=dtype):
                return [part(rank, 5 * to, dtype, to) for to in range(tensors + (rank == 1))]

            outs = [[strided(len(each), dtype) for each in given(p)] for p in range(group.size)]
            collectives.all_gather_coalesced(group, outs, given(group.rank))
            for rank, received in enumerate(outs):
                assert all(map(torch.equal, received, given(rank))), (tensors, dtype, rank)


@spmd(1, 3, on=["threads"])
def test_lists_that_do_not_fit(group):
    def gather(lists, sizes, own):
        outs = [[torch.zeros(count) for count in sizes] for _ in range(lists)]
        collectives.all_gather_coalesced(group, outs, [torch.ones(count) for count in own])

    last, fine = group.rank == group.size - 1, ([2, 3], [2, 3])
    text = (
        f"rank {group.size - 1}: the inputs have 2 elements, and the outputs in the list of this "
    )
    with pytest.raises(weft.WeftError, match=text + "rank 2, 3: they must be as many"):
        gather(group.size, *(([2, 3], [2]) if last else fine))
    with pytest.raises(weft.WeftError, match=r"4 lists of outputs were given: pass one for each"):
        gather(4 if last else group.size, *fine)
    if group.size > 1:
        with pytest.raises(weft.WeftError, match="the ranks differ in tensors"):
            gather(group.size, *(([4], [4]) if last else fine))
    gather(group.size, *fine)
    nothing: list[Tensor] = []
    collectives.all_reduce(group, nothing, "avg")


def reduced(group: weft.Group, op: str, count: int, dtype: torch.dtype) -> Tensor:
    parts = torch.stack(
        [part(rank, count, dtype, group.rank).double() for rank in range(group.size)]
    )
    right = {
        "sum": lambda: parts.sum(0),
        "avg": lambda: parts.sum(0) / group.size,
        "max": lambda: parts.amax(0),
        "prod": lambda: parts.prod(0),
    }[op]()
    return right.to(dtype)


@spmd(2, on=["threads"])
def test_conjugations_that_memory_does_not_say(group):
    for count in (3, 40_000):
        turned = torch.full((count,), 1 + 2j).conj()
        outs = [torch.zeros(count, dtype=turned.dtype).conj() for _ in range(2)]
        collectives.all_gather(group, [outs], [turned])
        collectives.all_reduce(group, [turned], "sum")
        assert all(out.eq(1 - 2j).all() for out in outs) and turned.eq(2 - 4j).all()


def test_reduce_scatter_in_many_chunks(monkeypatch):
    monkeypatch.setattr(dense, "SCRATCH", 300)
    in_chunks(world=("threads", 3))


@spmd(3, on=["threads"])
def in_chunks(group):
    ins = [part(group.rank, 100 + 60 * to, torch.float32, to) for to in range(3)]
    out = torch.empty(100 + 60 * group.rank)
    collectives.reduce_scatter(group, [out], [ins], "sum")
    assert torch.equal(out, reduced(group, "sum", len(out), torch.float32))


@spmd(2, 3, 5, 17, on=["threads"])
def test_one_rank_gives_or_takes(group):
    """At 17 ranks the opening exchange is not direct."""
    root, everyone = group.size - 1, range(group.size)
    for count in SIZES:
        for dtype in DTYPES:
            tensor = part(group.rank, count, dtype)
            collectives.broadcast(group, tensor, root)
            assert torch.equal(tensor, part(root, count, dtype)), (dtype, count)
        mine, here = part(group.rank, count), group.rank == root
        outs = [torch.zeros(count) for _ in everyone] if here else []
        collectives.gather(group, [outs], [mine], root)
        assert all(torch.equal(out, part(rank, count)) for rank, out in enumerate(outs))
        out = strided(count)
        collectives.scatter(
            group, [out], [[part(to, count) for to in everyone] if here else []], root
        )
        assert torch.equal(out, part(group.rank, count))
        total = part(group.rank, count)
        collectives.reduce(group, total, root, "sum")
        right = sum(part(rank, count) for rank in everyone)
        assert torch.equal(total, right if here else part(group.rank, count))


@spmd(1, 2, 5, 17, on=["threads"])
def test_all_reduce_and_single_tensors(group):
    everyone = range(group.size)
    for count in SIZES:
        for dtype in (torch.float32, torch.float16, torch.int16, torch.complex64):
            tensor = strided(count, dtype).copy_(part(group.rank, count, dtype))
            collectives.all_reduce(group, [tensor], "sum")
            right = sum(part(rank, count, torch.complex128) for rank in everyone)
            right = right if dtype.is_complex else right.real
            assert torch.equal(tensor, right.to(dtype)), (dtype, count)
        out = torch.empty(group.size, count)
        collectives.all_gather_single(group, [out], [part(group.rank, count)])
        assert torch.equal(out, torch.stack([part(rank, count) for rank in everyone]))
        mine = torch.cat([part(group.rank, count, seed=to) for to in everyone])
        out = torch.empty(count)
        collectives.reduce_scatter_single(group, [out], [mine], "sum")
        assert torch.equal(out, reduced(group, "sum", count, torch.float32))
    weft.barrier(group=group)


@spmd(1, 2, 3, 17, on=["threads"])
def test_all_to_all_of_any_sizes(group):
    me, everyone = group.rank, range(group.size)

    def sent(source: int, target: int) -> Tensor:
        return part(source, 3 * (source + 2 * target) % 7 * 400, seed=target).view(-1, 2)

    gives, takes = [sent(me, to) for to in everyone], [sent(rank, me) for rank in everyone]
    outs = [torch.empty_like(each) for each in takes]
    collectives.all_to_all(group, outs, gives)
    assert all(map(torch.equal, outs, takes))
    out = torch.empty(sum(map(len, takes)), 2)
    collectives.all_to_all_single(
        group, out, torch.cat(gives), [len(each) for each in takes], [len(each) for each in gives]
    )
    assert torch.equal(out, torch.cat(takes))
    out = torch.empty(2 * group.size)
    collectives.all_to_all_single(group, out, torch.arange(2.0 * group.size) + me, [], [])
    assert out.tolist() == [2 * me + k + rank for rank in everyone for k in range(2)]


@spmd(3, on=["threads"])
def test_what_torch_does_not_copy_is_moved_byte_by_byte(group):
    """Also where a rank receives in what it sends, of which a copy is made."""
    for count in SIZES[1:]:
        seen = [
            part(rank, count, torch.uint8) for rank in range(3)
        ]  # the bytes, in the same memory
        parts = [each.view(torch.uint4) for each in seen]
        collectives.all_gather(group, [parts[1:] + parts[:1]], [parts[group.rank]])
        for rank in range(3):
            assert torch.equal(seen[(rank + 1) % 3], part(rank, count, torch.uint8)), count
        collectives.broadcast(group, parts[group.rank], 2)
        assert torch.equal(seen[group.rank], part(1, count, torch.uint8)), count


C = collectives
WRONG = {
    # what all are told, and the call, in which 1 stands on the rank that errs, and 0 elsewhere
    "rank 1: output 1 has 3 elements, and the tensor that goes with it 4": (
        lambda group, odd: C.all_gather(group, [[torch.empty(3)] * 3], [torch.ones(3 + odd)])
    ),
    "the ranks differ in dtype: ranks 0, 2 have torch.float32, rank 1 has": (
        lambda group, odd: C.all_reduce(group, [torch.ones(3).to(FLOATS[odd])], "sum")
    ),
    "the ranks differ in sizes: ranks 0, 2 have 3, rank 1 has 40000": (
        lambda group, odd: C.all_reduce(group, [torch.ones(40_000 if odd else 3)], "sum")
    ),
    "the ranks differ in op: ranks 0, 2 have sum, rank 1 has max": (
        lambda group, odd: C.all_reduce(group, [torch.ones(3)], "max" if odd else "sum")
    ),
    "rank 0: op band does not apply to torch.float32": (
        lambda group, odd: C.reduce_scatter(group, [torch.empty(2)], [[torch.ones(2)] * 3], "band")
    ),
    "rank 0: op band does not apply to torch.float64": (
        lambda group, odd: C.reduce_scatter_single(
            group, [torch.empty(1).double()], [torch.ones(3).double()], "band"
        )
    ),
    "rank 1: 2 inputs were given, and 3 are wanted: pass one for each rank": (
        lambda group, odd: C.all_to_all(group, [torch.empty(2)] * 3, [torch.ones(2)] * (3 - odd))
    ),
    "rank 1 has 1 elements for rank 1, which has room for 2 from it": (
        lambda group, odd: C.all_to_all_single(
            group, torch.empty(6), torch.ones(6), [2, 2, 2], [2, 2 - odd, 2 + odd]
        )
    ),
    "the ranks are in different calls": (
        lambda group, odd: (
            weft.barrier(group=group) if odd else C.broadcast(group, torch.ones(3), 0)
        )
    ),
}
FLOATS = torch.float32, torch.float64


@pytest.mark.parametrize("said", WRONG)
@spmd(3, on=["threads"])
def test_errors_are_the_same_on_every_rank(group, said):
    with pytest.raises(weft.WeftError) as caught:
        WRONG[said](group, int(group.rank == 1))
    text = str(caught.value)
    assert text.startswith(said), text
    heard: list[Tensor] = [torch.empty(len(text), dtype=torch.uint8) for _ in range(3)]
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    collectives.all_gather(group, [heard], [mine])
    assert all(bytes(each.tolist()) == text.encode() for each in heard)
    weft.barrier(group=group)  # the next call works


@pytest.mark.parametrize("many", [1, 20_000])
@spmd(2, 16, 17, on=["threads"])
def test_sizes_of_all_to_all_are_compared_in_pairs_of_any_number_of_ranks(group, many):
    """Above 16 ranks, too, where no rank hears the sizes of each."""
    me, everyone = group.rank, range(group.size)
    last = group.size - 1

    def refused(gives, takes):
        """The error, if ranks give each other so many elements, by pair, and take so many."""
        outs = [torch.zeros(takes.get((rank, me), 0)) for rank in everyone]
        ins = [torch.ones(gives.get((me, rank), 0)) for rank in everyone]
        with pytest.raises(weft.WeftError) as caught:
            collectives.all_to_all(group, outs, ins)
        assert not any(out.any() for out in outs)
        return str(caught.value)

    said = [
        refused({(0, last): 4 * many}, {}),
        refused({}, {(0, last): 4 * many}),
        refused({(last, 0): 4 * many}, {(last, 0): 5 * many}),
        # as many in all, to each and from each
        refused({(0, 0): many, (last, last): many}, {(0, last): many, (last, 0): many}),
    ]
    rest = "from it: split sizes must match"
    assert said == [
        f"rank 0 has {4 * many} elements for rank {last}, which has room for 0 {rest}",
        f"rank 0 has 0 elements for rank {last}, which has room for {4 * many} {rest}",
        f"rank {last} has {4 * many} elements for rank 0, which has room for {5 * many} {rest}",
        f"rank 0 has {many} elements for rank 0, which has room for 0 {rest}",
    ]
    outs = [torch.zeros(4 * many) for _ in everyone]
    collectives.all_to_all(group, outs, [part(me, 4 * many, seed=to) for to in everyone])
    for rank, out in enumerate(outs):  # nothing of the calls before
        assert torch.equal(out, part(rank, 4 * many, seed=me))


@spmd(2, 3, 4, 7, on=["threads"])
def test_large_parts_of_which_some_are_empty(group):
    """Of one sample of all: large parts, and some that are empty on some ranks."""
    size, rank, count = group.size, group.rank, 5000
    total = torch.stack([part(each, count) for each in range(size)]).sum(0)
    counts = [(count + each) * (each != 1) for each in range(size)]

    tensor = part(rank, count)
    collectives.all_reduce(group, [tensor], "sum")
    assert torch.equal(tensor, total)
    tensor = part(rank, count)
    collectives.broadcast(group, tensor, size - 1)
    assert torch.equal(tensor, part(size - 1, count))
    tensor = part(rank, count)
    collectives.reduce(group, tensor, 0, "sum")
    assert torch.equal(tensor, total if rank == 0 else part(rank, count))
    outs = [torch.zeros(each) for each in counts]
    collectives.all_gather(group, [outs], [part(rank, counts[rank])])
    assert all(torch.equal(out, part(each, counts[each])) for each, out in enumerate(outs))
    out = torch.zeros(counts[rank])
    collectives.reduce_scatter(group, [out], [[part(rank, each) for each in counts]], "sum")
    assert torch.equal(out, torch.stack([part(each, len(out)) for each in range(size)]).sum(0))
    outs = [torch.zeros(count) for _ in range(size)] if rank == 0 else []
    collectives.gather(group, [outs], [part(rank, count)], 0)
    assert all(torch.equal(out, part(each, count)) for each, out in enumerate(outs))
    out = torch.zeros(count)
    collectives.scatter(
        group, [out], [[part(each, count) for each in range(size)] * (rank == 0)], 0
    )
    assert torch.equal(out, part(rank, count))
    # only the first two ranks have something for each other
    sizes = [count * (rank < 2 and to < 2) for to in range(size)]
    outs = [torch.zeros(each) for each in sizes]
    collectives.all_to_all(group, outs, [part(rank, each) for each in sizes])
    assert all(torch.equal(out, part(each, len(out))) for each, out in enumerate(outs))
