"""weft.init and weft.shutdown: alone, under a launcher, on a group that is there already."""

from __future__ import annotations

import dis
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

import weft
from cases import in_case
from weft import kernels, version
from weft.base.errors import WeftError, WireError
from weft.base.pace import patient
from weft.bootstrap import descent
from weft.bootstrap import init as module
from weft.bootstrap.init import init, shutdown
from weft.bootstrap.local import launch
from weft.group import default, process_group
from weft.testing import processes

QUICK = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """Begin without a launcher's variables and without a group, and see that none is left."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    shutdown()
    assert not dist.is_initialized()


def total(value):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def rows_of(group=None):
    rank = dist.get_rank()
    indices, _ = weft.sparse_all_reduce(
        (torch.tensor([rank, 9]), torch.ones(2)), group=group, algorithm="gather"
    )
    return indices.tolist()


# Alone.


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (None, ""),
        ("MASTER_ADDR", "node1"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_NTASKS", "1"),
        ("PMIX_RANK", "0"),
    ],
)
def test_a_group_of_one_is_told_of_and_warned_of_where_more_is_meant(
    variable, value, monkeypatch, caplog
):
    if variable is not None:
        monkeypatch.setenv(variable, value)
    with caplog.at_level("INFO", "weft"), init():
        pass
    (said,) = (record for record in caplog.records if "a group of one" in record.message)
    assert "start the program with torchrun --nproc-per-node N, mpirun or srun" in said.message
    warns = variable is not None and value != "1"
    assert (said.levelname == "WARNING") == warns
    assert (f"though the environment has {variable}={value};" in said.message) == warns


def test_alone_it_is_a_group_of_one():
    with init() as group:
        assert (group.rank, group.size) == (0, 1)
        assert default.current() is group
        assert total(3.0) == 3.0
        assert rows_of() == [0, 9]
    assert not dist.is_initialized()
    with pytest.raises(WeftError, match=r"call weft\.init"):
        default.current()


def test_alone_nothing_can_be_reached_from_outside():
    before = listening()  # of other tests, which may leave some behind
    with init():
        assert {address for address, _ in listening() - before} == {"127.0.0.1"}  # gloo's
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert listening() <= before


def listening():
    """Addresses and ports on which this process accepts connections."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_again_and_again_leaves_nothing_behind(nothing_left):
    with init():
        rows_of()
    with nothing_left():
        for _ in range(3):
            with init() as group:
                rows_of(group)
                group.worker.submit("nothing", lambda: None).wait()


def fails(*_, **__):
    raise WeftError("on purpose")


def an_uncaught_error_is_told_as_before():
    before = sys.excepthook
    for _ in range(2):
        with init():
            assert sys.excepthook is not before  # torch's says the rank
        assert sys.excepthook is before
    with init():
        sys.excepthook = mine = lambda *error: before(*error)
    assert sys.excepthook is mine  # of who came later
    sys.excepthook = before
    init()
    dist.destroy_process_group()
    shutdown()
    assert sys.excepthook is before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "of_group", fails)  # once torch's group is there
        with pytest.raises(WeftError, match="on purpose"):
            init()
    assert sys.excepthook is before
    with pytest.raises(ValueError, match="on its way"), init():
        raise ValueError("on its way")
    assert sys.excepthook is not before  # for it would be told behind the block


def test_an_uncaught_error_is_told_as_before():
    processes(1, an_uncaught_error_is_told_as_before)


def test_the_first_init_counts_until_shutdown():
    shutdown()
    assert init().timeout == 300
    shutdown()
    shutdown()
    group = init(timeout=9)
    assert init() is init("gloo", timeout=9) is default.current() is group
    assert group.timeout == 9
    with pytest.raises(WeftError, match="timeout=9, and cannot change to 8"):
        init(timeout=8)
    with pytest.raises(WeftError, match="rendezvous=None, and cannot change to 'env://'"):
        init(rendezvous="env://")
    assert default.current() is group


def test_an_error_in_the_block_shuts_down_too():
    with pytest.raises(ZeroDivisionError), init():
        raise ZeroDivisionError
    assert not dist.is_initialized()


# On a group that the program has set up.


