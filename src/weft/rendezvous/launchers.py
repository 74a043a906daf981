"""Who launched this process, and as which rank: read from the environment alone.

Known are torchrun and whatever sets the same variables (`weft.bootstrap.local`, Kubernetes'
PyTorchJob, Ray Train, netlab, a person); mpirun of Open MPI, MPICH and Intel MPI; and srun. Without
a launcher it is a group of one. The first function of `_READERS` that finds its own variables
decides, so RANK and WORLD_SIZE, which a person can set, come first.

To read another launcher, add a function that returns a `Launch` or None, and name it in `_READERS`,
before those whose variables this launcher sets, too. Its own variable belongs in `VARIABLES`, and
no more in `UNREAD`. Where ranks meet follows from the `Launch` (`places.place`): on several
machines it must have `known` and `head`, or be an mpirun, whose ranks MPI tells where rank 0 is;
else the user names a place. docs/launch.md has a table of launchers.

The variables are those of the launchers' manuals: torchrun, Open MPI (mpirun, "Environmental
Variables"), MPICH and Intel MPI (Hydra), Slurm (srun, "OUTPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import WeftError

_log = logging.getLogger("weft")

_SLURM_SIZES = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"

VARIABLES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID")
"""By which a process of each launcher is known here."""

UNREAD = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_WORLD_SIZE",
    "PMIX_RANK",
    "PALS_RANKID",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
)
"""What else shows that a process is one of several: a place to meet; launchers that nothing here
reads."""

_SPECIAL_STEPS = 0xFFFFFFF0  # steps from here on are batch scripts and the like


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was launched.

    Attributes:
        kind: "torchrun", "environment" (its variables, set by something else), "alone", or what
            the launcher is called.
        rank: this process's number.
        size: how many processes there are.
        local_rank: its number on this machine.
        local_size: how many processes there are on this machine. If they are all, and the launcher
            tells no place, ranks meet in a file of this machine: so where a launcher does not say
            how many they are, it must say whether there are several machines.
        job: the launcher's name of the job, which no other job has at the same time; empty if it
            has no name.
        head: the host of rank 0, if the launcher tells it.
        known: whether all hosts of the job have the same `job`.
    """

    kind: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""
    head: str = ""
    known: bool = False

    @property
    def by_its_own_variables(self) -> bool:
        """Whether a launcher has told the rank by variables of its own, and no place to meet."""
        return self.kind not in ("torchrun", "environment", "alone")


def detect(env: Mapping[str, str]) -> Launch:
    """How a process with this environment was launched.

    Raises:
        WeftError: the variables are incomplete or contradict each other.

    Example:
        >>> launch = detect({"RANK": "1", "WORLD_SIZE": "4"})
        >>> launch.kind, launch.rank, launch.size
        ('environment', 1, 4)
        >>> launch = detect({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"})
        >>> launch.kind, launch.rank, launch.size
        ('mpirun', 3, 4)
        >>> detect({}).kind
        'alone'
    """
    for read in _READERS:
        launch = read(env)
        if launch is not None:
            break
    else:
        launch = Launch("alone", 0, 1, 0, 1)
    if launch.local_rank >= launch.local_size or launch.local_size > launch.size:
        raise WeftError(
            f"the environment has LOCAL_RANK={launch.local_rank}, "
            f"LOCAL_WORLD_SIZE={launch.local_size} and WORLD_SIZE={launch.size}: the first must "
            "be below the second, which is at most the third"
        )
    job = f" (job {launch.job})" if launch.job else ""
    _log.info("launched by %s%s: rank %d of %d", launch.kind, job, launch.rank, launch.size)
    return launch


def _torchrun(env: Mapping[str, str]) -> Launch | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise WeftError(
                f"the environment has {other}={env[other]} but no {name}: start with torchrun, "
                "or set both, or neither for a group of one"
            )
    rank, size = _ranked(env, "RANK", "WORLD_SIZE")
    local_rank = _whole(env, "LOCAL_RANK", rank)
    local_size = _whole(env, "LOCAL_WORLD_SIZE", max(size, local_rank + 1))
    kind = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    return Launch(kind, rank, size, local_rank, local_size, env.get("TORCHELASTIC_RUN_ID", ""))


