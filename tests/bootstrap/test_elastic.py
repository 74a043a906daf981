"""torchrun's agent starts a job again whose ranks die: it goes on, to the same result."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys

from weft.testing import processes

JOB = """
import os, signal, sys, torch, weft

kept = sys.argv[1]
dies = dict(tuple(map(int, each.split(":"))) for each in sys.argv[2:])  # in attempt: this rank
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with weft.init(timeout=150) as group:
    torch.manual_seed(group.rank)  # sync_params brings them together
    table = torch.nn.EmbeddingBag(50, 4, sparse=True)
    step = 0
    if group.rank == 0 and os.path.exists(kept):
        step, state = torch.load(kept)
        table.load_state_dict(state)
    step = int(weft.all_reduce(torch.tensor(step), "max"))
    weft.sync_params(table)
    for step in range(step, 6):
        if step == 2 * attempt + 1 and dies.get(attempt) == group.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        table.zero_grad()
        table(torch.randint(50, (8, 3), generator=generator)).sum().backward()
        weft.sync_grads(table)
        with torch.no_grad():
            table.weight.add_(table.weight.grad.to_dense(), alpha=-0.1)
        if group.rank == 0:
            torch.save((step + 1, table.state_dict()), kept + ".new")
            os.replace(kept + ".new", kept)
        weft.barrier()
    total = table.weight.double().sum().item()
    sys.stdout.write(f"attempt {attempt} rank {group.rank} of {group.size}: {total}\\n")
"""


def run_here(script, kept):
    """What the script prints in this process, a rank that need not start an interpreter."""
    sys.argv = [script, kept]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script)
    return printed.getvalue()


def totals(printed):
    return dict(line.split(": ") for line in printed.splitlines())


def test_a_job_whose_ranks_die_goes_on_to_the_same_result(tmp_path, restarted):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    lines = processes(2, run_here, str(script), str(tmp_path / "whole"))
    undisturbed = totals("".join(lines))
    assert set(undisturbed) == {f"attempt 0 rank {rank} of 2" for rank in range(2)}
    (total,) = set(undisturbed.values())
    # rank 1 dies at the first, then rank 0, which hosts
    torn = restarted(JOB, [str(tmp_path / "torn"), "0:1", "1:0"], 2)
    disturbed = totals("".join(torn.values()))
    assert disturbed == {f"attempt 2 rank {rank} of 2": total for rank in range(2)}
    assert set(torn) == {(attempt, rank) for attempt in range(3) for rank in range(2)}