def test_a_group_without_gloo_is_not_one_with_it():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WeftError, match=r"initialised already with .*leave backend= out"):
            init("gloo")
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_there_is_adopted_and_left_alone():
    own = timedelta(seconds=1234)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=own)
    try:
        for timeout in (None, 6.0, None):
            with init(timeout=timeout) as group:
                assert group is process_group.of_group(None)
                assert group.timeout == (1234.0 if timeout is None else timeout)
            assert dist.is_initialized()
            assert total(1.0) == 1.0
        with pytest.raises(WeftError, match="leave rendezvous= out"):
            init(rendezvous="env://")
        with pytest.raises(WeftError, match="wire is array"):
            init(wire=numpy.ones(2))
        with init("gloo"), pytest.raises(WeftError, match="running already, with timeout=1234"):
            init(timeout=6.0)
    finally:
        dist.destroy_process_group()


def test_a_group_that_was_used_before_gets_the_timeout_that_is_asked_for():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        used = process_group.of_group(None)
        with init(timeout=6.0) as group:
            assert group is used
            assert group.timeout == 6.0
    finally:
        dist.destroy_process_group()


class Mute:
    def __repr__(self):
        raise RuntimeError("it says nothing")


@pytest.mark.parametrize("given", [Path("/tmp/run7"), b"env://", 7, Mute()])
def test_what_is_no_rendezvous_is_told_as_one(given):
    with pytest.raises(WeftError, match=r"rendezvous is .*: pass a URL as text"):
        init(rendezvous=given)


def test_a_backend_of_another_kind_is_told_as_an_error_of_the_caller():
    with pytest.raises(WeftError):
        init(backend=["gloo"])


def test_a_group_that_was_destroyed_is_replaced():
    first = init()
    dist.destroy_process_group()
    second = init()
    assert second is not first
    assert default.current() is second
    assert rows_of() == [0, 9]


def test_ranks_adopt_a_group_together():
    assert launch(2, adopting, env=QUICK) == [[0, 1, 9]] * 2


def adopting():
    dist.init_process_group("gloo")
    own = version.__version__
    version.__version__ += os.environ["RANK"]
    with pytest.raises(WeftError, match=r"differ in weft version: .*0, rank 1 has .*1; install"):
        init(timeout=60)
    version.__version__ = own
    with pytest.raises(WeftError, match=r"^rank 1 \(.*wire is 'pigeon': leave it out"):
        init(timeout=60, wire="pigeon" if dist.get_rank() else None)
    with pytest.raises(
        WeftError, match=r"^rank 1 \(.*timeout is -1: pass a positive number of sec"
    ):
        init(timeout=-1 if dist.get_rank() else 60)
    for _ in range(2):  # its group is closed in between, and made again
        with init(timeout=60):
            found = rows_of()
    assert total(1.0) == 2.0
    dist.destroy_process_group()
    return found


# Under a launcher.


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_meet_several_times(size):
    assert launch(size, meeting, env=QUICK) == [[[*range(size), 9]] * 3] * size


def meeting():
    found = []
    for number in range(3):
        with init(timeout=60):
            assert total(1.0) == int(os.environ["WORLD_SIZE"])
            if number == 1 and dist.get_rank() == 0:
                time.sleep(0.2)  # the others are at the next meeting before this one has left
            found.append(rows_of())
        assert not dist.is_initialized()
    return found


