"""Machine code of the loops: made or loaded once in a process, all of it or none.

The first `weft.init`, or kernel call, decides for the whole process: `loops()` gives every loop of
`loops.INSTANCES` from then on, or None, and torch operations serve. No call waits for a compiler
later, and none sees the choice change.

Numba turns each loop into LLVM's language, once for all kinds of numbers; the instances, in which
kinds and operations are constants, are optimised together and become one object file. It is kept
in the user's cache directory (or `WEFT_CACHE_DIR`), under a digest of all that it was made of. One
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
import json
import logging
import os
import platform
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import platformdirs

Loop = Callable[..., int]
Loops = Mapping[str, Loop]

_log = logging.getLogger("weft")
_PREFIX = "weft."  # of the names of instances
SOURCES = ("jit.py", "llvm_intrinsics.py", "loops.py", "page.py", "shared.py")
# what machine code may ask of the C library
_FROM_C = {"memcpy", "memset", "memmove", "sched_yield"}
WAIT = 120.0  # seconds that another process may take to compile; then it is done here too
_KEPT = 8  # versions of machine code that stay beside this one,
_DAYS = 30.0  # if they were used in so many days


class _Choice:
    """What serves in this process, once that is known."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known = False
        self.loops: Loops | None = None
        self.reason = ""  # why none
        self.engine: Any = None  # which holds the memory of the machine code


choice = _Choice()


def loops() -> Loops | None:
    """All loops, by the names of `loops.INSTANCES`; None: torch operations serve.

    Made, or loaded, by the first call in a process; that may take ten seconds once on a machine.
    """
    if not choice.known:
        with choice.lock:
            if not choice.known:
                _choose()
    return choice.loops


def describe() -> str:
    """What serves and where it is kept, in a line; makes the choice."""
    if loops() is None:
        return f"torch operations ({choice.reason})"
    return f"numba {version_of('numba')}, kept in {cache_directory() or 'no cache'}"


def _forbidden() -> str:
    """The variable of the environment that forbids machine code, or nothing."""
    return "WEFT_KERNELS=reference" if os.environ.get("WEFT_KERNELS") == "reference" else ""


def _choose() -> None:
    reason = _forbidden()
    if not reason:
        try:
            choice.engine, choice.loops = _loaded(object_code())
        except Exception as error:  # missing, broken in any of many ways, or not for this CPU
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _log.warning("kernels are torch operations, which take longer: %s", reason)
    choice.reason, choice.known = reason, True


def _after_fork() -> None:
    """In a forked child: if a thread of the parent was making the loops, torch operations serve.

    The locks that it held, also those of Numba, stay taken in the child.
    """
    if choice.lock.locked() and not choice.known:
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
    temporary = Path(tempfile.gettempdir()) / f"weft-{user_number()}"
    for parent in [Path(given)] if given else [user_cache(), temporary]:
        try:
            return private_folder(parent / "kernels")
        except OSError as error:
            _log.info("machine code is not kept in %s: %s", parent, error)
    return None


def user_cache() -> Path:
    """weft's directory in the user's cache directory, which need not exist."""
    return platformdirs.user_cache_path("weft", appauthor=False)


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


def file_of_kernels() -> Path | None:
    """The file of the machine code; named by a digest of the loops, their compilers and the CPU."""
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
    return directory / f"{digest.hexdigest()[:16]}.o"


@functools.cache
def version_of(package: str) -> str:
    return importlib.metadata.version(package)


