"""Machine code of the loops: instances, each made once on a machine and kept in a file.

The first `weft.init`, or kernel call, decides for the whole process whether there is machine code:
`loops()` gives it from then on, or None, and torch operations serve. By then all instances are
loaded that are often asked for (`USUAL`); another one when it is asked for first.

An instance is one of the loops in `loops`, with constants as its first arguments: its name,
"combine_rows.bf16.f32.sum", says which. Numba makes it, and it becomes an object file in the user's
cache directory (or `WEFT_CACHE_DIR`), in a folder named by a digest of all that it is made of. One
process of a host makes it, under a lock; the others wait, then load it, for which Numba is not
imported. What is loaded is run, so the directory must belong to this user and be closed to others;
without one, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import platform
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import platformdirs

_log = logging.getLogger("weft")
SOURCES = ("jit.py", "loops.py", "page.py", "words.py")
_PREFIX = "weft."  # of the names of instances
_FROM_C = {"memcpy", "memset", "memmove", "sched_yield"}  # what machine code may call
WAIT = 120.0  # seconds that another process may take to compile; then it is done here too

_OF_MEETINGS = "look put put_each reached announce find confirm impossible"
_OF_INDICES = "scan ascends sort unpack ends mark place pair encode decode"
_SIZES = "numbers", "rows"
USUAL = (
    *_OF_MEETINGS.split(),
    *(f"{loop}.{index}" for loop in _OF_INDICES.split() for index in ("i32", "i64")),
    *("compose", "share", "pick"),
    *(f"take.{of}.f32.f32" for of in _SIZES),
    *(f"reduce_{of}.f32.f32.f32.sum" for of in _SIZES),
    *(f"combine_{of}.f32.f32.sum" for of in _SIZES),
)
"""The instances that are there, all or none, before the deadline of any wait begins."""


class Loops(dict[str, Any]):
    """The instances of this process, by their names: functions of int64, or None.

    Those that are not there yet are loaded, or made, when they are looked up; None stands for one
    that cannot be.
    """

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: where they are kept; None: nowhere.
        """
        import llvmlite.binding as llvm

        self._folder = folder
        self._machine = _machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine)
        self.is_closed = False  # no more of them can be loaded

    def __missing__(self, name: str) -> Any:
        with choice.lock:
            if name not in self and not self.is_closed:
                try:
                    self.load([name])
                except Exception as error:  # of Numba, which may be broken in any of many ways
                    _log.warning("torch operations serve instead of %s: %s", name, error)
        return self.setdefault(name, None)

    def load(self, names: Sequence[str]) -> None:
        """Load instances; those that no process has made before are made."""
        if not self.load_kept(names):
            return
        with _turn(self._folder):
            absent = self.load_kept(names)  # another process has made some meanwhile
            if len(absent) > 1:
                _log.warning("compiling weft's arithmetic, once on this machine: ten seconds or so")
            for name in absent:
                data = compiled(name, self._machine)
                self._add(name, data)
                if self._folder is not None:
                    keep(self._folder / name, data)

    def load_kept(self, names: Sequence[str]) -> list[str]:
        """Load those that are in the cache; returns the others."""
        for name in names:
            if self._folder is not None and name not in self:
                data = _kept(self._folder / name)
                if data is not None:
                    self._add(name, data)
        return [name for name in names if name not in self]

    def _add(self, name: str, data: bytes) -> None:
        """Load an instance: a byte that says how many arguments it has, and its object file."""
        import llvmlite.binding as llvm

        self._engine.add_object_file(llvm.ObjectFileRef.from_data(data[1:]))
        self._engine.finalize_object()
        form = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * data[0])
        self[name] = form(self._engine.get_function_address(_PREFIX + name))


