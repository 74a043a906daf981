"""The contract of a wire: does it do what `weft.wire.interface` says?

No group runs over such a wire yet: the wires that programs use are `weft.wire.base.Wire`, whose
contract is `WireContract`. So these names are not among the public ones of `weft.testing` so far.

A clause is the program of one rank, `clause(wire)`, in plain asserts. How ranks are started is an
argument, since only who brings a wire knows how its ranks meet.

Bodies wait for a time where they must not meet: a message that is late, a rank that does not come.
These times are short, and no clause depends on one being kept; limits on waits are long.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..wire.interface import CHANNELS, Failure, Features, Pending, Wire, WireFailed
from .clauses import Outcome, raise_if_broken, title_of, tried
from .pace import patient

_BIG = 4 << 20  # bytes of a message that is longer than any buffer of a connection
_MEDIUM = 90_000  # bytes of a message that is longer than what is sent unasked
_MOMENT = 0.2  # seconds in which a message that nobody may wait for would have come
_ABORT = 1.0  # seconds that a wait may take to end after an abort


class Run(Protocol):
    """Starts ranks: `run(size, body)` runs `body(wire)` on each of `size` new ranks."""

    def __call__(self, size: int, body: Callable[[Wire], Any]) -> list[Any]:
        """The results, in rank order; raises what a rank raised.

        A rank that raises aborts its wire, and one that has not ended after a while is an error:
        whatever hangs is broken.
        """


class _Body(Protocol):
    """One rank's program; `soon` is the seconds in which what must come soon comes."""

    __name__: str

    def __call__(self, wire: Wire, soon: float) -> None: ...


class _Clause(NamedTuple):
    """One clause.

    Attributes:
        sizes: numbers of ranks to run it on.
        body: the program of a rank.
        unless: features of a wire that need not keep it.
    """

    sizes: tuple[int, ...]
    body: _Body
    unless: tuple[str, ...]


_CLAUSES: list[_Clause] = []


def _clause(*sizes: int, unless: tuple[str, ...] = ()) -> Callable[[_Body], _Body]:
    """Register the program of a rank as a clause, whose title is its docstring's first line."""

    def register(body: _Body) -> _Body:
        _CLAUSES.append(_Clause(sizes, body, unless))
        return body

    return register


def check_wire(
    run: Run,
    features: Features | None = None,
    *,
    clauses: Iterable[int] = (),
    soon: float = 5.0,
) -> list[Outcome]:
    """Try whether a wire keeps the contract of `weft.wire.interface.Wire`.

    Args:
        run: starts ranks with a wire each; `ranks_as_threads` makes one.
        features: of the wire; None: those of a wire without any. Some clauses are not for all.
        clauses: the numbers of those to try; none: all.
        soon: seconds in which what must come soon comes, on an idle machine; on a busy one up to
            four times as many.

    Returns:
        What each clause found; none is broken.

    Raises:
        AssertionError: some clauses are broken; the text lists each with what is wrong.

    Example:
        >>> from weft.wire.rooms import room
        >>> for outcome in check_wire(ranks_as_threads(room), clauses=[2, 4]):
        ...     print(outcome)
         2  tensors of every dtype and shape arrive as they were sent, from each to each  ok
         4  a channel waits for no other, whatever lies there  ok
    """
    kept = Features() if features is None else features
    asked = set(clauses)
    outcomes = [
        _outcome(number, clause, run, kept, patient(soon))
        for number, clause in enumerate(_CLAUSES, 1)
        if not asked or number in asked
    ]
    raise_if_broken("the wire", outcomes)
    return outcomes


def _outcome(number: int, clause: _Clause, run: Run, features: Features, soon: float) -> Outcome:
    title = title_of(clause.body)
    for name in clause.unless:
        if getattr(features, name):
            return Outcome(number, title, skipped=f"the wire is {name}")

    def check() -> None:
        for size in clause.sizes:
            run(size, functools.partial(clause.body, soon=soon))

    return tried(number, title, check)


