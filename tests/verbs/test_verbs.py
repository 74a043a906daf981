"""The verbs move and combine what they say: over gloo's process group, and by posts on threads."""

import functools

import pytest
import torch
import torch.distributed as dist

import weft
from weft.bootstrap.outcome import results
from weft.group import process_group
from weft.testing import run, threads
from weft.testing.threads import on_groups
from weft.verbs.carrier import carried_by, verbs_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool)


def over_gloo(group, place, body, *args):
    """The body with a group whose process group of gloo's carries all tensors."""
    me = {"rank": group.rank, "world_size": group.size, "init_method": f"file://{place}"}
    dist.init_process_group("gloo", **me)
    try:
        return body(weft.init(wire="group"), *args)
    finally:
        weft.shutdown()
        dist.destroy_process_group()


def on_ranks(size, kind, tmp_path, body, *args):
    """What the body returns on each rank, on processes over gloo or on threads."""
    if kind == "gloo":
        return run(size, over_gloo, tmp_path / "place", body, *args, on="processes")
    groups = threads.group(size, 60.0, wire="group")
    return results(on_groups(groups, body, args), "threads")


def in_a_call(group, body, *, is_async=False):
    if is_async:
        return group.worker.submit("verbs", body).wait()
    return group.worker.call("verbs", body)


@pytest.fixture(params=["gloo", "threads"])
def kind(request):
    return request.param


def moved(group, is_async, ranks):
    """Each verb on these ranks, in this order, checked here; what carries the tensors."""
    if group.rank not in ranks:
        return None
    group = group.subset(ranks)
    me, size = group.rank, group.size

    def all_verbs():
        verbs = verbs_of(group, CPU)
        for dtype in DTYPES:
            mine = torch.arange(3).add(10 * me).to(dtype)
            found = verbs.all_gather(mine)
            assert found.tolist() == [
                each for rank in range(size) for each in torch.arange(3).add(10 * rank).to(dtype)
            ]
            goes = [(me + to) % 3 for to in range(size)]
            comes = [(of + me) % 3 for of in range(size)]
            sent = torch.cat([torch.full((n,), me + to) for to, n in enumerate(goes)]).to(dtype)
            came = torch.cat([torch.full((n,), of + me) for of, n in enumerate(comes)]).to(dtype)
            assert verbs.exchange(sent, goes, comes).equal(came)
            tensor = torch.full((2, 3), me).to(dtype)
            verbs.broadcast(tensor, size - 1)
            assert tensor.equal(torch.full((2, 3), size - 1).to(dtype))
        for op, total in (
            ("sum", size * (size - 1) / 2),
            ("max", size - 1),
            ("avg", (size - 1) / 2),
        ):
            if verbs.reduces(op, torch.float32):
                tensor = torch.full((5,), float(me))
                verbs.all_reduce(tensor, op)
                assert tensor.tolist() == [total] * 5
        assert not verbs.reduces("sum", torch.bfloat16)
        assert verbs.read(torch.tensor([4, 5])) == [4, 5]
        return carried_by(verbs)

    return in_a_call(group, all_verbs, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [[0], [1, 0], [2, 0, 1], [0, 1, 2, 3]], ids=str)
def test_each_verb(kind, tmp_path, ranks, is_async):
    said = on_ranks(max(ranks) + 1, kind, tmp_path, moved, is_async, ranks)
    names = {each for each in said if each is not None}
    assert len(names) == 1
    if kind == "gloo" and len(ranks) > 1:
        assert names == {"cpu (gloo, asynchronously)" if is_async else "cpu (gloo)"}


def on_subsets(group, subsets):
    """What all ranks of each subset gather, of those that this rank is in."""
    found = []
    for ranks in subsets:
        if group.rank in ranks:
            some = group.subset(ranks)
            found.append(in_a_call(some, functools.partial(gathered, some)))
    return found


def gathered(group):
    return (
        verbs_of(group, CPU).all_gather(torch.tensor(group.global_ranks[group.rank :][:1])).tolist()
    )


def test_ranks_that_were_in_calls_of_other_subsets(kind, tmp_path):
    subsets = [[0, 1], [0, 2], [2, 1], [0, 1, 3], [3, 1]]
    for rank, found in enumerate(on_ranks(4, kind, tmp_path, on_subsets, subsets)):
        assert found == [ranks for ranks in subsets if rank in ranks]


def in_parts(group):
    """What all ranks of a part, and then of a part of that, gather."""
    found = []
    part = group
    for ranks in ([3, 1, 0], [0, 1]):
        part = part.split(ranks)
        if part is None:
            break
        found.append(in_a_call(part, functools.partial(gathered, part)))
    return found


def test_a_part_has_verbs_of_its_own(kind, tmp_path):
    found = on_ranks(4, kind, tmp_path, in_parts)
    assert found == [[[3, 1, 0]], [[3, 1, 0], [3, 1]], [], [[3, 1, 0], [3, 1]]]


def counted(group):
    group.traffic.reset()

    def gather():
        verbs_of(group, CPU).all_gather(torch.zeros(4))

    in_a_call(group, gather)
    return group.traffic.bytes, dict(group.traffic.to)


def test_what_is_sent_is_counted(kind, tmp_path):
    for rank, found in enumerate(on_ranks(3, kind, tmp_path, counted)):
        assert found == (32, {peer: 16 for peer in range(3) if peer != rank})


def test_the_wire_carries_tensors_of_the_cpu_by_default():
    (group,) = threads.group(1)
    assert verbs_of(group, CPU) is None and carried_by(None) == "cpu"


def refused(group):
    def ask():
        with pytest.raises(weft.WeftError, match=r"gloo takes no xpu tensors: `cpu:gloo,xpu:xccl`"):
            verbs_of(group, torch.device("xpu", 0))

    in_a_call(group, ask)
    return process_group.joined(dist.group.WORLD) is group


def test_a_device_that_nobody_carries_is_refused(tmp_path):
    assert on_ranks(2, "gloo", tmp_path, refused) == [True, True]