def test_rank_0_hosts_the_meeting_where_no_launcher_does(port):
    """As when a person sets the variables: the store is rank 0's, and each init uses it anew."""
    hosted = {**QUICK, "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    assert launch(2, meeting, env=hosted) == [[[0, 1, 9]] * 3] * 2


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:{port}", "tcp://[::1]:{port}", "file://{folder}/meeting"]
)
def test_ranks_meet_at_a_rendezvous(url, port, tmp_path):
    url = url.format(port=port, folder=tmp_path)
    env = {**QUICK, "TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "", "MASTER_PORT": ""}
    assert launch(2, meeting_at, [url], env=env) == [[0, 1, 9]] * 2


def meeting_at(url):
    with init(rendezvous=url, timeout=60):
        return rows_of()


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(tmp_path):
    timeout = patient(2.0)
    waited = launch(2, waiting, [tmp_path, timeout], env={**QUICK, "WORLD_SIZE": "3"})
    assert max(waited) >= timeout  # who came first; the other hears it from that one, maybe earlier


MISFITS = [  # what rank 1 has in its environment, what both say
    ({"RANK": "0"}, r"^rank 0 of 2 was started twice: on .* \(process \d+\) and on "),
    ({"WORLD_SIZE": "3"}, "^the ranks differ in world size: .*rank 1 has 3"),
    ({"RANK": "2"}, "^a process without a rank .*RANK=2 and WORLD_SIZE=2: ranks start at 0"),
    ({"RANK": ""}, "^a process without a rank .*RANK='', which is no whole number"),
    ({"WEFT_INTERFACE": "nothing7"}, "^rank 1 .*WEFT_INTERFACE=nothing7 names no interface"),
    ({"WEFT_INTERFACE": "192.0.2.77"}, "^rank 1 .*WEFT_INTERFACE=192.0.2.77 names no interface"),
    ({"VERSION": "9"}, "^the ranks differ in weft version: .*, rank 1 has 9; install the same"),
    ({"BACKEND": "ucc"}, "^rank 1 .*'ucc' is not in this build"),
    ({"FIRST": "ucc"}, "^rank 0 .*'ucc' is not in this build"),
    ({"TIMEOUT": "-1"}, "^rank 1 .*timeout is -1: pass a positive number of seconds, or None"),
    ({"BACKEND": "gloo"}, "^the ranks differ in backend: rank 0 has none given, rank 1 has gloo"),
]


def test_every_rank_says_what_does_not_fit_and_the_next_init_works(tmp_path):
    said = launch(2, misfitting, [f"file://{tmp_path}/"], env=QUICK)
    for case, (_, complaint) in enumerate(MISFITS):
        for errors in said:
            with pytest.raises(AssertionError, match=complaint):
                raise AssertionError(errors[case])


def misfitting(url):
    right, own, said = dict(os.environ), version.__version__, []
    for case, (change, _) in enumerate(MISFITS):
        if right["RANK"] == "1":
            os.environ.update(change)
            version.__version__ = change.get("VERSION", own)
        elif "FIRST" in change:
            os.environ["BACKEND"] = change["FIRST"]
        with pytest.raises(WeftError) as info:
            init(
                os.environ.get("BACKEND"),
                rendezvous=url if case >= 4 else None,
                timeout=int(os.environ.get("TIMEOUT", "60")),
            )
        said.append(str(info.value))
        os.environ.clear()
        os.environ.update(right)
        version.__version__ = own
    with init(timeout=60):
        mark = {descent.VARIABLE: os.environ[descent.VARIABLE]}
        assert dict(os.environ) == right | mark  # children of this process find it as it was, too
        assert rows_of() == [0, 1, 9]
    return said


def test_gloo_is_told_what_it_does_not_understand():
    """weft reads more than names of interfaces in gloo's own variable."""
    launch(2, naming, [["^docker,veth", "nosuch7,lo", "127.0.0.1", " lo", "lo,lo"]], env=QUICK)


def naming(names):
    for named in names:
        os.environ["GLOO_SOCKET_IFNAME"] = named
        with in_case(named), init(timeout=60):
            assert os.environ["GLOO_SOCKET_IFNAME"] == named
            assert total(1.0) == 2.0
            assert rows_of() == [0, 1, 9]


def waiting(folder, timeout):
    kernels.prepare()
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:  # both come well within the timeout, however busy it is
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(WireError, match=r"rank 2 did not come to .* in time \(2 of 3 came"):
        init(timeout=timeout)
    assert not dist.is_initialized()
    return time.monotonic() - began


# What is refused, with nothing sent.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"backend": "smoke"}, "backend 'smoke' is unknown: use one of gloo, weft, nccl, "),
        ({"backend": "ucc"}, "backend 'ucc' is not in this build of torch .*: use gloo, or build"),
        ({"backend": ["gloo"]}, r"backend \['gloo'\] is unknown: use one of gloo, weft, nccl, "),
        ({"watch": 10**400}, r"watch \(or WEFT_WATCH\) is .*: pass a number of seconds above 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": timedelta(seconds=9)}, r"timeout is datetime.timedelta\(seconds=9\)"),
        ({"rendezvous": "http://somewhere"}, "none of env://, tcp://host:port and file://"),
        ({"rendezvous": "tcp://127.0.0.1:1"}, "needs RANK and WORLD_SIZE"),
    ],
)
def test_wrong_arguments(arguments, complaint, monkeypatch):
    monkeypatch.setattr(module, "TELL", 0.1)
    with pytest.raises(WeftError, match=complaint):
        init(**arguments)


@pytest.mark.parametrize("name", ["KERNELS", "SAFE", "WIRE", "WATCH"])
def test_a_variable_whose_value_means_nothing_is_named(name, monkeypatch):
    monkeypatch.setenv(f"WEFT_{name}", "foo")
    with pytest.raises(WeftError, match=f"WEFT_{name}.*foo|foo.*WEFT_{name}"):
        init()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_says_what_it_needs():
    with pytest.raises(WeftError, match="'nccl' needs a GPU and a CUDA build of torch"):
        init("nccl")


# Interrupts.

WEFT = os.path.join(weft.__path__[0], "")
LOOKS_FOR_SIGNALS = {"CALL", "RESUME", "JUMP_BACKWARD", "BEFORE_WITH", "CALL_FUNCTION_EX"}


