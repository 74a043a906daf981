"""Plans: who moves which box to whom, in integers only.

A plan is a linear map of zeros and ones from the tensors of some ranks to those of others:
`y[put] += x[take]` for each of its moves. It is given by its two sides alone, each a set of
*pieces* of a global tensor, and a piece says in which rank's tensor it lies and where. Wherever a
piece that ranks *have* meets one that ranks *want*, there is a move. So the adjoint of a plan is
the plan with its sides exchanged, exactly, and one map serves every layer: forward, backward, and
backward of that.

Where the sides have a well-known form, the plan's `hint` names the collective that does the same,
faster. The idea of a recipe that is pure data, executed thinly, is einops'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from ..base.tensors import Shape
from .grid import Box, whole
from .sides import Move, Piece, Side

__all__ = ["Hint", "Local", "Move", "Piece", "Plan", "Side", "Write", "between"]

Hint = Literal["all_reduce", "broadcast", "sum_reduce"]
"""The collectives that can do what a plan does."""


Moves = list[tuple[Box, Box]]
"""(take, put) of what goes from one rank to another, in an order that both can tell."""


class Write(NamedTuple):
    """A part of what a move brings, written to the result.

    Attributes:
        move: which of the source's moves.
        of: the part, in what the move brings.
        take: the part, in the source's tensor.
        put: the part, in the result.
        first: whether nothing is there yet; else it is added to what is there.
    """

    move: int
    of: tuple[slice, ...]
    take: tuple[slice, ...]
    put: tuple[slice, ...]
    first: bool


@dataclass(frozen=True)
class Local:
    """What a plan asks of one rank.

    Its boxes are made once and used on every call of a layer with tensors of the same shapes.

    Attributes:
        sends: the boxes of its tensor that go to each peer.
        sources: what its result is made of, by rank, its own included, in ascending order.
        result: the shape of its result; `(0,)` if it has none.
        writes: what comes from each source in parts; sources are written in ascending order.
        blank: the boxes of its result that nothing is written to.
        adds: whether several values meet anywhere in its result.
    """

    sends: Mapping[int, tuple[Box, ...]]
    sources: Mapping[int, Moves]
    result: Shape

    @cached_property
    def blank(self) -> list[Box]:
        puts = (put for moves in self.sources.values() for _, put in moves)
        return _without([whole(self.result)], puts)

    @cached_property
    def writes(self) -> Mapping[int, list[Write]]:
        found: dict[int, list[Write]] = {source: [] for source in self.sources}
        left = [whole(self.result)]
        for source, moves in self.sources.items():
            for number, (take, put) in enumerate(moves):
                firsts = [both for each in left if (both := each & put) is not None]
                left = _without(left, firsts)
                for part in (*firsts, *_without([put], firsts)):
                    of = part.shifted([-at for at in put.start])
                    taken = of.shifted(take.start).slices
                    write = Write(number, of.slices, taken, part.slices, part in firsts)
                    found[source].append(write)
        return found

    @cached_property
    def adds(self) -> bool:
        return not all(write.first for writes in self.writes.values() for write in writes)


@dataclass(frozen=True)
class Plan:
    """A map of zeros and ones from what ranks have to what they want.

    Attributes:
        have: the tensors it reads.
        want: the tensors it makes.

    Example:
        >>> from weft.nn.grid import Box
        >>> plan = between({0: Box((0,), (3,)), 1: Box((3,), (5,))}, {1: Box((0,), (5,))})
        >>> for move in plan.moves:
        ...     print(move.source, move.take.start, move.destination, move.put.start)
        0 (0,) 1 (0,)
        1 (0,) 1 (3,)
        >>> [(move.source, move.destination) for move in plan.T.moves]
        [(1, 0), (1, 1)]
    """

    have: Side
    want: Side
    _locals: dict[int, Local] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def T(self) -> Plan:
        """The adjoint: every move the other way round."""
        return Plan(self.want, self.have)

    @property
    def ranks(self) -> list[int]:
        """All ranks that have or want anything."""
        return sorted({*self.have.shapes, *self.want.shapes})

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves, by destination, then by source."""
        return tuple(
            Move(source, take, rank, put)
            for rank in sorted(self.want.shapes)
            for source, moves in self.local(rank).sources.items()
            for take, put in moves
        )

    def local(self, rank: int) -> Local:
        """What one rank has to do; found without looking at what other pairs of ranks do."""
        found = self._locals.get(rank)
        if found is None:
            sends = {p: tuple(take for take, _ in self._meet(rank, p)) for p in self.ranks}
            sources = {p: self._meet(p, rank) for p in self.ranks}
            found = self._locals[rank] = Local(
                {peer: takes for peer, takes in sends.items() if takes and peer != rank},
                {peer: moves for peer, moves in sources.items() if moves},
                self.want.shapes.get(rank, (0,)),
            )
        return found

    def _meet(self, source: int, destination: int) -> Moves:
        return [
            (have.local(both), want.local(both))
            for have in self.have.by_rank.get(source, ())
            for want in self.want.by_rank.get(destination, ())
            if have.sheet == want.sheet and (both := have.box & want.box) is not None
        ]

    @cached_property
    def hint(self) -> Hint | None:
        """The collective among all of the plan's ranks that does the same, if there is one."""
        have, want = self.have, self.want
        parts = {(each.sheet, each.box, each.at) for each in (*have.pieces, *want.pieces)}
        shapes = {*have.shapes.values(), *want.shapes.values()}
        if len(parts) != 1 or len(self.ranks) < 2:
            return None
        ((_, box, at),) = parts
        if shapes != {box.shape} or any(at):
            return None  # not all of them are whole
        for side in (have, want):
            if not side.shapes or sorted(each.rank for each in side.pieces) != sorted(side.shapes):
                return None  # not each rank has it once
        if len(have.shapes) == 1:
            return "broadcast"
        if len(want.shapes) == 1:
            return "sum_reduce"
        return "all_reduce" if have.shapes.keys() == want.shapes.keys() else None

    def draw(self, rank: int | None = None) -> str:
        """Who has what, and which part of what a rank gets holds whose values, as text.

        What lies in no part is zero; where parts overlap, their values are added up.

        Args:
            rank: whose tensor to show; None: those of all ranks.

        Example:
            >>> from weft.nn.grid import Box, whole
            >>> shards = {0: Box((0,), (2,)), 1: Box((2,), (5,))}
            >>> print(between(shards, {1: whole((5,))}).draw())
            2 values in 1 messages between 2 ranks
            rank 0 has (2,)
            rank 1 has (3,)
            rank 1 gets (5,)
              [0:2] of rank 0
              [2:5] of rank 1
        """
        travel = [move for move in self.moves if move.source != move.destination]
        values = sum(move.take.volume for move in travel)
        pairs = len({(move.source, move.destination) for move in travel})
        lines = [f"{values:,} values in {pairs} messages between {len(self.ranks)} ranks"]
        for source, shape in sorted(self.have.shapes.items()):
            lines.append(f"rank {source} has {shape}")
        for each, shape in sorted(self.want.shapes.items()):
            if rank in (None, each):
                lines.append(f"rank {each} gets {shape}")
                for move in self.moves:
                    if move.destination == each:
                        ranges = map("{}:{}".format, move.put.start, move.put.stop)
                        lines.append(f"  [{', '.join(ranges)}] of rank {move.source}")
        return "\n".join(lines)


