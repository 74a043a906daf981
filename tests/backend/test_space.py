"""Groups of backend "weft" in a store where groups of the same name have been before."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

import weft
from weft.backend.space import unused
from weft.testing import processes, run


def test_what_a_process_that_is_gone_has_left_is_not_taken():
    store = dist.HashStore()
    store.set("weft/space/1", "a token that nobody has")  # of a rank 1 that was killed

    def program(group):
        space = unused(store, group.rank, group.size, 20.0)
        fresh = not space.check([f"address {group.rank}"])
        space.set(f"address {group.rank}", "there")
        group.all_gather_bytes(b"here", bytes)
        return fresh, [space.check([f"address {rank}"]) for rank in range(group.size)]

    for _ in range(2):  # the second time there is what the first has left
        assert run(3, program) == [(True, [True] * 3)] * 3


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_by_all(monkeypatch, absent):
    store = dist.HashStore()
    if absent != 0:  # who says who is missing, however late that one began
        monkeypatch.setattr("weft.backend.space.LATE", 20.0)

    def program(group):
        if group.rank == absent:
            return absent
        with pytest.raises(weft.WireError, match=f"rank {absent} did not come within 3 s") as told:
            unused(store, group.rank, group.size, 3.0)
        return told.value.culprit

    assert run(3, program) == [absent] * 3


def again():
    sums = []
    for _ in range(4):
        dist.init_process_group("cpu:weft")
        group = dist.new_group()
        for tensor in (torch.ones(1), torch.ones(1).to_sparse()):
            for where in (None, group):
                dist.all_reduce(tensor, group=where)
            sums.append(tensor.to_dense().item())
        dist.destroy_process_group()
    return sums


def test_a_program_destroys_its_group_and_makes_another():
    """In a store that all of them have, as a launcher's is."""
    assert processes(2, again) == [[4.0] * 8] * 2


ENDS = """
import os, sys, torch, torch.distributed as dist, weft

rank = int(os.environ["RANK"])
dist.init_process_group("cpu:weft", f"file://{sys.argv[1]}", rank=rank, world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
rows = torch.sparse_coo_tensor([[rank]], torch.ones(1), (2,), check_invariants=True)
dist.all_reduce(rows)
print(total.item(), rows.to_dense().tolist())
dist.all_reduce(torch.ones(1), async_op=True)  # gloo's thread aborts the process if it ends last
"""


def test_a_program_may_end_without_destroying_its_group(programs, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    meeting = str(tmp_path / "meeting")
    ranks = [
        programs(ENDS, meeting, env={**env, "RANK": f"{rank}"}, whole=True) for rank in range(2)
    ]
    assert [each.communicate() for each in ranks] == [("2.0 [1.0, 1.0]\n", "")] * 2
    assert [each.returncode for each in ranks] == [0, 0]


DIES = """
import os, signal, sys, torch, torch.distributed as dist, weft

dist.init_process_group("cpu:weft")
me = dist.get_rank()
dist.all_reduce(torch.ones(1))
if me == 0 and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
rows = torch.sparse_coo_tensor([[me]], torch.ones(1, 2), (10, 2), check_invariants=True)
dist.all_reduce(rows)
print(rows.indices()[0].tolist())
"""


def test_a_program_as_it_is_goes_on_after_a_rank_died(restarted, tmp_path):
    """With the store of torchrun's agent; gloo alone finds addresses of the attempt before there,
    and fails."""
    printed = restarted(DIES, [str(tmp_path / "died")], 1)
    assert printed == {(0, 0): "", (0, 1): "", (1, 0): "[0, 1]\n", (1, 1): "[0, 1]\n"}


class Doorkeeper:
    """Leads who connects to it to a store; it counts them."""

    def __init__(self, port):
        self.came = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._lead)]
        self._threads[0].start()

    def _lead(self):
        with contextlib.suppress(OSError):  # ended by `close`
            while True:
                visitor, _ = self._listener.accept()
                self.came += 1
                store = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [visitor, store]
                for ends in ((visitor, store), (store, visitor)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source, target):
        with contextlib.suppress(OSError):  # ended by either side, or by `close`
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):  # its other side has closed it
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()


def sum_of(group):
    """Of ones, and then sent from rank 0 to rank 1."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    if dist.get_rank() == 0:
        dist.send(total, 1, group=group)
    else:
        dist.recv(total, 0, group=group)
    return total.item()


def many_groups(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    me = int(os.environ["RANK"])
    dist.init_process_group("cpu:weft", store=store, rank=me, world_size=2)
    group = weft.init()
    split = group.split([1, 0])
    groups = [dist.group.WORLD, dist.new_group(), group, split, weft.Partition((2,), group=split)]
    sums = [sum_of(each) for each in groups[:2]]
    sums += [weft.all_reduce(torch.ones(1), group=each).item() for each in groups[2:4]]
    sums.append(weft.nn.AllSumReduce(groups[4], 0)(torch.ones(1)).item())
    weft.shutdown()
    dist.destroy_process_group()
    return sums


def connected_later():
    dist.init_process_group("cpu:weft")
    alone = dist.new_group(backend=weft.testing.gloo_of_one_thread())
    sums = [sum_of(dist.group.WORLD), sum_of(alone)]
    dist.destroy_process_group()
    return sums


def test_gloo_may_connect_ranks_when_it_first_needs_to():
    assert processes(2, connected_later, env={"TORCH_GLOO_LAZY_INIT": "1"}) == [[2.0] * 2] * 2


def test_groups_need_no_connection_to_the_store_but_the_callers():
    """With each connection a TCPStore asks for a host's name, which takes seconds where no name
    server answers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    door = Doorkeeper(store.port)
    try:
        assert processes(2, many_groups, door.port) == [[2.0] * 5] * 2
        assert door.came == 2
    finally:
        door.close()