class Interrupt:
    """A tracer that interrupts weft's own code at the given one of the points where Ctrl-C may."""

    def __init__(self, at):
        self.at = at
        self.count = 0
        self.last = {}  # the operation that each frame is behind

    def __call__(self, frame, event, arg):
        if event == "call":
            frame.f_trace_opcodes = True
            return self if frame.f_code.co_filename.startswith(WEFT) else None
        if event == "opcode":
            # Python looks for signals behind these operations: before one, such as the call that
            # gives a lock back, no interrupt can come. A call in a `return` inside `with`, SWAP
            # behind it, raises still inside, and a tracer only when that has been left.
            behind, self.last[frame] = self.last.get(frame), operation(frame)
            self.count += behind in LOOKS_FOR_SIGNALS and self.last[frame] != "SWAP"
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def operation(frame):
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def start(interrupt):
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        init(timeout=60)
    finally:
        sys.settrace(before)


# Python itself ignores what is raised in a finalizer, of what an interrupted start has dropped
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_init_leaves_no_default_group_behind():
    with init():
        pass  # what is loaded once, is
    none = Interrupt(-1)
    start(none)
    shutdown()
    assert none.count > 100
    interrupted = 0
    left = []
    for point in range(1, none.count):
        try:
            start(Interrupt(point))
        except KeyboardInterrupt:
            interrupted += 1
        # where it was not interrupted, since it took fewer steps, or not before weft was running
        shutdown()
        if dist.is_initialized():
            left.append(point)
            dist.destroy_process_group()
    assert left == []
    assert interrupted > 50
    with init():
        assert rows_of() == [0, 9]


# Leaving, forking.


def test_a_program_may_end_without_shutdown(programs):
    program = programs(
        "from weft.bootstrap.init import init\n"
        "group = init()\n"
        "group.worker.submit('nothing', lambda: None).wait()\n"
        "print('done')\n",
        strict=True,
        whole=True,
    )
    assert (program.communicate(), program.returncode) == (("done\n", ""), 0)


def test_a_forked_child_does_not_say_goodbye_for_its_parent():
    assert launch(2, forking, env=QUICK) == [[0, 1, 9]] * 2


def forking():
    with init(timeout=60):
        rows_of()
        if dist.get_rank() == 0:
            child = os.fork()
            if child == 0:
                shutdown()
                os._exit(0)
            os.waitpid(child, 0)
        return rows_of()


FORKS = """
import os, sys, torch, torch.distributed as dist, weft
def ranks(what):
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")
            try:
                weft.init(timeout=60, rendezvous=f"file://{sys.argv[1]}/{what}")
                sys.exit(int(weft.all_reduce(torch.ones(1))))
            except weft.WeftError as error:
                sys.exit(3 if "spawn or forkserver" in str(error) else str(error))
    print(*(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children))
ranks("nothing")
with weft.init():
    weft.all_reduce(torch.ones(1))
    ranks("weft")
ranks("nothing any more")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks("a group")
"""


def test_forked_processes_may_be_ranks_unless_their_parent_is_in_a_group(programs, tmp_path):
    program = programs(FORKS, str(tmp_path), env={**os.environ, **QUICK}, whole=True)
    said, errors = program.communicate()
    assert said.split() == ["2", "2", "3", "3"] * 2, errors


def started_by_a_thread():
    thread = threading.Thread(target=weft.init)
    thread.start()
    thread.join()
    with weft.init():
        return weft.all_reduce(torch.ones(1)).item()


def test_a_group_that_another_thread_started_is_the_default_of_who_asks_for_it():
    assert processes(1, started_by_a_thread) == [1.0]


def started_by_threads_at_once():
    together = threading.Barrier(4)
    started = []

    def start():
        together.wait()
        started.append(weft.init())

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with weft.init() as group:
        return [each is group for each in started]


def test_threads_that_start_weft_at_once_get_one_group():
    assert processes(1, started_by_threads_at_once) == [[True] * 4]


def forked_while_a_thread_starts():
    with module.starting, ThreadPoolExecutor(1) as other:
        return other.submit(_exit_of_a_child_that_starts).result()


def _exit_of_a_child_that_starts():
    child = os.fork()
    if child == 0:
        os._exit(0 if module.starting.acquire(blocking=False) else 1)
    return os.waitpid(child, 0)[1]


def test_a_child_does_not_wait_for_the_thread_that_starts_in_its_parent():
    assert processes(1, forked_while_a_thread_starts) == [0]
