"""Cores that this process may run on."""

import os


def cores_of_process() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
