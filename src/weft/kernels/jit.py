"""Machine code of the loops: instances, each made once on a machine and kept in a file.

The first `weft.init`, or kernel call, decides for the whole process whether there is machine code:
`loops()` gives it from then on, or None, and torch operations serve. By then all instances are
loaded that are often asked for (`USUAL`); another one when it is asked for first.

An instance is one of the loops in `loops`, with constants as its first arguments: its name,
"combine.rows.bf16.f32.sum", says which. Numba makes it, and it becomes an object file in the user's
cache directory (or `WEFT_CACHE_DIR`), in a folder named by a digest of all that it is made of. One
process of a host makes it, under a lock; the others wait, then load it, for which Numba is not
imported. What is loaded is run, so the directory must belong to this user and be closed to others;
without one, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import platformdirs

_log = logging.getLogger("weft")
SOURCES = ("jit.py", "loops.py", "page.py", "words.py")
_PREFIX = "weft."  # of the names of instances
_FROM_C = {"memcpy", "memset", "memmove", "sched_yield"}  # what machine code may call
WAIT = 120.0  # seconds that another process may take to compile; then it is done here too

_PLAIN = "look put put_each reached announce find confirm impossible compose share pick"
_OF_INDICES = "scan ascends sort unpack ends mark place pair encode decode"
_OF_SUMS = "take.{}.f32.f32 reduce.{}.f32.f32.f32.sum combine.{}.f32.f32.sum"
USUAL = (
    *_PLAIN.split(),
    *(f"{loop}.{index}" for loop in _OF_INDICES.split() for index in ("i32", "i64")),
    *(loop.format(size) for loop in _OF_SUMS.split() for size in ("numbers", "rows")),
)
"""The instances that are there, all or none, before the deadline of any wait begins."""

lock = threading.RLock()
"""Held while machine code is loaded or made. A fork waits for that: in the child, what another
thread had locked, also in Numba, would stay so."""

os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Loops(dict[str, Any]):
    """Instances by their names: functions of int64, or None.

    Those that are not there yet are loaded, or made, when they are looked up; None stands for one
    that cannot be.
    """

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        with suppress(Exception):  # needed before release 0.45, which does so itself and refuses
            llvm.initialize()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        if not features.get("f16c", True):  # of x86 alone
            raise RuntimeError("this CPU has no F16C, the conversion of half precision")
        self._machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine)

    def __missing__(self, name: str) -> Any:
        try:
            self.load([name])
        except Exception as error:  # of Numba, which may be broken in any of many ways
            _log.warning("torch operations serve instead of %s: %s", name, error)
        return self.setdefault(name, None)

    def load(self, names: Sequence[str]) -> None:
        """Load instances; those that no process has made before are made."""
        with lock:
            folder = folder_of_instances()
            if self.load_kept(names, folder):
                self._make(names, folder)

    def load_kept(self, names: Sequence[str], folder: Path) -> list[str]:
        """Load those that are in the cache; returns the others."""
        for name in names:
            if name not in self:
                data = _kept(folder / name)
                if data is not None:
                    self._add(name, data)
        return [name for name in names if name not in self]

    def _make(self, names: Sequence[str], folder: Path) -> None:
        """Make those that no other process makes meanwhile."""
        # who makes one instance within a call does not wait for who makes others
        turn = filelock.FileLock(f"{folder}.{names[0]}.lock", timeout=WAIT)
        # where the lock is not to be had, two processes make the same, which harms nobody
        with suppress(filelock.Timeout, OSError, NotImplementedError):
            turn.acquire()
        try:
            absent = self.load_kept(names, folder)
            if len(absent) > 1:
                _log.warning("compiling weft's arithmetic, once on this machine: ten seconds or so")
            for name in absent:
                data = compiled(name, self._machine)
                self._add(name, data)
                _keep(folder / name, data)
        finally:
            turn.release()

    def _add(self, name: str, data: bytes) -> None:
        """Load an instance: a byte that says how many arguments it has, and its object file."""
        import llvmlite.binding as llvm

        self._engine.add_object_file(llvm.ObjectFileRef.from_data(data[1:]))
        self._engine.finalize_object()
        form = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * data[0])
        self[name] = form(self._engine.get_function_address(_PREFIX + name))


machine_code = functools.cache(Loops)
"""That of this process. One that is forked of it has what it had loaded."""


def loops() -> Loops | None:
    """All loops, by the names of their instances; None: torch operations serve.

    Made, or loaded, by the first call in a process; that may take ten seconds once on a machine.
    """
    return None if _reason() else machine_code()


def describe() -> str:
    """What serves and where it is kept, in a line; makes the choice."""
    if _reason():
        return f"torch operations ({_reason()})"
    return f"numba {version_of('numba')}, kept in {cache_directory() or 'no cache'}"


@functools.cache
def _reason() -> str:
    """Why there is no machine code; nothing if there is."""
    if os.environ.get("WEFT_KERNELS") == "reference":
        return "WEFT_KERNELS=reference"
    try:
        with lock:
            machine_code().load(USUAL)
    except Exception as error:  # missing, broken in any of many ways, or not for this CPU
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _log.warning("kernels are torch operations, which take longer: %s", reason)
        return reason
    return ""


def load_what_is_kept() -> None:
    """Load what is in the cache, for processes that are forked later and choose themselves."""
    machine_code().load_kept(USUAL, folder_of_instances())


# The cache ------------------------------------------------------------------------------------


def cache_directory() -> Path | None:
    """The private directory that keeps machine code, made if need be; None where there is none.

    It is `kernels` in what `WEFT_CACHE_DIR` in the environment names; else in the user's cache
    directory, or if that cannot be had in the directory for temporary files.
    """
    given = os.environ.get("WEFT_CACHE_DIR")
    places: Sequence[Callable[[], Path]] = (
        lambda: platformdirs.user_cache_path("weft", appauthor=False).expanduser(),
        lambda: Path(tempfile.gettempdir()) / f"weft-{os.geteuid()}",
    )
    for place in [lambda: Path(given)] if given else places:
        try:
            return private_folder(place() / "kernels")
        except (OSError, RuntimeError) as error:  # there is no home, or nothing can be written
            _log.info("machine code is not kept: %s", error)
    return None


def private_folder(path: Path) -> Path:
    """`path` as a directory that only this user can change.

    Raises:
        OSError: it cannot be made or written to, or others have a say in it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    user = os.geteuid()
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user or about.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private directory of user {user} (mode 0700)")
    for above in path.parents:
        about = above.stat()
        shared = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
        if shared or about.st_uid not in (user, 0):
            raise PermissionError(f"others may rename what is in {above}")
    with tempfile.TemporaryFile(dir=path):
        return path  # it can be written to