def ranks_as_threads(
    make: Callable[[int], Sequence[Wire]], *, limit: float = 60.0
) -> Callable[[int, Callable[[Wire], Any]], list[Any]]:
    """Make a `Run` whose ranks are threads of this process.

    Args:
        make: makes the wires of a new group of so many ranks.
        limit: seconds that the ranks may take together, on an idle machine.
    """

    def run(size: int, body: Callable[[Wire], Any]) -> list[Any]:
        wires = make(size)
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def program(wire: Wire) -> None:
            try:
                results[wire.rank] = body(wire)
            except BaseException as error:
                error.add_note(f"on rank {wire.rank} of {size}")
                errors.append(error)
                wire.abort(Failure("aborted", wire.rank, f"rank {wire.rank} gave up"))
            finally:
                wire.close()

        threads = [threading.Thread(target=program, args=[wire], daemon=True) for wire in wires]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + patient(limit)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if errors:
            raise errors[0]
        assert not hanging, f"ranks {hanging} of {size} hang"
        return results

    return run


# What clauses are made of -----------------------------------------------------------------------


def _others(wire: Wire) -> list[int]:
    """All other ranks, beginning with the next one."""
    return [*range(wire.rank + 1, wire.size), *range(wire.rank)]


def _number(value: int = 0) -> Tensor:
    return torch.tensor([value])


def _bytes(count: int, value: int = 1) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


def _swap(wire: Wire, peer: int, soon: float) -> None:
    """Send a number to a peer, and receive the same from it."""
    got = wire.post([(peer, _number(1))], [(peer, _number())]).wait(soon)
    assert got[0].item() == 1, f"{got[0].item()} came for 1"


def _failure_of(use: Callable[[], object], kind: str, peer: int | None, soon: float) -> Failure:
    """The failure that a use raises soon, which has to be of this kind and about this peer."""
    began = time.monotonic()
    try:
        use()
    except WireFailed as error:
        failure = error.failure
    else:
        raise AssertionError(f"nothing was raised, where {kind!r} about rank {peer} should be")
    found = failure.kind, failure.peer
    assert found == (kind, peer), (
        f"{failure} was raised, where {kind!r} about rank {peer} should be"
    )
    taken = time.monotonic() - began
    assert taken < soon, f"{failure} was raised after {taken:.1f} s"
    return failure


def _is_not_over(pending: Pending, seconds: float) -> None:
    """A wait of so many seconds runs out."""
    try:
        pending.wait(seconds)
    except TimeoutError:
        return
    raise AssertionError("a wait for what had not come did not raise TimeoutError")


# The clauses -----------------------------------------------------------------------------------


@_clause(1, 2, 8)
def sizes(wire: Wire, soon: float) -> None:
    """a wire knows its rank, size, device and features; alone it has nobody to send to."""
    assert 0 <= wire.rank < wire.size
    assert isinstance(wire.device, torch.device) and isinstance(wire.features, Features)
    assert isinstance(wire, Wire)
    assert wire.post().wait() == []
    for _ in range(3):
        numbers = [(peer, _number()) for peer in _others(wire)]
        got = wire.post([(peer, _number(wire.rank)) for peer in _others(wire)], numbers).wait()
        assert [each.item() for each in got] == _others(wire)
    assert wire.failure() is None


@_clause(4)
def dtypes(wire: Wire, soon: float) -> None:
    """tensors of every dtype and shape arrive as they were sent, from each to each."""
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    for dtype in (*floats, torch.int64, torch.int8, torch.uint8, torch.bool):

        def made(source: int, target: int, dtype: torch.dtype = dtype) -> Tensor:
            return ((torch.arange(3 * (source + 1)).view(3, -1) + target) % 2).to(dtype)

        places = [torch.empty_like(made(peer, wire.rank)) for peer in _others(wire)]
        sends = [(peer, made(wire.rank, peer)) for peer in _others(wire)]
        pending = wire.post(sends, list(zip(_others(wire), places, strict=True)))
        got = pending.wait()
        assert all(one is place for one, place in zip(got, places, strict=True))
        for peer, one in zip(_others(wire), got, strict=True):
            assert torch.equal(one, made(peer, wire.rank)), f"{dtype} from rank {peer} is {one}"
        again = pending.wait()
        assert all(one is other for one, other in zip(got, again, strict=True))


