"""`weft.config`: what is in force in this process, and where each value comes from.

Here is also the list of all variables that weft reads, by which a mistyped one is found.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import kernels
from ..base import watch
from ..base.errors import WeftError, nearest
from ..group import process_group
from ..group.group import Group
from ..rendezvous import launchers
from ..rendezvous.address import VARIABLES as OF_INTERFACES
from ..rendezvous.address import interface_of, own_address
from ..rendezvous.world import has_default
from ..version import __version__
from . import descent

_WITHOUT = {
    "WEFT_ALGORITHM": ("algorithm", "auto"),
    "WEFT_LINK": ("rate of the link", "as calls reached it"),
    "WEFT_KEEP": ("kept results", "at most a 64th of the machine's memory"),
    "WEFT_CACHE_DIR": ("cache", "the user's cache directory"),
    "WEFT_HOST": ("host", "as machine and network say"),
    "WEFT_TRACE": ("trace", "off"),
    "WEFT_TRACEBACK": ("weft's frames in tracebacks", "not shown"),
}
"""Variables whose value is in force as it is: what each sets, and what applies without it."""

VARIABLES = frozenset(
    {
        *_WITHOUT,
        "WEFT_INTERFACE",
        "WEFT_KERNELS",
        "WEFT_WATCH",
        "WEFT_WIRE",
        "WEFT_SAFE",  # which is an error
        descent.VARIABLE,  # which weft itself sets
    }
)
"""All variables of the environment that are weft's own."""

_NOBODY = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that is in force.

    Attributes:
        name: what it is.
        value: as a text.
        source: where it is from: a variable, an argument, "default", or what decided it.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Config:
    """What is in force. It prints as a table; `config["wire"]` is a value.

    Attributes:
        settings: one after the other, each with a `name`, a `value` and its `source`: a variable,
            an argument, "default", or what decided it.
    """

    settings: tuple[Setting, ...]

    def __getitem__(self, name: str) -> str:
        for each in self.settings:
            if each.name == name:
                return each.value
        raise KeyError(name)

    def __repr__(self) -> str:
        names = max(len(each.name) for each in self.settings)
        values = max(len(each.value) for each in self.settings)
        return "\n".join(
            f"{each.name:{names}}  {each.value:{values}}  {each.source}" for each in self.settings
        )


def unknown_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """The variables in an environment that look like weft's and are not: each with what was meant.

    Example:
        >>> next(iter(unknown_variables(dict(WEFT_WRIE="torch")).values()))
        'WEFT_WIRE'
    """
    return {
        name: nearest(name, sorted(VARIABLES))
        for name in env
        if name.startswith("WEFT_") and name not in VARIABLES
    }


def config(group: Group | None) -> Config:
    """What is in force, with this group as the default one."""
    return Config(tuple(_settings(group)))


def _settings(group: Group | None) -> Iterator[Setting]:
    yield Setting("weft", __version__, "installed")
    yield Setting("torch", str(torch.version.__version__), "installed")
    yield Setting("python", platform.python_version(), "installed")
    yield _launched()
    yield _group(group)
    yield _kernels()
    yield _address()
    yield _watching()
    yield Setting("wire", *process_group.chosen_wire())
    for variable, (name, default) in _WITHOUT.items():
        value = os.environ.get(variable)
        if value:
            yield Setting(name, value, variable)
        else:
            yield Setting(name, default, _NOBODY)
    for variable, meant in unknown_variables(os.environ).items():
        hint = f": {meant} was meant?" if meant else ""
        yield Setting(variable, os.environ[variable], f"unknown to weft{hint}")


def _launched() -> Setting:
    try:
        launch = launchers.detect(os.environ)
        if launch.kind == "alone":
            value = "no launcher"
        else:
            value = f"{launch.kind}: rank {launch.rank} of {launch.size}"
    except WeftError as error:
        value = f"unclear: {error}"
    return Setting("launched by", value, "environment")


def _group(group: Group | None) -> Setting:
    if group is None:
        return Setting("group", "none", "weft.init was not called")
    value = f"rank {group.rank} of {group.size}, timeout {group.timeout:g} s"
    if has_default():
        value += f", backend {dist.get_backend_config()}"
    return Setting("group", value, "weft.init")


def _kernels() -> Setting:
    source = "WEFT_KERNELS" if os.environ.get("WEFT_KERNELS") else _NOBODY
    return Setting("kernels", kernels.describe(), source)


def _address() -> Setting:
    named = next((name for name in OF_INTERFACES if os.environ.get(name)), "")
    try:
        address = own_address()
        there = interface_of(address)
        value = f"{address} ({there})" if there else address
    except OSError as error:
        value = f"wrong: {error}"
    return Setting("listens at", value, named or "route")


def _watching() -> Setting:
    try:
        seconds = watch.chosen()
        value = "never" if seconds == float("inf") else f"after {seconds:g} s"
    except WeftError as error:
        value = f"wrong: {error}"
    return Setting("watch", value, watch.chosen_by())