@functools.cache
def name_of_cpu() -> str:
    """What LLVM makes machine code for here."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def load_what_is_kept() -> None:
    """Load the object file from the cache, if it is there, for processes that are forked later."""
    path = None if _forbidden() else file_of_kernels()
    found = None if path is None else _read(path)
    if found is not None:
        _loaded(found)


def object_code() -> bytes:
    """The object file: from the cache, or compiled, by one process of those that want it."""
    path = file_of_kernels()
    if path is None:
        return compiled_kernels()
    found = _read(path)
    if found is None:
        with _turn(path.parent):
            found = _read(path)  # compiled by another meanwhile
            if found is None:
                _log.warning("compiling weft's arithmetic, once on this machine: ten seconds or so")
                found = compiled_kernels()
                write_kernels(path, found)
    return found


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """The lock between processes; without it where locks do not work or take too long."""
    lock = filelock.FileLock(directory / "lock", timeout=WAIT)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError, NotImplementedError) as error:
        _log.info("compiling without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()


def _read(path: Path) -> bytes | None:
    """What was kept there, if it is all there."""
    try:
        kept = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    data = kept[32:]
    return data if hashlib.sha256(data).digest() == kept[:32] else None


def write_kernels(path: Path, data: bytes) -> None:
    """Keep the data for later processes, and remove files that none has used for long."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, path)
        others = sorted(
            ((each.stat().st_mtime, each) for each in path.parent.glob("*.o") if each != path),
            reverse=True,
        )
        for number, (used, each) in enumerate(others):
            if number >= _KEPT or used < time.time() - _DAYS * 86400:
                each.unlink(missing_ok=True)
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


def compiled_kernels() -> bytes:
    """The object file of all instances, behind a line that says how many arguments each has."""
    import llvmlite.binding as llvm

    machine, module = _machine(), _module()
    names = {function.name for function in module.functions if not function.is_declaration}
    for function in module.functions:
        if function.name in names and not function.name.startswith(_PREFIX):
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
        raise RuntimeError(f"the loops call {', '.join(sorted(asked - _FROM_C))}")
    head = json.dumps(_arguments()).encode()
    return b"\n".join([head, machine.emit_object(module)])


def _arguments() -> dict[str, int]:
    """How many arguments each instance has."""
    from .loops import INSTANCES, LOOPS

    return {
        name: LOOPS[base].__code__.co_argcount - len(constants)
        for name, (base, constants) in INSTANCES.items()
    }


def _module() -> Any:
    """All loops, and the instances that call them with constants, in one module of LLVM."""
    import llvmlite.binding as llvm

    from .loops import INSTANCES, LOOPS

    numba: Any = importlib.import_module("numba")
    module, texts = None, []
    level, numba.config.OPT = numba.config.OPT, type(numba.config.OPT)(0)  # later, and all at once
    try:
        for name, loop in LOOPS.items():
            signature = numba.int64(*(numba.int64,) * loop.__code__.co_argcount)
            made = numba.cfunc(signature, error_model="numpy", boundscheck=False)(loop)
            # what Numba compiles is called by what C calls, and is not to be inlined into that
            part = llvm.parse_assembly(made.inspect_llvm().replace(" noinline ", " nounwind "))
            part.get_function(made.native_name).name = name
            if module is None:
                module = part
            else:
                module.link_in(part)
    finally:
        numba.config.OPT = level
    for name, (base, constants) in INSTANCES.items():
        count = LOOPS[base].__code__.co_argcount
        given = [f"i64 {constant}" for constant in constants]
        own = [f"i64 %a{number}" for number in range(count - len(given))]
        texts.append(
            f'define i64 @"{_PREFIX}{name}"({", ".join(own)}) {{\n'
            f'%r = call i64 @"{base}"({", ".join(given + own)})\nret i64 %r\n}}\n'
        )
    declared = (
        f'declare i64 @"{name}"({", ".join(["i64"] * loop.__code__.co_argcount)})\n'
        for name, loop in LOOPS.items()
    )
    assert module is not None
    module.link_in(llvm.parse_assembly("".join([*declared, *texts])))
    return module


@functools.cache
def _loaded(data: bytes) -> tuple[Any, Loops]:
    """An object file in memory: what holds it, and its functions."""
    import llvmlite.binding as llvm

    machine = _machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    head, _, code = data.partition(b"\n")
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    found = {}
    for name, count in json.loads(head).items():
        form = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)
        found[name] = form(engine.get_function_address(_PREFIX + name))
    return engine, found
