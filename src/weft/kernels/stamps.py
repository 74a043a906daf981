"""Folders of machine code by what it was made of, and when an old one may go.

Every stamp (of sources, compiler and CPU; see `cache`) has a folder of its own, so versions of weft
do not overwrite each other's files. A process holds a shared lock on a file in the folder that it
uses, as long as it lives. Who makes a new folder removes those that nobody holds and nobody has
used for long, or that are more than some.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing tells whether a folder is in use, so all are kept
    fcntl = None  # type: ignore[assignment]  # the module, or that there is none

__all__ = ["folder"]

_log = logging.getLogger("weft")
_LENGTH = 16  # hexadecimal digits of a stamp in a name
_MARK = "used"  # the file that is locked; its time is when the folder was last taken
_KEPT = 8  # folders beside one's own
_DAYS = 30.0  # that a folder is kept without being used
_ATTEMPTS = 50  # to hold a folder while others remove it

_held: dict[Path, int] = {}  # the locks of this process, never given back


def folder(parent: Path, stamp: str, private: Callable[[Path], Path]) -> Path:
    """The folder of a stamp, held from now on by this process.

    Args:
        parent: where the folders are.
        stamp: a digest, in hexadecimal digits.
        private: makes a directory that only this user can change.

    Raises:
        OSError: as `private` does.
    """
    path = parent / stamp[:_LENGTH]
    new = not path.exists()
    for _ in range(_ATTEMPTS):
        path = private(path)
        if fcntl is None or path in _held or _hold(path):
            break
        time.sleep(0.02)
    if new and fcntl is not None:
        _clear(path)
    return path


def _hold(path: Path) -> bool:
    """Lock the folder against being removed; False where that is just being done."""
    try:
        file = os.open(path / _MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(file)
        there = os.stat(path / _MARK).st_ino == os.fstat(file).st_ino
    except (BlockingIOError, FileNotFoundError):
        there = False
    except OSError as error:  # a file system that has no locks: nothing is removed from it either
        _log.info("%s is not locked: %s", path, error)
        there = True
    if there:
        _held[path] = file
    else:
        os.close(file)
    return there


def _clear(own: Path) -> None:
    """Remove the folders beside one's own that are old or too many, but none that is in use."""
    found = []
    for path in own.parent.iterdir():
        digits = len(path.name) == _LENGTH and set(path.name) <= set("0123456789abcdef")
        if digits and path != own and not path.is_symlink():
            try:
                found.append((os.stat(path / _MARK).st_mtime, path))
            except OSError as error:  # just made, or just removed
                _log.info("%s is left alone: %s", path, error)
    oldest = time.time() - _DAYS * 86400
    for number, (used, path) in enumerate(sorted(found, reverse=True)):
        if number >= _KEPT or used < oldest:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, unless a process uses it."""
    try:
        file = os.open(path / _MARK, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        _log.info("%s is not removed: %s", path, error)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    except BlockingIOError:
        return  # in use
    except OSError as error:
        _log.info("%s is not removed: %s", path, error)
    finally:
        os.close(file)