@_clause(3)
def order(wire: Wire, soon: float) -> None:
    """the n-th send meets the n-th receive of a pair and channel, in whatever order one waits."""
    posts = []
    for i in range(10):
        sends = [(peer, _number(100 * wire.rank + i)) for peer in _others(wire)]
        posts.append(wire.post(sends, [(peer, 8) for peer in _others(wire)]))
    for i in reversed(range(10)):
        got = [view.view(torch.int64).item() for view in posts[i].wait()]
        assert got == [100 * peer + i for peer in _others(wire)], f"post {i} received {got}"
        posts[i].release()


@_clause(2, unless=("lockstep",))
def channels(wire: Wire, soon: float) -> None:
    """a channel waits for no other, whatever lies there."""
    peer, last = 1 - wire.rank, CHANNELS - 1
    if wire.rank == 0:
        posts = [wire.post([(peer, _bytes(_BIG, 3))], channel=last)]
        posts += [wire.post([(peer, _bytes(_MEDIUM, i))], channel=i) for i in (0, 1)]
    else:
        for i in (1, 0):
            pending = wire.post((), [(peer, _MEDIUM)], i)
            assert int(pending.wait(soon)[0][-1]) == i
            pending.release()
        posts = [wire.post((), [(peer, _bytes(_BIG))], last)]
    for each in posts:
        each.wait(soon)


@_clause(3, unless=("lockstep",))
def pairs(wire: Wire, soon: float) -> None:
    """a pair of ranks waits for no other pair."""
    if wire.rank == 2:  # comes when the others have done without it
        wire.post((), [(1, _number())]).wait(soon)
        wire.post([(0, _number(9))]).wait(soon)
        return
    early = wire.post((), [(2, _number())]) if wire.rank == 0 else None
    for _ in range(20):
        _swap(wire, 1 - wire.rank, soon)
    if early is None:
        wire.post([(2, _number())]).wait(soon)
    else:
        assert early.wait(soon)[0].item() == 9


@_clause(2)
def empty(wire: Wire, soon: float) -> None:
    """messages without bytes arrive, and keep their place."""
    peer = 1 - wire.rank
    recvs: list[tuple[int, Tensor | int]] = [(peer, torch.empty(0, 3)), (peer, 8), (peer, 0)]
    sends = [(peer, torch.empty(0, 3)), (peer, _number(5)), (peer, torch.empty(0))]
    pending = wire.post(sends, recvs)
    assert [each.numel() for each in pending.wait()] == [0, 8, 0]
    pending.release()


@_clause(2, unless=("exact",))
def sized(wire: Wire, soon: float) -> None:
    """a receive by size returns as many bytes as came: none, some, or all that it takes."""
    peer, most = 1 - wire.rank, 200_000
    lengths = (0, 1, 4095, 65_536, most)
    data = torch.arange(most).to(torch.uint8)
    pending = wire.post([(peer, data[:length]) for length in lengths], [(peer, most)] * 5)
    views = pending.wait()
    assert [view.numel() for view in views] == list(lengths)
    for view in views:
        assert (view.dtype, view.dim()) == (torch.uint8, 1), f"{view.dtype} of {view.shape}"
        assert torch.equal(view, data[: len(view)])
        assert view.data_ptr() % 16 == 0, "a view is not aligned to 16 bytes"
    pending.release()
    pending.release()


@_clause(2, unless=("exact", "lockstep"))
def wrong_length(wire: Wire, soon: float) -> None:
    """a message of another length than its tensor fails the wire, and names the sender."""
    if wire.rank == 0:
        wire.post([(1, _bytes(10))])
        time.sleep(_MOMENT)
        return
    _failure_of(wire.post((), [(0, _bytes(12))]).wait, "garbled", 0, soon)
    failure = wire.failure()
    assert failure is not None and failure.peer == 0