def folder_of_instances() -> Path:
    """The folder of the files, named by a digest of the loops, their compilers and the CPU.

    Where there is no directory for it, one that cannot be: nothing is found or kept there.
    """
    return (cache_directory() or Path(os.devnull)) / digest_of_makers()


@functools.cache
def digest_of_makers() -> str:
    """Of all that instances are made of, as this process imported it."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    made_by = f"numba {version_of('numba')} llvmlite {version_of('llvmlite')} {name_of_cpu()}"
    digest.update(made_by.encode())
    return digest.hexdigest()[:16]


def version_of(package: str) -> str:
    return importlib.metadata.version(package)


def name_of_cpu() -> str:
    """What LLVM makes machine code for here."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def _kept(path: Path) -> bytes | None:
    """What was kept there, if it is all there."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    data = kept[32:]
    return data if hashlib.sha256(data).digest() == kept[:32] else None


def _keep(path: Path, data: bytes) -> None:
    """Keep the data for later processes."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, path)
    except OSError as error:  # a full disk: the next process compiles, too
        _log.info("machine code cannot be kept in %s: %s", path.parent, error)


# Making ---------------------------------------------------------------------------------------


def compiled(name: str, machine: Any) -> bytes:
    """An instance: a byte that says how many arguments it has, and its object file."""
    import llvmlite.binding as llvm
    import numba

    from . import loops

    which, *constants = name.split(".")
    loop = getattr(loops, which)
    numbers = [f"number{k}" for k in range(loop.__code__.co_argcount - len(constants))]
    text = f"lambda {', '.join(numbers)}: loop({', '.join([*constants, *numbers])})"
    instance = eval(text, {**loops.CONSTANTS, "loop": numba.njit(error_model="numpy")(loop)})
    signature = numba.int64(*[numba.int64] * len(numbers))
    made = numba.cfunc(signature, error_model="numpy")(instance)
    # Numba has C call the loop, and raise what that may: once that is one function, it raises
    # nothing, and asks nothing of Python
    module = llvm.parse_assembly(made.inspect_llvm().replace(" noinline ", " nounwind "))
    module.get_function(made.native_name).name = _PREFIX + name
    for function in module.functions:
        if not function.is_declaration and function.name != _PREFIX + name:
            function.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    asked = {
        function.name
        for function in module.functions
        if function.is_declaration and not function.name.startswith("llvm.")
    }
    if not asked <= _FROM_C:  # it could not be resolved, which ends a process
        raise RuntimeError(f"{name} calls {', '.join(sorted(asked - _FROM_C))}")
    code: bytes = machine.emit_object(module)
    return bytes([len(numbers)]) + code
