"""Verbs keep no group alive: one that nobody has any more says bye, as without them."""

import gc
import weakref

import torch
import torch.distributed as dist

import weft
from weft.group import process_group
from weft.testing import run


def dropped(group, place):
    me = {"rank": group.rank, "world_size": group.size, "init_method": f"file://{place}"}
    dist.init_process_group("gloo", **me)
    process_group.choose_wire("group")
    other = process_group.of_group(dist.new_group([0, 1]))
    work = weft.sparse_all_reduce((torch.arange(3), torch.ones(3)), group=other, async_op=True)
    work.wait()
    weft.barrier(group=group)
    gone = weakref.ref(other.session)
    del other, work
    dist.destroy_process_group()
    gc.collect()
    process_group.choose_wire(None)
    return gone() is None


def test_a_group_that_has_verbs_goes_with_its_process_group(tmp_path):
    assert run(2, dropped, tmp_path / "place", on="processes") == [True, True]
