"""Who launched this process, and as which rank: read from the environment alone.

Known are torchrun (and whatever sets the same variables: `weft.bootstrap.local`, netlab, a
person) and nobody at all, which is a group of one. mpirun and srun are recognised and refused,
since taking each of their processes for a group of one would train silently apart; to read them
too, add a function here that returns a `Launch` or None, and name it in `_READERS`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import WeftError

__all__ = ["Launch", "detect"]

_log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was launched.

    Attributes:
        kind: "torchrun", "environment" (its variables, set by something else) or "alone".
        rank: this process's number.
        size: how many there are.
        local_rank: its number on this machine.
        local_size: how many there are on this machine.
    """

    kind: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def detect(env: Mapping[str, str] | None = None) -> Launch:
    """How this process was launched, from `env` (default: the process's environment).

    Raises:
        WeftError: the variables are incomplete or contradict each other, or come from a launcher
            that weft cannot read.

    Example:
        >>> detect({"RANK": "1", "WORLD_SIZE": "4"})
        Launch(kind='environment', rank=1, size=4, local_rank=1, local_size=4)
        >>> detect({})
        Launch(kind='alone', rank=0, size=1, local_rank=0, local_size=1)
    """
    env = os.environ if env is None else env
    for read in _READERS:
        launch = read(env)
        if launch is not None:
            _log.info("launched by %s: rank %d of %d", launch.kind, launch.rank, launch.size)
            return launch
    raise AssertionError("the last reader takes whatever is left")


def _torchrun(env: Mapping[str, str]) -> Launch | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise WeftError(
                f"the environment has {other}={env[other]} but no {name}: start with torchrun, "
                "or set both, or neither for a group of one"
            )
    rank, size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE")
    if rank >= size:
        raise WeftError(f"the environment has RANK={rank} and WORLD_SIZE={size}: ranks start at 0")
    local_rank = _whole(env, "LOCAL_RANK", rank)
    local_size = _whole(env, "LOCAL_WORLD_SIZE", max(size, local_rank + 1))
    if local_rank >= local_size or local_size > size:
        raise WeftError(
            f"the environment has LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} and "
            f"WORLD_SIZE={size}: the first must be below the second, which is at most the third"
        )
    kind = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    return Launch(kind, rank, size, local_rank, local_size)


def _unread(env: Mapping[str, str]) -> Launch | None:
    """Refuse to be a group of one beside other processes that think the same."""
    for name, launcher in (
        ("OMPI_COMM_WORLD_SIZE", "mpirun"),
        ("PMI_SIZE", "mpirun"),
        ("SLURM_STEP_NUM_TASKS", "srun"),
    ):
        if env.get(name, "1") != "1":
            raise WeftError(
                f"this process was launched by {launcher} ({name}={env[name]}), which weft does "
                "not read yet: start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT for each process"
            )
    return None


def _alone(env: Mapping[str, str]) -> Launch:
    return Launch("alone", 0, 1, 0, 1)


_READERS: tuple[Callable[[Mapping[str, str]], Launch | None], ...] = (_torchrun, _unread, _alone)


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise WeftError(f"the environment has {name}={text!r}, which is no whole number")
    return int(text)
