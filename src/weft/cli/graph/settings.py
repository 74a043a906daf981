"""What a person may ask of `weft demo --graph`, checked before anything starts.

Plain values only, as in `weft.cli.demo.settings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..demo.settings import Refused

__all__ = ["GRAPHS", "STEPS", "GraphSettings"]

GRAPHS = ("imports", "debian")
"""The graphs, the default one first."""

STEPS = 100
"""Steps when the person does not say."""


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """The checked options of one demo.

    Attributes:
        graph: one of `GRAPHS`.
        ranks: processes to start.
        steps: steps to train, with all ranks and then alone.
        dim: floats of a node's hidden state.
        alone: whether to train on one process, too.
        seed: of the first weights, and of which nodes are held out.
        out: folder that the report goes to.
        batch: unused; the whole graph is one.
    """

    graph: str
    ranks: int
    steps: int
    dim: int
    alone: bool
    seed: int
    out: Path
    batch: int = 0

    @classmethod
    def checked(
        cls,
        *,
        graph: Sequence[str],
        ranks: int,
        steps: int | None,
        dim: int,
        compare: str,
        seed: int,
        of_text: Sequence[str],
        out: Path,
    ) -> GraphSettings:
        """The settings, or `Refused` that names the first option that cannot be served.

        Args:
            graph: what was named beside `--graph`.
            of_text: options that were given and only mean something where text is trained on.

        Example:
            >>> given = dict(steps=None, dim=64, compare="all", seed=0, of_text=(), out=Path("x"))
            >>> GraphSettings.checked(graph=[], ranks=4, **given).graph
            'imports'
            >>> GraphSettings.checked(graph=["web"], ranks=4, **given)
            Traceback (most recent call last):
            ...
            weft.cli.demo.settings.Refused: --graph is 'web', it takes one of: imports, debian
        """
        if len(graph) > 1 or (graph and graph[0] not in GRAPHS):
            raise Refused(f"--graph is {' '.join(graph)!r}, it takes one of: {', '.join(GRAPHS)}")
        if of_text:
            raise Refused(f"{of_text[0]} is for training on text, and --graph was given")
        for name, value in (
            ("--ranks", ranks),
            ("--steps", STEPS if steps is None else steps),
            ("--dim", dim),
        ):
            if value < 1:
                raise Refused(f"{name} is {value}, it must be at least 1")
        if seed < 0:
            raise Refused(f"--seed is {seed}, it must not be negative")
        if compare not in ("all", "none"):
            raise Refused(f"--compare is {compare!r}, with --graph it takes one of: all, none")
        return cls(
            graph=graph[0] if graph else GRAPHS[0],
            ranks=ranks,
            steps=STEPS if steps is None else steps,
            dim=dim,
            alone=compare == "all" and ranks > 1,
            seed=seed,
            out=out,
        )
