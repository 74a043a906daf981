"""The wires by name: what `weft.init(wire=)` and WEFT_WIRE may say.

Beside weft's own, a program may register a wire, or an installed package may offer one:

```toml
[project.entry-points."weft.wires"]
streams = "my_package:make_wire"
```

What stands there is the factory itself. It is imported when a program asks for this wire, and not
before, for a package may need a library or a device that few programs have.
"""

from __future__ import annotations

import pkgutil
import re
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from ..base.errors import WeftError, there_are
from ..base.memory import Pool
from .factory import Factory, Start
from .framed import CarriedSockets, Carrier
from .interface import Wire

ENTRY_POINTS = "weft.wires"
"""The group of entry points by which installed packages offer wires."""

_OWN = {
    "mpi": "weft.wire.mpi:make",
    "tcp": "weft.wire.tcp.wire:make",
    "torch": "weft.wire.torch_gloo:make",
}
"""weft's own wires, and where their factories are, which are imported when they are asked for."""

_CARRIERS = {"mpi": "weft.wire.mpi:carrier", "torch": "weft.wire.torch_gloo:carrier"}
"""What carries frames as a wire of this name does, for control links."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What a name may be: environments, command lines and lists of names have to say it."""


class _Registry:
    """The factories by name; any thread may use it.

    One that a program has registered comes before weft's own, and that before a package's.
    """

    def __init__(self) -> None:
        self._registered: dict[str, list[Factory]] = {}  # by name; the last one holds
        self._lock = threading.RLock()  # again by the same thread: an error lists the names

    def names(self) -> list[str]:
        with self._lock:
            return sorted({*self._registered, *_OWN, *_offers()})

    def add(self, name: str, factory: Factory, *, replace: bool) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise WeftError(
                f"{name!r} cannot be the name of a wire: use letters and digits, then also '_', "
                f"'-' and '.', as in 'my-wire'; {self._there_are()}"
            )
        if not callable(factory):
            raise WeftError(
                f"wire {name!r} needs a factory, which is a function of a weft.wire.Start that "
                f"returns the wire: {factory!r} cannot be called"
            )
        with self._lock:
            before = self._registered.get(name, [])
            if not replace and (before or name in _OWN):
                whose = "one of weft's own"
                if before:
                    whose = f"that of {getattr(before[-1], '__module__', 'a program')}"
                raise WeftError(
                    f"wire {name!r} is registered already, {whose}: use another name, or "
                    f"replace=True to take its place; {self._there_are()}"
                )
            self._registered[name] = [*before, factory]

    def remove(self, name: str) -> None:
        with self._lock:
            if name in self._registered:
                self._registered[name].pop()
                if not self._registered[name]:
                    del self._registered[name]
                return
            why = "is one of weft's own, which stay" if name in _OWN else "was not registered"
            raise WeftError(f"wire {name!r} {why}; {self._there_are()}")

    def find(self, name: str) -> Factory:
        with self._lock:
            if name in self._registered:
                return self._registered[name][-1]
        return own_wire(name) if name in _OWN else self._offered(name)

    def _offered(self, name: str) -> Factory:
        """Import the factory that an installed package offers."""
        offers = _offers().get(name, [])
        if not offers:
            raise WeftError(
                f"wire {name!r} is unknown: use one of {', '.join(self.names())}, or register it "
                "first, on every rank"
            )
        values = sorted({offer.value for offer in offers})
        if len(values) > 1:
            raise WeftError(
                f"wire {name!r} is offered by several installed packages, as "
                f"{' and '.join(values)}: uninstall all but one; {self._there_are()}"
            )
        missing = f"wire {name!r} of an installed package is missing: {values[0]}"
        try:
            factory: Factory = offers[0].load()
        except Exception as error:
            raise WeftError(
                f"{missing} raised {type(error).__name__}: {error}; {self._there_are()}"
            ) from error
        if not callable(factory):
            raise WeftError(
                f"{missing} is {type(factory).__name__}, not a function that makes a wire; "
                f"{self._there_are()}"
            )
        return factory

    def _there_are(self) -> str:
        return there_are(self.names())


def _offers() -> dict[str, list[EntryPoint]]:
    """What installed packages offer, by name; no package is imported."""
    offers: dict[str, list[EntryPoint]] = {}
    for offer in entry_points(group=ENTRY_POINTS):
        offers.setdefault(offer.name, []).append(offer)
    return offers


_WIRES = _Registry()


def register_wire(name: str, factory: Factory, *, replace: bool = False) -> None:
    """Register a wire, for `weft.init(wire=name)` and WEFT_WIRE.

    All ranks register the same, before the group starts. `weft.testing.check_wire` tries whether
    the wire keeps what `weft.wire.interface` says.

    Args:
        name: of the wire: a letter or a digit, then also `_`, `-` and `.`.
        factory: makes this rank's end of it, `factory(start) -> Wire`; every rank runs it at the
            same time. A rank that cannot have the wire raises in it, and then all ranks raise.
        replace: take the place of a wire that has this name already.

    Raises:
        WeftError: a wire of this name is registered, and `replace` is not set; or a wire cannot
            have this name, or the factory cannot be called.

    Example:
        >>> def make_mine(start):
        ...     raise OSError("the network of this example is out of order")
        >>> register_wire("mine", make_mine)
        >>> wire_named("mine") is make_mine
        True
        >>> unregister_wire("mine")
    """
    _WIRES.add(name, factory, replace=replace)


def unregister_wire(name: str) -> None:
    """Remove a wire that `register_wire` registered; one that it had replaced is back.

    Raises:
        WeftError: none of this name is registered, or it is one of weft's own.
    """
    _WIRES.remove(name)


def wire_named(name: str) -> Factory:
    """The factory of the wire of this name.

    Raises:
        WeftError: there is none, and the text lists the names there are; or an installed package
            offers it, and cannot be imported.
    """
    return _WIRES.find(name)


def own_wire(name: str) -> Factory:
    """The factory of one of weft's own wires, also where another one has its name.

    Example:
        >>> own_wire("tcp") is wire_named("tcp")
        True
    """
    factory: Factory = pkgutil.resolve_name(_OWN[name])
    return factory


def wire_alone(memory: Pool) -> Wire:
    """The wire of a group of one."""
    make_alone: Callable[[Pool], Wire] = pkgutil.resolve_name("weft.wire.tcp.wire:alone")
    return make_alone(memory)


def carrier_beside(factory: Factory) -> str:
    """The name of that of weft's own wires which is to carry the control links beside a wire that
    this makes; "": sockets do.

    Not the wire's name decides: a program may have registered another wire in the place of weft's.
    """
    return next((name for name in _CARRIERS if factory is own_wire(name)), "")


def carried_sockets(name: str, start: Start) -> CarriedSockets:
    """A socket to each peer, whose bytes go the way of one of weft's own wires; collective.

    Args:
        name: as `carrier_beside` gives it.
        start: of a wire.

    Raises:
        RuntimeError, OSError, WeftError: as the factory of that wire.
    """
    make_carrier: Callable[[Start], Carrier] = pkgutil.resolve_name(_CARRIERS[name])
    sockets = CarriedSockets(make_carrier(start), start.rank, start.size)
    sockets.start()
    return sockets


def is_own(factory: Factory) -> bool:
    """Whether this is the factory of one of weft's own wires."""
    return any(factory is own_wire(name) for name in _OWN)


def wire_names() -> list[str]:
    """The names of all wires, those included that installed packages offer.

    Example:
        >>> {"mpi", "tcp", "torch"}.issubset(wire_names())
        True
    """
    return _WIRES.names()