class _Choice:
    """What serves in this process, once that is known."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known = False
        self.loops: Loops | None = None
        self.reason = ""  # why none


choice = _Choice()


def loops() -> Loops | None:
    """All loops, by the names of their instances; None: torch operations serve.

    Made, or loaded, by the first call in a process; that may take ten seconds once on a machine.
    """
    if not choice.known:
        with choice.lock:
            if not choice.known:
                _choose()
    return choice.loops


def required() -> Loops:
    """The loops, for what is only called where all ranks have them."""
    found = loops()
    assert found is not None, choice.reason
    return found


def describe() -> str:
    """What serves and where it is kept, in a line; makes the choice."""
    if loops() is None:
        return f"torch operations ({choice.reason})"
    return f"numba {version_of('numba')}, kept in {cache_directory() or 'no cache'}"


def _choose() -> None:
    reason = _forbidden()
    if not reason:
        try:
            found = _loops_in(folder_of_instances())
            found.load(USUAL)
            choice.loops = found
        except Exception as error:  # missing, broken in any of many ways, or not for this CPU
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _log.warning("kernels are torch operations, which take longer: %s", reason)
    choice.reason, choice.known = reason, True


def _forbidden() -> str:
    """The variable of the environment that forbids machine code, or nothing."""
    return "WEFT_KERNELS=reference" if os.environ.get("WEFT_KERNELS") == "reference" else ""


_loops_in = functools.cache(Loops)


def load_what_is_kept() -> None:
    """Load what is in the cache, for processes that are forked later and choose themselves."""
    if not _forbidden():
        _loops_in(folder_of_instances()).load_kept(USUAL)


def _after_fork() -> None:
    """In a forked child: if a thread of the parent was making loops, no more can be made.

    The locks that it held, also those of Numba, stay taken in the child.
    """
    if choice.lock.locked():
        if choice.loops is not None:
            choice.loops.is_closed = True
        elif not choice.known:
            choice.reason, choice.known = "this process was forked while they were made", True
    choice.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# The cache ------------------------------------------------------------------------------------


def cache_directory() -> Path | None:
    """The private directory that keeps machine code, made if need be; None where there is none.

    It is `kernels` in what `WEFT_CACHE_DIR` in the environment names; else in the user's cache
    directory, or if that cannot be had in the directory for temporary files.
    """
    given = os.environ.get("WEFT_CACHE_DIR")
    places: Sequence[Callable[[], Path]] = (user_cache, _temporary)
    for place in [lambda: Path(given)] if given else places:
        try:
            return private_folder(place() / "kernels")
        except (OSError, RuntimeError) as error:  # there is no home, or nothing can be written
            _log.info("machine code is not kept: %s", error)
    return None


def user_cache() -> Path:
    """weft's directory in the user's cache directory, which need not exist."""
    return platformdirs.user_cache_path("weft", appauthor=False)


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"weft-{user_number()}"


def user_number() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def private_folder(path: Path) -> Path:
    """`path` as a directory that only this user can change.

    Raises:
        OSError: it cannot be made or written to, or others have a say in it.
    """
    path = path.absolute()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return path
    path = path.parent.resolve() / path.name
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user_number() or about.st_mode & 0o077:
        raise PermissionError(
            f"{path} is not a private directory of user {user_number()} (mode 0700)"
        )
    for above in path.parents:
        about = above.stat()
        shared = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
        if shared or about.st_uid not in (user_number(), 0):
            raise PermissionError(f"others may rename what is in {above}")
    with tempfile.TemporaryFile(dir=path):
        return path  # it can be written to


def folder_of_instances() -> Path | None:
    """The folder of the files; named by a digest of the loops, their compilers and the CPU."""
    directory = cache_directory()
    if directory is None:
        return None
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for package in ("numba", "llvmlite"):
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {version_of(package)}".encode())
    digest.update(f"{sys.version_info[:2]} {platform.machine()} {name_of_cpu()}".encode())
    return directory / digest.hexdigest()[:16]


@functools.cache
def version_of(package: str) -> str:
    return importlib.metadata.version(package)


@functools.cache
def name_of_cpu() -> str:
    """What LLVM makes machine code for here."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


@contextmanager
def _turn(folder: Path | None) -> Iterator[None]:
    """The lock between processes; without it where locks do not work or take too long."""
    if folder is None:
        yield
        return
    lock = filelock.FileLock(folder.with_suffix(".lock"), timeout=WAIT)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError, NotImplementedError) as error:
        _log.info("compiling without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()


def _kept(path: Path) -> bytes | None:
    """What was kept there, if it is all there."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    data = kept[32:]
    return data if hashlib.sha256(data).digest() == kept[:32] else None


def keep(path: Path, data: bytes) -> None:
    """Keep the data for later processes."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, path)
    except OSError as error:  # a full disk: the next process compiles, too
        _log.info("machine code cannot be kept in %s: %s", path.parent, error)


# LLVM -----------------------------------------------------------------------------------------


def _machine() -> Any:
    """What LLVM needs to know of this machine."""
    import llvmlite.binding as llvm

    with suppress(Exception):  # needed before release 0.45, which does so itself and refuses
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if platform.machine() == "x86_64" and not features.get("f16c"):
        raise RuntimeError("this CPU has no F16C, the conversion of half precision")
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=features.flatten(),
        opt=3,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )


def compiled(name: str, machine: Any) -> bytes:
    """An instance: a byte that says how many arguments it has, and its object file."""
    import llvmlite.binding as llvm

    module, count = _module_of(name)
    for function in module.functions:
        if not function.is_declaration and function.name != _PREFIX + name:
            function.linkage = "internal"
            function.add_function_attribute("alwaysinline")
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    asked = {
        function.name
        for function in module.functions
        if function.is_declaration and not function.name.startswith("llvm.")
    }
    if not asked <= _FROM_C:  # it could not be resolved, which ends a process
        raise RuntimeError(f"{name} calls {', '.join(sorted(asked - _FROM_C))}")
    code: bytes = machine.emit_object(module)
    return bytes([count]) + code


def _module_of(name: str) -> tuple[Any, int]:
    """An instance in LLVM's language, not optimised yet, and how many arguments it has."""
    import llvmlite.binding as llvm

    numba: Any = importlib.import_module("numba")
    from . import loops

    which, *parts = name.split(".")
    loop = getattr(loops, which)
    constants = {f"constant{k}": loops.CONSTANTS[part] for k, part in enumerate(parts)}
    given = [f"number{k}" for k in range(loop.__code__.co_argcount - len(constants))]
    text = f"lambda {', '.join(given)}: loop({', '.join([*constants, *given])})"
    instance = eval(text, {"loop": numba.njit(error_model="numpy")(loop), **constants})
    signature = numba.int64(*[numba.int64] * len(given))
    level, numba.config.OPT = numba.config.OPT, type(numba.config.OPT)(0)  # later, all at once
    try:
        made = numba.cfunc(signature, error_model="numpy")(instance)
        # what Numba compiles is called by what C calls, and is not to be inlined into that
        module = llvm.parse_assembly(made.inspect_llvm().replace(" noinline ", " nounwind "))
    finally:
        numba.config.OPT = level
    module.get_function(made.native_name).name = _PREFIX + name
    return module, len(given)
