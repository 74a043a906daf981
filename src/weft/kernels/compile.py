"""Which loops are machine code already, and who makes the others: never the caller of a kernel.

A *set* is the loops that are made together, named by a key: `("index", kind)`, `("gaps", kind)`,
`("floats", kind)`, `("pieces",)`, `("list",)`, `("lent",)`, `("share",)`, `("copy",)`, `("talk",)`,
`("owned", kind, op)` or `("value", src, dst, op, total)`.
`Compiler.loops` gives a set that is there, at once; if it is not, one background thread starts to
make it, and the caller does without. So no collective waits for a compiler. `Compiler.make` makes a
set now.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import cache

__all__ = ["KINDS", "Compiler", "Key", "Loops", "compiler"]

Key = tuple[str, ...]
Loops = Mapping[str, Callable[..., Any]]

KINDS = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "u8",
}
"""What lies in memory, in the words of `machine`."""

_log = logging.getLogger("weft")


class Compiler:
    """The sets of loops of this process."""

    def __init__(self) -> None:
        self._made: dict[Key, Loops] = {}
        self._failed: set[Key] = set()
        self._wanted: dict[Key, None] = {}  # in the order they were asked for
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # over the four above, held for moments
        self._making = threading.Lock()  # held while a set is made
        self._ending = threading.Event()
        self.unusable = ""
        if os.environ.get("WEFT_KERNELS") == "reference":
            self.unusable = "WEFT_KERNELS=reference"
        elif os.environ.get("WEFT_SAFE") == "1":
            self.unusable = "WEFT_SAFE=1"

    def loops(self, key: Key) -> Loops | None:
        """The set if it is made; else None, and it is being made."""
        found = self._made.get(key)
        if found is None and not self.unusable and key not in self._failed:
            self._want(key)
        return found

    def made(self, key: Key) -> bool:
        """Whether the set is there; starts nothing."""
        return key in self._made

    @property
    def busy(self) -> bool:
        """Whether sets are being made or loaded, which keeps a core, and the interpreter, busy."""
        return self._thread is not None or self._making.locked()

    def make(self, key: Key) -> None:
        """Make the set now, in this thread; where that cannot be, it is logged."""
        with self._making:
            if key in self._made or key in self._failed or self.unusable:
                return
            try:
                numba = _numba()
            except Exception as error:  # missing, or broken in any of many ways
                self.unusable = f"numba cannot be imported: {error}"
                _log.info("kernels are torch operations: %s", self.unusable)
                return
            try:
                loops = {}
                for name, loop in _members(key).items():
                    if self._ending.is_set():
                        return
                    loops[name] = _machine_code(numba, loop, (name, *key))
                self._made[key] = loops
            except Exception as error:  # the reference serves whatever the compiler dislikes
                self._failed.add(key)
                _log.warning("no compiled kernels for %s: %r", " ".join(key), error)

    def describe(self) -> str:
        """What serves and where it is kept, in a line."""
        if not self.unusable:
            try:
                version = importlib.metadata.version("numba")
            except importlib.metadata.PackageNotFoundError:
                self.unusable = "numba is not installed"
        if self.unusable:
            return f"torch operations ({self.unusable})"
        failed = f", {len(self._failed)} sets failed" if self._failed else ""
        return f"numba {version}, kept in {cache.directory() or 'no cache'}{failed}"

    def _want(self, key: Key) -> None:
        with self._lock:
            if self._ending.is_set():
                return
            self._wanted[key] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="weft-compile", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                key = next(iter(self._wanted), None)
                if key is None or self._ending.is_set():
                    self._thread = None
                    return
            self.make(key)
            with self._lock:
                del self._wanted[key]

    def end(self) -> None:
        """At exit: a compiler that still runs while the interpreter is taken down crashes."""
        self._ending.set()
        cache.patience.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def after_fork(self) -> None:
        """In a child: the thread is gone, and numba may be locked for ever if it was at work."""
        if self._thread is not None or self._making.locked():
            self.unusable = "this process was forked while kernels were being compiled"
        self._wanted, self._thread = {}, None
        self._lock, self._making = threading.Lock(), threading.Lock()


def _members(key: Key) -> dict[str, Callable[..., Any]]:
    """The loops of a set, still as Python."""
    # which import numba
    from . import (
        copy_loops,
        float_loops,
        gap_loops,
        index_loops,
        lent_loops,
        list_loops,
        owned_loops,
        piece_loops,
        share_loops,
        talk_loops,
        value_loops,
    )

    name, *kinds = key
    modules = {
        "index": index_loops,
        "gaps": gap_loops,
        "floats": float_loops,
        "lent": lent_loops,
        "list": list_loops,
        "owned": owned_loops,
        "pieces": piece_loops,
        "share": share_loops,
        "copy": copy_loops,
        "talk": talk_loops,
    }
    if name in modules:
        module = modules[name]
        return {loop: getattr(module, loop)(*kinds) for loop in module.LOOPS}
    return {
        "reduce": value_loops.reduce(*kinds),
        "reduce_some": value_loops.reduce_some(*kinds),
        "combine": value_loops.combine(*kinds[:3]),
    }


def _numba() -> Any:
    """numba, without the colours of its errors.

    For these it replaces `sys.stdout` while it compiles, if colorama is installed; in a thread of
    ours that would lead astray what the program prints at that moment.
    """
    # Looked at once, by the first import. What C sees stays as it is: there another thread may be
    # looking for a variable of its own, which setting one does not bear (setenv(3)).
    seen: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    name = os.environ.encodekey("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING")
    before = seen.get(name)
    seen[name] = os.environ.encodevalue("1")
    try:
        import numba
    finally:
        if before is None:
            del seen[name]
        else:
            seen[name] = before
    return numba


def _machine_code(numba: Any, function: Callable[..., Any], name: Key) -> Callable[..., Any]:
    from .machine import named

    named(function, *name)
    dispatcher = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    arguments = function.__code__.co_argcount
    with cache.attach(dispatcher):
        dispatcher.compile((numba.types.int64,) * arguments)
    dispatcher.disable_compile()
    return dispatcher  # type: ignore[no-any-return]  # numba's dispatchers are untyped


compiler = Compiler()
atexit.register(compiler.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=compiler.after_fork)