def between(have: Mapping[int, Box] | Side, want: Mapping[int, Box] | Side) -> Plan:
    """The plan that gives every rank what it wants of what ranks have.

    Args:
        have: for each rank the box of the global tensor that it holds; where boxes of several
            ranks overlap, their values add up.
        want: for each rank the box that it is to get; where no rank has anything, zeros.

    Example:
        >>> from weft.nn.grid import whole
        >>> everything = {rank: whole((4,)) for rank in range(3)}
        >>> between(everything, everything).hint
        'all_reduce'
    """
    return Plan(
        have if isinstance(have, Side) else Side.of(have),
        want if isinstance(want, Side) else Side.of(want),
    )


def check_plan(plan: Plan, shapes: Mapping[int, Shape], ranks: Collection[int]) -> None:
    """Check that a plan fits the tensors of a call: it may be that of a program's own spec.

    Args:
        plan: the plan.
        shapes: of the tensors that ranks pass.
        ranks: who takes part.

    Raises:
        ValueError: a side has a rank that takes no part, or a tensor of another shape than that
            rank passes; or a piece is not inside its rank's tensor.
    """
    dims: dict[int, int] = {}  # of the global tensor on each sheet
    for name, side in (("have", plan.have), ("want", plan.want)):
        for rank, shape in side.shapes.items():
            if rank not in ranks:
                raise ValueError(
                    f"{name} has a tensor of rank {rank}, and ranks {list(ranks)} take part"
                )
            if not all(isinstance(each, int) and each >= 0 for each in shape):
                raise ValueError(
                    f"{name} has a tensor of shape {shape} of rank {rank}: lengths are ints from 0"
                )
        for piece in side.pieces:
            if piece.rank not in side.shapes:
                raise ValueError(f"{name} has a piece of rank {piece.rank}, and no shape of it")
            shape = side.shapes[piece.rank]
            if not _lies_in(piece, shape):
                raise ValueError(
                    f"{name} has {piece}, which does not lie in the tensor of shape {shape}"
                )
            ndim = dims.setdefault(piece.sheet, len(piece.box.start))
            if ndim != len(piece.box.start):
                raise ValueError(
                    f"{name} has {piece}, and another piece of that tensor has {ndim} dimensions"
                )
    for rank, shape in plan.have.shapes.items():
        if rank not in shapes:
            raise ValueError(f"have has a tensor of rank {rank}, which passes none")
        if shape != shapes[rank]:
            raise ValueError(
                f"have has a tensor of shape {shape} of rank {rank}, which passes {shapes[rank]}"
            )


def _lies_in(piece: Piece, shape: Shape) -> bool:
    """Whether a piece is a part of a tensor of that shape."""
    box = piece.box
    if not len(box.start) == len(box.stop) == len(piece.at) == len(shape):
        return False
    if not all(isinstance(each, int) for each in (*box.start, *box.stop, *piece.at)):
        return False
    extents = zip(piece.at, box.shape, shape, strict=True)
    return all(at >= 0 and 0 <= extent <= length - at for at, extent, length in extents)


def _without(found: list[Box], others: Iterable[Box]) -> list[Box]:
    """The parts of some boxes that are outside all others."""
    for other in others:
        found = [left for each in found for left in each - other]
    return found
