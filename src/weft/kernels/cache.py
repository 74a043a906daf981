"""Where machine code is kept between runs: a private directory, and who may compile into it.

The files are pickles, so whoever can write them can run code here: the directory is used only if
it belongs to this user and to nobody else, and the path to it cannot be changed by others. One
process of a host compiles a loop, under a lock on the directory; the others wait, then load it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import stamps

try:
    import fcntl
except ImportError:  # Windows: everybody compiles, the files are replaced as a whole
    fcntl = None  # type: ignore[assignment]  # the module, or that there is none

__all__ = ["attach", "directory", "has", "note", "patience", "user_cache"]

_log = logging.getLogger("weft")
_SOURCES = (
    "machine.py",
    "copy_loops.py",
    "float_loops.py",
    "float_table.py",
    "gap_loops.py",
    "index_loops.py",
    "lent_loops.py",
    "list_loops.py",
    "owned_loops.py",
    "piece_loops.py",
    "piece_table.py",
    "share_loops.py",
    "talk_loops.py",
    "talk_table.py",
    "value_loops.py",
)
_NOTE = "complete"  # a file
_WAIT = 60.0  # seconds that another process may take for one loop; then it is compiled here too


@functools.cache
def directory() -> Path | None:
    """The directory that keeps machine code, made if need be; None where there is none.

    It is `kernels/STAMP` (`stamps`) in what `WEFT_CACHE_DIR` in the environment names; else in the
    user's cache directory, or if that cannot be had in the directory for temporary files.
    """
    given = os.environ.get("WEFT_CACHE_DIR")
    for parent in [Path(given)] if given else [user_cache(), _temporary()]:
        try:
            return stamps.folder(_private(parent / "kernels"), _stamp(), _private)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            _log.info("compiled kernels are not kept in %s: %s", parent, error)
    return None


def has(text: str) -> bool:
    """Whether `note` was called with this, in a process that kept machine code here."""
    path = directory()
    if path is None:
        return False
    try:
        return (path / _NOTE).read_text() == text
    except OSError:
        return False


def note(text: str) -> None:
    """Remember what is there, for processes to come."""
    path = directory()
    if path is None or has(text):
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=path, delete=False) as file:
            file.write(text)
        os.replace(file.name, path / _NOTE)
    except OSError as error:  # a full disk: the next process waits, too
        _log.info("what is kept in %s cannot be noted: %s", path, error)


def user_cache() -> Path:
    """The directory of weft in the user's cache directory; RuntimeError: there is no home."""
    if sys.platform == "darwin":
        return Path("~/Library/Caches/weft").expanduser()
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "weft"


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"weft-{_user()}"


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _private(path: Path) -> Path:
    """`path` as a directory that only this user can change.

    Raises:
        OSError: it cannot be made, or others have a say in it.
    """
    path = path.absolute()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return path
    path = path.parent.resolve() / path.name
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != _user() or about.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private directory of user {_user()} (mode 0700)")
    for above in path.parents:
        about = above.stat()
        shared = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
        if shared or about.st_uid not in (_user(), 0):
            raise PermissionError(f"others may rename what is in {above}")
    with tempfile.TemporaryFile(dir=path):
        return path  # it can be written to


@functools.cache
def _stamp() -> str:
    """A digest of what machine code is made of: the loops, their compilers, the CPU."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for package in ("numba", "llvmlite"):
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    digest.update(f"{sys.version_info[:2]} {platform.machine()} {_cpu()}".encode())
    return digest.hexdigest()


def _cpu() -> str:
    """What kind this machine's is, as far as the system tells without a compiler's help."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = {"model name", "flags", "CPU part", "CPU implementer", "Features"}
    found = (line.partition(":") for line in lines)
    return repr(sorted({(name.strip(), what) for name, _, what in found if name.strip() in told}))


class _Turn:
    """The lock between processes: held by the one that compiles, from the miss to the file."""

    def __init__(self) -> None:
        self._file: int | None = None
        self.hurry = threading.Event()

    def take(self, path: Path) -> None:
        """Wait for the turn; go on without it where locks do not work or take too long."""
        if fcntl is None or self._file is not None:
            return
        try:
            file = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.info("compiling without a lock: %s", error)
            return
        deadline = time.monotonic() + _WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = file
                return
            except BlockingIOError:
                if time.monotonic() > deadline or self.hurry.wait(0.02):
                    break
            except OSError as error:  # a file system that has no locks
                _log.info("compiling without a lock: %s", error)
                break
        os.close(file)

    def give(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # not only closed: a child that was forked meanwhile shares what holds the lock
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def after_fork(self) -> None:
        """In a child: the turn is the parent's, and ends with it whatever the child does."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


_turn = _Turn()
patience = _turn.hurry
"""Once set, nobody waits for other processes any more: the interpreter is about to end."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.after_fork)


@contextmanager
def attach(dispatcher: Any) -> Iterator[None]:
    """Within this context `dispatcher.compile` loads from the cache, or compiles in its turn.

    One thread at a time. Whatever is wrong with the cache, compiling goes on without it.
    """
    path = directory()
    if path is not None:
        try:
            dispatcher._cache = _cache_class()(dispatcher.py_func, path)
        except Exception as error:  # numba's own classes, which another release may change
            _log.info("compiled kernels are not kept: numba refuses: %r", error)
    try:
        yield
    finally:
        _turn.give()


@functools.cache
def _cache_class() -> Any:
    """numba's cache of a function, in our directory whatever numba is configured to use."""
    from numba.core import caching

    class Cache(caching.FunctionCache):
        def __init__(self, function: Any, path: Path) -> None:
            class Implementation(caching.CompileResultCacheImpl):
                _locator_classes = [_locator(path)]  # noqa: RUF012  # numba reads the class

            self._impl_class, self._directory = Implementation, path
            super().__init__(function)  # type: ignore[no-untyped-call]  # as all of numba is

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            found = self._found(sig, target_context)
            if found is None:
                _turn.take(self._directory)
                found = self._found(sig, target_context)  # compiled by another meanwhile
            return found

        def _found(self, sig: Any, target_context: Any) -> Any:
            load: Any = super().load_overload
            try:
                return load(sig, target_context)
            except Exception as error:  # unpickling damaged files raises anything
                _log.info("a compiled kernel in %s is damaged: %r", self._directory, error)
                with suppress(OSError):
                    self._cache_file.flush()  # type: ignore[no-untyped-call]  # numba is untyped
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            save: Any = super().save_overload
            try:
                save(sig, data)
            except Exception as error:  # a full disk, a damaged index
                _log.info("a compiled kernel cannot be kept in %s: %r", self._directory, error)

    return Cache


def _locator(path: Path) -> Any:
    """What numba asks where the machine code of a function is, and of which sources it is."""

    class Locator:
        _py_file = __file__  # for numba's warnings

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls()

        def ensure_cache_path(self) -> None:
            """It is there."""

        def get_cache_path(self) -> str:
            return str(path)

        def get_source_stamp(self) -> str:
            return _stamp()

        def get_disambiguator(self) -> str:
            return "1"  # names are unique in a file; lines would leave stale files behind

    return Locator