@_clause(2, unless=("exact", "lockstep"))
def too_long(wire: Wire, soon: float) -> None:
    """so does a message that is longer than a receive by size."""
    if wire.rank == 0:
        wire.post([(1, _bytes(300))])
        time.sleep(_MOMENT)
        return
    _failure_of(wire.post((), [(0, 299)]).wait, "garbled", 0, soon)


@_clause(2, unless=("exact", "lockstep"))
def short(wire: Wire, soon: float) -> None:
    """a short message in a long receive leaves nothing behind: a long one after it may be early."""
    if wire.rank == 0:
        for lengths in ((10, 10), (_BIG, 10)):  # the short ones have arrived before the long one
            for each in [wire.post([(1, _bytes(length))]) for length in lengths]:
                each.wait(soon)
        return
    posts = [wire.post((), [(0, 200_000)]) for _ in range(2)]
    for each in posts:
        each.wait(soon)
    time.sleep(_MOMENT)
    posts += [wire.post((), [(0, _BIG)]) for _ in range(2)]
    assert [len(each.wait(soon)[0]) for each in posts] == [10, 10, _BIG, 10]


@_clause(2)
def many(wire: Wire, soon: float) -> None:
    """thousands of posts may be under way."""
    peer, count = 1 - wire.rank, 2000
    posts = [wire.post([(peer, _number(i))], [(peer, _number())]) for i in range(count)]
    assert [each.wait()[0].item() for each in posts] == list(range(count))