def _open_mpi(env: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or _starter("OMPI_COMM_")
    rank, size = _ranked(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local_rank = _whole(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank)
    local_size = _whole(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    known = "@" in job  # else it is named after a process of one host
    return Launch("mpirun", rank, size, local_rank, local_size, job, known=known)


def _hydra(env: Mapping[str, str]) -> Launch | None:
    """mpirun of MPICH and of Intel MPI."""
    if "PMI_SIZE" not in env:
        return None
    rank, size = _ranked(env, "PMI_RANK", "PMI_SIZE")
    local_rank = _whole(env, "MPI_LOCALRANKID", rank)
    local_size = _whole(env, "MPI_LOCALNRANKS", size)
    job = _starter("PMI_RANK=")
    return Launch("mpirun", rank, size, local_rank, local_size, job)


def _slurm(env: Mapping[str, str]) -> Launch | None:
    """A task of srun; a process that a batch script runs by itself is none."""
    sizes = _sizes(env)
    counted = next((name for name in sizes if name in env), None)
    if not sizes or (counted is None and "PMI_SIZE" in env):  # `_hydra` reads PMI_SIZE
        return None
    if counted is None:
        raise WeftError(
            f"the environment has SLURM_PROCID={env['SLURM_PROCID']} but no {' or '.join(sizes)}, "
            "which says how many tasks there are: hand on what srun sets (into a container, too), "
            "or set RANK and WORLD_SIZE, or unset SLURM_PROCID for a group of one"
        )
    rank, size = _ranked(env, "SLURM_PROCID", counted)
    pmi = env.get("PMI_RANK"), env.get("PMI_SIZE", "1")
    if pmi[1] != "1" and pmi != (str(rank), str(size)):
        return None  # an mpirun that has srun start its daemons, one on each host
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    several = re.search(r",|\d-\d+[],]", nodes) is not None
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "0"
    local_rank = _whole(env, "SLURM_LOCALID", 0 if several else rank)
    return Launch(
        "srun",
        rank,
        size,
        local_rank,
        _slurm_local_size(env) or (local_rank + 1 if several else size),
        f"{job}.{step}" if job else "",
        re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).partition(",")[0],  # the first of node[08-10,12]
        known=bool(job),
    )


def _sizes(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that may say how many tasks there are; none, if this is no task of srun.

    A batch script runs alone, but also has the number 0 and the job's number of tasks. It is in no
    step, or in one with a special number.
    """
    if "SLURM_STEP_NUM_TASKS" in env:
        return _SLURM_SIZES[:1]
    if "SLURM_PROCID" not in env:
        return ()
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if "SLURM_STEP_NODELIST" in env or (step.isdecimal() and int(step) < _SPECIAL_STEPS):
        return _SLURM_SIZES
    if "SLURM_JOB_ID" not in env and "SLURM_JOBID" not in env:
        return _SLURM_SIZES  # a batch script would have the job's number, too
    # task 0 cannot be told from the batch script
    return () if env["SLURM_PROCID"].strip() == "0" else _SLURM_SIZES[:1]


def _slurm_local_size(env: Mapping[str, str]) -> int | None:
    """This node's part of, for instance, `2(x3),1`, if there is one."""
    counts: list[int] = []
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _whole(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else None


_READERS: tuple[Callable[[Mapping[str, str]], Launch | None], ...] = (
    _torchrun,
    _open_mpi,  # before srun, by which it may start its daemons
    _slurm,
    _hydra,
)


def _starter(mark: str) -> str:
    """A name for the process that started the ranks of this host: the nearest ancestor without
    `mark` in its environment. Scripts in between have a rank's environment, and so the mark."""
    pid = os.getppid()
    try:
        while mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
            status = Path(f"/proc/{pid}/stat").read_text()
            pid = int(status.rpartition(")")[2].split()[1])
    except OSError:  # no Linux, or not this user's process: then it is that one
        pass
    return f"process-{pid}"


def _ranked(env: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Rank and size, from the variables of these names; a group of one need not tell its rank."""
    ranks = _whole(env, size)
    number = _whole(env, rank, 0 if ranks == 1 else None)
    if number >= ranks:
        raise WeftError(
            f"the environment has {rank}={number} and {size}={ranks}: ranks start at 0, so there "
            "are more processes than the world size says, or this one has a wrong number"
        )
    return number, ranks


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise WeftError(f"the environment has no {name}: start with torchrun, mpirun or srun")
    try:
        if text.strip().isdecimal():
            return int(text)
    except ValueError:  # of more digits than Python reads
        raise WeftError(
            f"the environment has {name}={text[:20]}..., a number of {len(text)} digits"
        ) from None
    raise WeftError(f"the environment has {name}={text!r}, which is no whole number")