@_clause(3)
def large(wire: Wire, soon: float) -> None:
    """all ranks may send long messages to all others at once."""
    mine = torch.arange(_BIG // 4, dtype=torch.float32) + wire.rank
    places = [(peer, torch.empty_like(mine)) for peer in _others(wire)]
    got = wire.post([(peer, mine) for peer in _others(wire)], places).wait(soon)
    for peer, each in zip(_others(wire), got, strict=True):
        assert torch.equal(each - peer, mine - wire.rank), f"rank {peer}'s bytes are others"


@_clause(2, unless=("lockstep",))
def late(wire: Wire, soon: float) -> None:
    """a receive may be posted long after its message was sent."""
    lengths = (8, _MEDIUM, _BIG)
    if wire.rank == 0:
        for each in [wire.post([(1, _bytes(length))]) for length in lengths]:
            each.wait(soon)
        return
    time.sleep(_MOMENT)
    for length in lengths:
        assert wire.post((), [(0, _bytes(length, 0))]).wait(soon)[0].all()


@_clause(2, unless=("lockstep",))
def sent(wire: Wire, soon: float) -> None:
    """a tensor that was sent may change once it was waited for, also if it is received later."""
    for length in (100, _BIG):
        if wire.rank == 0:
            data = _bytes(length)
            wire.post([(1, data)]).wait(soon)
            data.zero_()
        else:
            time.sleep(_MOMENT)
            pending = wire.post((), [(0, length)])
            assert pending.wait(soon)[0].all(), "what came is what the tensor held later"
            pending.release()


@_clause(2, unless=("lockstep",))
def storages(wire: Wire, soon: float) -> None:
    """memory of a post is kept, though the caller gives its tensors other memory."""
    if wire.rank == 0:
        data = _bytes(_BIG)
        pending = wire.post([(1, data)])
        data.data = torch.zeros(1, dtype=torch.uint8)
        filled = [_bytes(_BIG, 0) for _ in range(4)]  # in the freed memory, if it was freed
        pending.wait(soon)
        del filled
    else:
        time.sleep(_MOMENT)
        assert wire.post((), [(0, _bytes(_BIG, 0))]).wait(soon)[0].all()


@_clause(2)
def views(wire: Wire, soon: float) -> None:
    """what was received by size stays as it is until it is released, and can be sent on."""
    peer, kept = 1 - wire.rank, list[Pending]()
    for i in range(4):
        kept.append(wire.post([(peer, _bytes(_MEDIUM, i))], [(peer, _MEDIUM)]))
        kept[-1].wait(soon)
    for i, pending in enumerate(kept):
        (view,) = pending.wait()
        back = wire.post([(peer, view)], [(peer, _MEDIUM)])
        values = set(back.wait(soon)[0].tolist())
        assert values == {i}, f"message {i} came back as {sorted(values)}"
        back.release()
        pending.release()


@_clause(2, unless=("lockstep",))
def timeouts(wire: Wire, soon: float) -> None:
    """a wait that ran out raises TimeoutError and changes nothing: it can be waited for again."""
    peer = 1 - wire.rank
    pending = wire.post((), [(peer, _number()), (peer, _MEDIUM)])
    answer = [(peer, _number(7)), (peer, _bytes(_MEDIUM))]
    if wire.rank == 0:
        began = time.monotonic()
        _is_not_over(pending, _MOMENT)
        assert time.monotonic() - began >= 0.9 * _MOMENT, "it ran out early"
        _is_not_over(pending, 0)
        assert wire.failure() is None and not pending.done()
        wire.post(answer).wait(soon)
    else:
        pending.wait(soon)
        wire.post(answer).wait(soon)
    got = pending.wait(soon)
    assert got[0].item() == 7 and got[1].all() and pending.done()
    pending.release()


@_clause(3)
def aborts(wire: Wire, soon: float) -> None:
    """an abort in another thread ends a wait, and every later use, with the first failure."""
    if wire.rank == 2:  # who does not come
        time.sleep(3 * _MOMENT)
        return
    given = Failure("aborted", 2, "rank 2 died")
    pending = wire.post((), [(2, _bytes(_BIG))])
    threading.Timer(_MOMENT, wire.abort, [given]).start()
    began = time.monotonic()
    assert _failure_of(pending.wait, "aborted", 2, soon) is given, (
        "another failure than the abort's"
    )
    taken = time.monotonic() - began - _MOMENT
    assert taken < patient(_ABORT), f"the wait ended {taken:.1f} s after the abort"
    wire.abort(Failure("aborted", 0, "later"))
    assert wire.failure() is given and pending.done(), "the first failure does not stay"
    _failure_of(pending.wait, "aborted", 2, soon)
    _failure_of(lambda: wire.post([(1 - wire.rank, _number(1))]), "aborted", 2, soon)
    time.sleep(2 * _MOMENT)  # the others of this group still abort


@_clause(2, unless=("lockstep",))
def memory(wire: Wire, soon: float) -> None:
    """once a use has raised WireFailed, no memory of any post is written to."""
    place, other = _bytes(_BIG, 0), _bytes(1000, 0)
    if wire.rank == 1:
        time.sleep(_MOMENT)
        wire.post([(0, place)])
        wire.post([(0, other)], (), 1)
        time.sleep(2 * _MOMENT)
        return
    posts = [wire.post((), [(1, place)]), wire.post((), [(1, other)], 1)]
    threading.Timer(_MOMENT / 2, wire.abort, [Failure("aborted", None, "enough")]).start()
    try:
        posts[1].wait(soon)
    except WireFailed:
        place.fill_(7)
        other.fill_(7)
    time.sleep(2 * _MOMENT)
    for tensor in (place, other):
        assert bool((tensor == 7).all()), "memory was written to after the failure"


@_clause(3, unless=("lockstep",))
def leaves(wire: Wire, soon: float) -> None:
    """what was sent before a close arrives; waits for who closed end; the others go on."""
    if wire.rank == 2:
        wire.post([(0, _bytes(_BIG))]).wait(soon)
        wire.post([(0, _number(5))]).wait(soon)
        wire.close()
        return
    peer = 1 - wire.rank
    if wire.rank == 0:
        early = wire.post((), [(2, _bytes(_BIG, 0)), (2, _number())])
        time.sleep(_MOMENT)
        got = early.wait(soon)
        assert got[0].all() and got[1].item() == 5
    time.sleep(_MOMENT)
    for _ in range(20):
        _swap(wire, peer, soon)
    assert wire.failure() is None, f"{wire.failure()}, though nothing was awaited of rank 2"
    _failure_of(lambda: wire.post((), [(2, 8)]).wait(soon), "lost", 2, soon)
    _failure_of(lambda: wire.post((), [(peer, 8)]).wait(soon), "lost", 2, soon)


@_clause(2)
def closes(wire: Wire, soon: float) -> None:
    """a close ends a wait in another thread, can be repeated, and every later use raises."""
    if wire.rank == 1:
        time.sleep(3 * _MOMENT)
        return
    pending = wire.post((), [(1, 8)])
    threading.Timer(_MOMENT, wire.close).start()
    try:
        pending.wait(soon)
    except WireFailed:
        pass
    else:
        raise AssertionError("the wait did not end")
    wire.close()
    wire.close()
    try:
        wire.post([(1, _number(1))]).wait(soon)
    except WireFailed:
        return
    raise AssertionError("a closed wire can be used")


@_clause(2, unless=("lockstep",))
def moves(wire: Wire, soon: float) -> None:
    """messages move while nobody waits, and `done` tells."""
    peer = 1 - wire.rank
    pending = wire.post([(peer, _bytes(_BIG))], [(peer, _bytes(_BIG, 0))])
    until = time.monotonic() + soon
    while time.monotonic() < until and not pending.done():
        time.sleep(_MOMENT)  # no other call
    assert pending.done(), "nothing came while nobody waited"
    assert pending.wait(0)[0].all()


@_clause(2, unless=("lockstep",))
def polls(wire: Wire, soon: float) -> None:
    """to ask `done` again and again is as good as to wait."""
    peer, until = 1 - wire.rank, time.monotonic() + soon
    for length in (8, _BIG):
        pending = wire.post([(peer, _bytes(length))], [(peer, length)])
        while not pending.done():
            assert time.monotonic() < until, f"{length} bytes did not come"
        assert len(pending.wait(0)[0]) == length
        pending.release()


@_clause(3, unless=("lockstep",))
def names(wire: Wire, soon: float) -> None:
    """`waiting_for` names the peers of what is not complete, in another thread, too."""
    if wire.rank:
        if wire.rank == 2:
            time.sleep(4 * _MOMENT)
        wire.post([(0, _number(1))]).wait(soon)
        return
    pending, heard = wire.post((), [(1, 8), (2, 8)]), list[list[int]]()
    asks = threading.Timer(2 * _MOMENT, lambda: heard.append(pending.waiting_for()))
    asks.start()
    pending.wait(soon)
    asks.join()
    assert heard == [[2]], f"it waited for {heard}"
    assert pending.waiting_for() == []
    pending.release()


@_clause(2)
def leases(wire: Wire, soon: float) -> None:
    """leased memory can be sent from, to several at once, and is whole when it is leased again."""
    peer = 1 - wire.rank
    for i in range(20):
        lease = wire.lease(100_000)
        if lease is None:
            return
        with lease:
            assert lease.tensor.nbytes == 100_000 and lease.tensor.data_ptr() % 64 == 0
            lease.tensor.fill_(i)
            sends = [(peer, lease.tensor), (peer, lease.tensor[:50])]
            pending = wire.post(sends, [(peer, 100_000), (peer, 50)])
            values = [set(each.tolist()) for each in pending.wait(soon)]
            assert values == [{i}, {i}], f"lease {i} came as {values}"
            pending.release()
        lease.release()


@_clause(3)
def rounds(wire: Wire, soon: float) -> None:
    """of three thousand rounds no wake-up gets lost."""
    places = [(peer, _number()) for peer in _others(wire)]
    for i in range(3000):
        pending = wire.post([(peer, _number(i)) for peer in _others(wire)], places)
        assert all(each.item() == i for each in pending.wait(soon)), f"round {i}"


NUMBERS = {clause.body.__name__: number for number, clause in enumerate(_CLAUSES, 1)}
"""The numbers of the clauses, by the names of their functions."""
