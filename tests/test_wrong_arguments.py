"""The table of wrong arguments: each argument of each public call, wrong on one rank of three.

All ranks raise one text, which names that rank, before the group's deadline, and the next call on
the same group works. A call or a parameter that is added without its row here fails a test.
`test_hostile` tries more values; `test_garbage` has statements that cannot be read, which end the
group.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import weft
from cases import in_case, in_default_group
from weft.base.pace import patient
from weft.compat import distdl, sar
from weft.compat.oneccl import callback, event, request
from weft.group import default
from weft.testing import run, spmd

RANKS, CULPRIT = 3, 1
SOON = 2.0
"""Seconds that a wait on the group may last: who waits for a rank that tells nobody fails."""

Arguments = dict[str, Any]


class Raises:
    """Whatever is asked of it raises, its length and its text too."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("no")

    __eq__ = __lt__ = __gt__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = _raise
    __getitem__ = __index__ = __float__ = __call__ = __getattr__ = _raise
    __hash__ = _raise  # type: ignore[assignment]


class Unmeasured(list):  # type: ignore[type-arg]
    """A list whose length raises."""

    def __len__(self) -> int:
        raise RuntimeError("no length")


def in_the_middle(left: torch.Tensor, right: torch.Tensor) -> NoReturn:
    """A reduction that raises once the schedule runs."""
    raise KeyError("no row")


def failing(*_: object) -> NoReturn:
    raise OSError("no such file")


def too_large(*shape: int) -> torch.Tensor:
    """Has no memory behind its elements, which a copy would need."""
    return torch.ones(()).expand(1 << 46, *shape)


def one() -> torch.Tensor:
    return torch.ones(2)


def rows() -> Any:
    return torch.tensor([1, 0]), torch.ones(2, 2)


def added(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 1), nn.Embedding(2, 2, sparse=True))
    made[0](torch.ones(1, 2)).sum().backward()
    made[1](torch.tensor([1])).sum().backward()
    return made


def here() -> weft.Group:
    return default.current()


def topk(**settings: Any) -> Any:
    return weft.ddp.TopK(**({"density": 0.5, "min_numel": 1, "group": here()} | settings))


def grid() -> weft.Partition:
    return weft.Partition(RANKS)


def clipped(**arguments: Any) -> Any:
    table = embedding()
    table(torch.tensor([0, 4])).sum().backward()
    return weft.clip_grad_norm_(table.parameters(), **arguments)


def embedding() -> Any:
    return weft.nn.ShardedEmbedding.from_pretrained(torch.ones(5, 2), freeze=False)


def bag() -> Any:
    return weft.nn.ShardedEmbeddingBag.from_pretrained(torch.ones(5, 2))


def looked_up(**arguments: Any) -> Any:
    table = embedding()
    given = {"tables": [table], "inputs": [torch.tensor([1])], **arguments}
    given["tables"] = [table if each is None else each for each in given["tables"]]
    return weft.nn.sharded_lookup(**given)


def whole(**changed: Any) -> Any:
    """A table's `to_dense`, which has no arguments but its weight."""
    table = embedding()
    table._parameters |= changed
    return table.to_dense()


def planned() -> weft.RemoteRows:
    return weft.remote_rows(torch.tensor([0]), 1)


def distdl_grid(ranks: Sequence[int] = range(RANKS)) -> Any:
    some = distdl.MPIPartition().create_partition_inclusive(ranks)
    return some.create_cartesian_topology_partition([len(ranks)])


@dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        function: whose signature says which arguments there are.
        right: arguments with which it works, on this rank; all others have defaults.
        wrong: values for each argument that are wrong on one rank; functions of none make them.
        made: makes the call of the arguments, if that is not the function.
    """

    function: Callable[..., Any]
    right: Callable[[], Arguments]
    wrong: dict[str, Sequence[Callable[[], Any]]]
    made: Callable[..., Any] | None = None

    def __call__(self, **arguments: Any) -> Any:
        found = (self.made or self.function)(**arguments)
        return found.wait() if hasattr(found, "wait") else found

    @property
    def is_async(self) -> bool:
        return "async_op" in inspect.signature(self.function).parameters


def values(*given: Any) -> list[Callable[[], Any]]:
    """What makes these values; functions make theirs, in the rank that is to pass them."""
    made = []
    for each in given:
        is_value = not inspect.isfunction(each) or each.__name__ != "<lambda>"
        made.append((lambda value=each: value) if is_value else each)
    return made


NO_NAME = values("abc", 3, Raises())
NO_TENSOR = values("abc", Raises(), None, torch.ones(2, device="meta"))
NO_TRUTH = values(torch.ones(2), Raises())
NO_ROOT = values(RANKS, "a", 0.5, 1, Raises())
NO_DTYPE = values("half", torch.int8, torch.float16, Raises())
NO_ROWS = values(
    "abc",
    Raises(),
    None,
    (torch.tensor([1]), torch.ones(2, 2)),
    (torch.tensor([-1, 0]), torch.ones(2, 2)),
    (torch.tensor([1.0, 0]), torch.ones(2, 2)),
    (torch.tensor([1, 0]), torch.ones(2, 3)),
    (torch.tensor([1, 0]), torch.ones(2, 2).double()),
    (torch.tensor([1, 0], dtype=torch.int32), torch.ones(2, 2)),
    weft.Rows(torch.tensor([1, 9]), torch.ones(2, 2), 5),
    weft.Rows(torch.tensor([1, 0]), torch.ones(2, 2), Raises()),  # type: ignore[arg-type]
    (torch.ones((), dtype=torch.int64).expand(1 << 46), too_large(2)),
)
NO_SIZES = values(
    *(3, "abc", None, [2], [2, 2, -2], [2, 2, "a"], [2, 1, 3], Raises()),
    torch.full((RANKS,), 2.0),
)
NO_OP = values("bogus", 3, "max", in_the_middle, Raises())
NO_INPUT = values("abc", Raises(), None, torch.ones(2).to_sparse(), torch.ones(RANKS).double())
FITTING = [*NO_INPUT, *values(torch.ones(2, 3), torch.ones(()))]
NO_INDICES = values("abc", Raises(), torch.ones(2), torch.tensor([9]), torch.tensor([-1]))


def sparse(function: Callable[..., Any], **wrong: Sequence[Callable[[], Any]]) -> Call:
    shared = {"rows": NO_ROWS, "async_op": NO_TRUTH, "wire_dtype": NO_DTYPE}
    return Call(function, lambda: {"rows": rows()}, {**shared, **wrong})


def layer(kind: Any, made: Callable[[], Any], wrong: Any = NO_INPUT) -> Call:
    (name,) = [each for each in inspect.signature(kind.forward).parameters if each != "self"]
    return Call(
        kind.forward,
        lambda: {name: torch.ones(RANKS)},
        {name: wrong},
        lambda **arguments: made()(*arguments.values()),
    )


def between(kind: Any, small_first: bool, wrong: Any = NO_INPUT) -> Call:
    def made() -> Any:
        grids = weft.Partition(1), grid()
        return kind(*grids if small_first else reversed(grids))

    def right() -> Arguments:
        passes = here().rank == 0 or not small_first
        return {"x": torch.ones(2) if passes else torch.empty(0)}

    return Call(kind.forward, right, {"x": wrong}, lambda x: made()(x))


def completing(function: Any) -> callback.Attributes:
    return callback.Attributes(sparse_allreduce_completion_fn=function)


def oneccl(module: Any, **wrong: Any) -> Call:
    function = module.sparse_allreduce
    names = list(inspect.signature(function).parameters)

    def right() -> Arguments:
        sent = [torch.tensor([1, 0]), 2, torch.ones(4), 4]
        received = [torch.empty(9, dtype=torch.int64), None, torch.empty(18), None]
        given = [*sent, *received, torch.int64, torch.float32, "sum"]
        arguments = dict(zip(names, given, strict=False))
        if module is callback:
            arguments["attributes"] = completing(lambda *_: callback.ccl_status_success)
        if module is event:
            arguments["attr"] = event.create_sparse_allreduce_attr(lambda *_: None)
        return arguments

    of_buffers = {
        "send_ind_buf": values("abc", Raises(), torch.ones(2), torch.tensor([1])),
        "send_ind_count": values(-1, "a", 3, Raises()),
        "send_val_buf": values("abc", Raises(), torch.ones(1)),
        "send_val_count": values(-1, "a", 5, 6, Raises()),
    }
    dtypes = values("big", 3, torch.complex64, Raises())
    kinds = dict.fromkeys(names[8:10], dtypes) | {names[10]: values("bogus", 3, "max", Raises())}
    return Call(function, right, of_buffers | kinds | wrong)


def no_attributes(make: Callable[..., Any]) -> list[Callable[[], Any]]:
    return values("abc", Raises(), lambda: make(failing), lambda: make(3))


CALLS: dict[str, Call] = {
    "sparse_all_reduce": sparse(
        weft.sparse_all_reduce, op=NO_OP, algorithm=values("bogus", 3, "split", Raises())
    ),
    "sparse_all_reduce of a list": Call(
        weft.sparse_all_reduce,
        lambda: {"rows": [rows(), rows()]},
        {
            "rows": [
                *values([], [rows()], Unmeasured(), "abc"),
                *(lambda made=made: [rows(), made()] for made in NO_ROWS),
            ],
            "op": NO_OP,
            "algorithm": values("bogus", 3, "split", Raises()),
            "async_op": NO_TRUTH,
            "wire_dtype": NO_DTYPE,
        },
    ),
    "a function in sparse_all_reduce": Call(
        weft.sparse_all_reduce,
        lambda: {"rows": rows(), "op": added},
        {
            "rows": NO_ROWS,
            "op": values(in_the_middle, "sum"),
            "async_op": NO_TRUTH,
            "algorithm": values("bogus"),
            "wire_dtype": NO_DTYPE,
        },
    ),
    "explain": Call(
        weft.explain,
        lambda: {"rows": rows()},
        {
            "rows": [*NO_ROWS, *values([rows()])],
            "op": NO_OP[:3],
            "algorithm": values("bogus", Raises()),
            "wire_dtype": NO_DTYPE,
        },
    ),
    "sparse_all_gather": sparse(weft.sparse_all_gather, return_counts=NO_TRUTH),
    "sparse_broadcast": Call(
        weft.sparse_broadcast,
        lambda: {"rows": rows(), "group_src": CULPRIT},
        {
            "rows": NO_ROWS[:6],  # the others raise nothing: only one rank's rows are looked at
            "group_src": values(RANKS, "a", 0.5, 0, Raises()),
            "async_op": NO_TRUTH,
            "wire_dtype": NO_DTYPE,
        },
    ),
    "sparse_reduce": sparse(weft.sparse_reduce, op=NO_OP, group_dst=NO_ROOT),
    "sparse_reduce_scatter": sparse(
        weft.sparse_reduce_scatter,
        op=NO_OP,
        ranges=values([0, 1], [0, 2, 1, 3], [0, 1, 1, 1], "abc", Raises(), Unmeasured([0, 1, 2])),
    ),
    "all_reduce": Call(
        weft.all_reduce,
        lambda: {"tensor": one()},
        {
            "tensor": [
                *NO_TENSOR,
                *values(one().to_sparse(), torch.ones(3), one().double(), too_large()),
            ],
            "op": values("bogus", 3, "max", Raises()),
            "wire_dtype": NO_DTYPE,
        },
    ),
    "all_to_all": Call(
        weft.all_to_all,
        lambda: {"inputs": [one()] * RANKS},
        {
            "inputs": values(
                *("abc", one(), Raises(), Unmeasured([one()] * RANKS)),
                *([one()] * 2, [one(), "a", one()], [one().double()] * RANKS),
                *([one(), one().double(), one()], [too_large()] * RANKS),
            )
        },
    ),
    "exchange": Call(
        weft.exchange,
        lambda: {"rows": torch.ones(3, 2), "to": [torch.tensor([0])] * RANKS},
        {
            "rows": [
                *NO_TENSOR,
                *values(torch.ones(()), torch.ones(3, 3), torch.ones(3, 2).double()),
                *values(too_large(0)),
            ],
            "to": values(
                *(3, Raises(), Unmeasured([None] * RANKS), [None] * 2, [torch.ones(1)] * RANKS),
                *([torch.tensor([9])] * RANKS, [torch.tensor([-1])] * RANKS),
                [torch.zeros((), dtype=torch.int64).expand(1 << 46)] * RANKS,
            ),
            "async_op": NO_TRUTH,
            "wire_dtype": NO_DTYPE,
        },
    ),
    "all_gather_v": Call(
        weft.all_gather_v,
        lambda: {"tensor": torch.ones(2, 3), "sizes": [2] * RANKS},
        {
            "tensor": [
                *NO_TENSOR,
                *values(torch.ones(()), torch.ones(1, 3), torch.ones(2, 4)),
                *values(torch.ones(2, 3).double(), one().to_sparse(), too_large(2)),
            ],
            "sizes": NO_SIZES,
        },
    ),
    "reduce_scatter_v": Call(
        weft.reduce_scatter_v,
        lambda: {"tensor": torch.ones(2 * RANKS, 3), "sizes": [2] * RANKS},
        {
            "tensor": [
                *NO_TENSOR,
                *values(torch.ones(()), torch.ones(2, 3), torch.ones(2 * RANKS, 4)),
                *values(torch.ones(2 * RANKS, 3).double(), one().to_sparse()),
            ],
            "sizes": NO_SIZES,
            "op": values("bogus", 3, "max", Raises()),
        },
    ),
    "remote_rows": Call(
        weft.remote_rows,
        lambda: {"indices": torch.tensor([0]), "count": 1},
        {
            "indices": [*NO_INDICES, *values(torch.zeros((), dtype=torch.int64).expand(1 << 46))],
            "count": values(-1, "a", Raises()),
        },
    ),
    "fetch": Call(
        weft.RemoteRows.fetch,
        lambda: {"rows": torch.ones(1, 2)},
        {
            "rows": [*NO_TENSOR, *values(torch.ones(2, 2), torch.ones(1, 3))],
            "async_op": NO_TRUTH,
            "wire_dtype": NO_DTYPE,
        },
        lambda **arguments: planned().fetch(**arguments),
    ),
    "attempt": Call(
        weft.attempt,
        lambda: {"function": list},
        {"function": values(failing, "abc", Raises()), "name": values(3, "another", Raises())},
    ),
    "barrier": Call(
        weft.barrier, dict, {"timeout": values(0, "abc", -1.0, float("nan"), Raises())}
    ),
    "sync_params": Call(
        weft.sync_params,
        lambda: {"module": model()},
        {
            "module": values(
                *("abc", Raises(), nn.Linear(3, 1), nn.LazyLinear(2), nn.Linear(2, 1).to("meta"))
            ),
            "group_src": NO_ROOT,
        },
    ),
    "sync_grads": Call(
        weft.sync_grads,
        lambda: {"module": model()},
        {
            "module": values(
                *("abc", Raises(), nn.LazyLinear(2), nn.Linear(3, 1)),
                lambda: bad_gradient(),
            ),
            "average": values("abc", False, Raises()),
            "wire_dtype": NO_DTYPE,
        },
    ),
    "clip_grad_norm_": Call(
        weft.clip_grad_norm_,
        lambda: {"max_norm": 1.0},
        {
            "max_norm": values(-1.0, "abc", 2.0, Raises()),
            "norm_type": values(0, "abc", 1.0, Raises()),
            "error_if_nonfinite": NO_TRUTH,
            "foreach": NO_TRUTH,
        },
        clipped,
    ),
    "sync_sparsified": Call(
        weft.sync_sparsified,
        lambda: {"tensors": [torch.ones(4)], "state": topk()},
        {
            "tensors": values(
                *(
                    "abc",
                    Raises(),
                    [1],
                    [torch.ones(4).int()],
                    [torch.ones(5)],
                    {"a": torch.ones(4)},
                )
            ),
            "state": values(
                *("abc", Raises()),
                *(lambda: topk(density=2.0), lambda: topk(density=0.25)),
                *(lambda: topk(min_numel="a"), lambda: topk(wire_dtype="half")),
                lambda: topk(error_feedback=3),
            ),
        },
    ),
    "State": Call(
        weft.ddp.State.__init__,
        dict,
        {"wire_dtype": NO_DTYPE},
        lambda **arguments: weft.ddp.State(here(), **arguments).group and None,
    ),
    "AllGather": layer(weft.nn.AllGather, lambda: weft.nn.AllGather(grid(), 0)),
    "ReduceScatter": layer(
        weft.nn.ReduceScatter, lambda: weft.nn.ReduceScatter(grid(), 0), FITTING
    ),
    "AllSumReduce": layer(weft.nn.AllSumReduce, lambda: weft.nn.AllSumReduce(grid(), 0), FITTING),
    "AllToAll": Call(
        weft.nn.AllToAll.forward,
        lambda: {"x": torch.ones(1, RANKS)},
        {"x": [*NO_INPUT, *values(torch.ones(()), torch.ones(1, RANKS + 1))]},
        lambda x: weft.nn.AllToAll(weft.Partition((RANKS, 1)), (0, 1))(x),
    ),
    "Broadcast": between(weft.nn.Broadcast, True, [*NO_INPUT[:4], *values(one())]),
    "SumReduce": between(weft.nn.SumReduce, False, FITTING),
    "Gather": layer(weft.nn.Gather, lambda: weft.nn.Gather(grid(), 0)),
    "Scatter": Call(
        weft.nn.Scatter.forward,
        lambda: {"x": one() if here().rank == 0 else torch.empty(0)},
        {"x": [*NO_INPUT[:4], *values(one())]},
        lambda x: weft.nn.Scatter(grid(), 0)(x),
    ),
    "Repartition": layer(
        weft.nn.Repartition, lambda: weft.nn.Repartition(grid(), weft.Partition(RANKS))
    ),
    "HaloExchange": layer(weft.nn.HaloExchange, lambda: weft.nn.HaloExchange(grid(), 1)),
    "ShardedEmbedding": Call(
        weft.nn.ShardedEmbedding.forward,
        lambda: {"input": torch.tensor([1])},
        {"input": [*NO_INDICES, *values(torch.zeros((), dtype=torch.int64).expand(1 << 46))]},
        lambda **arguments: embedding()(**arguments),
    ),
    "ShardedEmbeddingBag": Call(
        weft.nn.ShardedEmbeddingBag.forward,
        lambda: {"input": torch.tensor([1, 0])},
        {
            "input": [*NO_INDICES, *values(torch.ones(1, 2))],
            "offsets": values("abc", torch.tensor([1.0]), torch.tensor([5]), Raises()),
            "per_sample_weights": values("abc", torch.ones(3), Raises()),
        },
        lambda **arguments: bag()(**{"offsets": torch.tensor([0]), **arguments}),
    ),
    "to_dense": Call(
        weft.nn.ShardedEmbedding.to_dense,
        dict,
        {"weight": values(None, lambda: nn.Parameter(torch.ones(4, 2)))},
        whole,
    ),
    "sharded_lookup": Call(
        weft.nn.sharded_lookup,
        dict,
        {
            "tables": values([None, None], lambda: [weft.nn.ShardedEmbedding(7, 2)]),
            "inputs": values([], 3, Raises(), Unmeasured([one()]), ["abc"], [torch.tensor([9])]),
        },
        looked_up,
    ),
    "oneccl.request": oneccl(
        request,
        recv_ind_buf=values("abc", one(), torch.empty(1, dtype=torch.int64), Raises()),
        recv_ind_count=values("abc", one(), Raises()),
        recv_val_buf=values("abc", torch.empty(1), Raises()),
        recv_val_count=values("abc", one(), Raises()),
        attributes=values("abc", lambda: completing(failing), Raises()),
    ),
    "oneccl.callback": oneccl(callback, attributes=[*values(None), *no_attributes(completing)]),
    "oneccl.event": oneccl(
        event,
        stream=values("fast", Raises()),
        attr=[*values(None), *no_attributes(event.create_sparse_allreduce_attr)],
        deps=values(3, [3], None, Raises()),
    ),
    **{
        f"distdl.{kind.__name__}": layer(kind, made)
        for kind, made in (
            (distdl.AllGather, lambda: distdl.AllGather(distdl_grid(), (0,))),
            (distdl.ReduceScatter, lambda: distdl.ReduceScatter(distdl_grid(), (0,))),
            (distdl.AllSumReduce, lambda: distdl.AllSumReduce(distdl_grid(), (0,))),
            (distdl.Repartition, lambda: distdl.Repartition(distdl_grid(), distdl_grid())),
            (distdl.SumReduce, lambda: distdl.SumReduce(distdl_grid(), distdl_grid([0]))),
            (distdl.HaloExchange, lambda: distdl.HaloExchange(distdl_grid(), [[1, 1]])),
        )
    },
    "distdl.Broadcast": Call(
        distdl.Broadcast.forward,
        lambda: {"input": one() if here().rank == 0 else torch.empty(0)},
        {"input": [*NO_INPUT[:4], *values(one())]},
        lambda input: distdl.Broadcast(distdl_grid([0]), distdl_grid())(input),
    ),
    "sar.all_to_all": Call(
        sar.all_to_all,
        lambda: {"recv_tensors": list(torch.empty(RANKS, 2)), "send_tensors": [one()] * RANKS},
        {
            "recv_tensors": values(
                *("abc", [], list(torch.empty(RANKS, 3)), [one()] * RANKS, Raises(), Unmeasured())
            ),
            "send_tensors": values("abc", [one()] * 2, [one().double()] * RANKS, 3, Raises()),
        },
    ),
    "sar.all_reduce": Call(
        sar.all_reduce,
        lambda: {"red_tensor": one(), "op": "sum"},
        {
            "red_tensor": [*NO_TENSOR, *values(torch.ones(3))],
            "op": values("bogus", 3, "max", Raises()),
        },
    ),
    "sar.sync_params": Call(
        sar.sync_params,
        lambda: {"model": model()},
        {"model": values("abc", Raises(), nn.Linear(3, 1))},
    ),
    "sar.gather_grads": Call(
        sar.gather_grads,
        lambda: {"model": model()},
        {"model": values("abc", Raises(), nn.Linear(3, 1))},
    ),
}


def bad_gradient() -> nn.Module:
    """A model with an index that its table has not."""
    made = model()
    weight: Any = made.get_parameter("1.weight")
    pair = torch.tensor([[7]]), torch.ones(1, 2)
    weight.grad = torch.sparse_coo_tensor(*pair, (2, 2), check_invariants=False)
    return made


def told(call: Callable[..., Any], arguments: Arguments) -> str:
    """The error that a call raises, in words; empty: none."""
    try:
        call(**arguments)
    except weft.WeftError as error:
        return str(error)
    return ""


Found = dict[tuple[str, int], str]


def heard(group: weft.Group, name: str, is_async: bool) -> Found:
    """What this rank hears where each of the arguments of a call is wrong on one rank."""
    table = CALLS if name in CALLS else ON_PROCESSES
    call = table[name]
    found = {}
    with in_case("all is right"):
        call(**call.right(), **({"async_op": True} if is_async else {}))
    for argument, wrong in call.wrong.items():
        if is_async and argument == "async_op":
            continue
        for number, make in enumerate(wrong):
            arguments = call.right() | ({"async_op": True} if is_async else {})
            if group.rank == CULPRIT:
                arguments[argument] = make()
            with in_case(argument, number):
                if is_async and name in CALLS:  # it does not wait for the others to tell them
                    work = (call.made or call.function)(**arguments)
                    found[argument, number] = told(work.wait, {})
                else:
                    found[argument, number] = told(call, arguments)
                assert weft.all_reduce(torch.ones(1)).item() == group.size
    return found


def check(of_ranks: Sequence[Found]) -> None:
    for case, text in of_ranks[CULPRIT].items():
        texts = {found[case] for found in of_ranks}
        assert texts == {text}, case
        assert f"rank {CULPRIT}" in text, case


@pytest.fixture(scope="module", autouse=True)
def _machine_code() -> None:
    """What calls make within their group's deadline is made here, where that is a long one."""

    def body(group: weft.Group) -> None:
        indices, ones = rows()
        weft.sparse_all_reduce((indices, ones), wire_dtype=torch.float16)
        weft.sparse_all_reduce((indices, ones.double()))

    run(RANKS, body)


WAYS = [(name, False) for name in CALLS] + [(n, True) for n, each in CALLS.items() if each.is_async]


@pytest.mark.parametrize(("name", "is_async"), WAYS)
def test_each_argument_wrong_on_one_rank(name, is_async):
    check(run(RANKS, heard, name, is_async, timeout=patient(SOON)))


def ddp_model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)))


def stepped(hook: Any, state: Any) -> None:
    """A backward of a model with a hook; the model goes with the error, not with the group."""
    wrapped = ddp_model()
    wrapped.register_comm_hook(state, hook)
    wrapped(torch.tensor([1])).sum().backward()


def finished(call: Any, **arguments: Any) -> None:
    work = call(**arguments)
    if work is not None:
        work.wait()


def of_backend(call: Any, right: Callable[[], Arguments], **wrong: Any) -> Call:
    wrong["async_op"] = []  # which torch looks at
    return Call(call, right, wrong, lambda **arguments: finished(call, **arguments))


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", range(RANKS))


def cut_tensor(whole: torch.Tensor = one()) -> Any:  # noqa: B008  # which nobody changes
    return distribute_tensor(whole, mesh(), [Shard(0)], src_data_rank=None)


MAX = dist.ReduceOp.MAX
NO_SIZE = values(torch.ones(5), one().double(), torch.ones(1).expand(2))

ON_PROCESSES: dict[str, Call] = {
    "register": Call(
        weft.ddp.register,
        lambda: {"ddp_model": ddp_model()},
        {
            "ddp_model": values("abc", nn.Linear(2, 1), Raises()),
            "wire_dtype": NO_DTYPE,
        },
        lambda **arguments: weft.ddp.register(**arguments) and None,
    ),
    "hook": Call(
        weft.ddp.hook,
        lambda: {"state": weft.ddp.State()},
        {"state": values(lambda: weft.ddp.State(wire_dtype="half"))},  # type: ignore[arg-type]
        lambda state: stepped(weft.ddp.hook, state),
    ),
    "topk_hook": Call(
        weft.ddp.topk_hook,
        lambda: {"state": weft.ddp.TopK(0.5)},
        {"state": values(lambda: weft.ddp.TopK(0.25), lambda: weft.ddp.TopK(2.0))},
        lambda state: stepped(weft.ddp.topk_hook, state),
    ),
    "from_dtensor": Call(
        weft.nn.from_dtensor,
        lambda: {"x": cut_tensor(), "partition": grid()},
        {
            "x": values("abc", one(), Raises(), lambda: cut_tensor(torch.ones(7))),
            "lengths": values(3, [(1, 1)], [(2, 2, 3)], Raises()),
        },
    ),
    "to_dtensor": Call(
        weft.nn.to_dtensor,
        lambda: {"x": one(), "partition": grid(), "mesh": mesh(), "placements": [Shard(0)]},
        {
            "x": values("abc", Raises(), torch.ones(2, 2), one().double()),
            "mesh": values("abc", None, Raises()),
            "placements": values("abc", [], [Shard(1)], 3, Raises()),
        },
    ),
    "cpu:weft all_reduce": of_backend(
        dist.all_reduce,
        lambda: {"tensor": one()},
        tensor=[*NO_SIZE, *values(torch.ones(5).to_sparse())],
        op=values(MAX),
    ),
    "cpu:weft all_gather_single": of_backend(
        dist.all_gather_single,
        lambda: {"output_tensor": torch.empty(2 * RANKS), "input_tensor": one()},
        output_tensor=NO_SIZE,
        input_tensor=NO_SIZE,
    ),
    "cpu:weft reduce_scatter_single": of_backend(
        dist.reduce_scatter_single,
        lambda: {"output": torch.empty(2), "input": torch.ones(2 * RANKS)},
        output=NO_SIZE,
        input=NO_SIZE,
        op=values(MAX),
    ),
    "sparse_all_reduce": CALLS["sparse_all_reduce"],
}


def heard_in_process(group: weft.Group, name: str, is_async: bool, folder: Any) -> Found:
    with in_default_group(group, folder, "cpu:weft"), weft.init(timeout=group.timeout) as own:
        return heard(own, name, is_async)


@pytest.mark.parametrize(
    ("name", "is_async"),
    [(name, False) for name in ON_PROCESSES]
    + [(name, True) for name, each in ON_PROCESSES.items() if each.is_async],
)
def test_each_argument_wrong_on_a_process(name, is_async, tmp_path):
    body = heard_in_process
    check(run(RANKS, body, name, is_async, tmp_path, on="processes", timeout=patient(SOON)))


# which communicate nothing, or begin what communicates: there a rank can tell nobody
ALONE = {
    *("config", "init", "on_call", "shutdown"),
    *("ddp.keep_tables_used", "nn.shard_embeddings", "nn.zero_volume_tensor"),
    *("nn.ZeroVolumeCorrector", "nn.Layer", "sparse.last_call", "schedules.hosts_of"),
    *("nn.load_sharded_state", "nn.sharded_state"),  # of what each rank has
    *("trainers.accelerate", "trainers.huggingface", "trainers.lightning"),  # `register` later
    *("distdl.zero_volume_tensor", "sar.initialize_comms", "sar.nfs_ip_init"),
    *("sar.rank", "sar.world_size"),
    "schedules.dense_all_reduce",  # within an open call
}
# which no value is wrong for, or that is found out later, or on this rank alone
FREE = {
    "self",
    "group",
    "comm",  # oneCCL's group
    "sar.all_to_all move_to_comm_device",  # without effect
    "sar.all_reduce move_to_comm_device",
    *(
        f"oneccl.{kind} recv_{what}"
        for kind in ("callback", "event")
        for what in (*("ind_buf", "ind_count", "val_buf", "val_count"),)
    ),  # ignored, as in the documents
    "clip_grad_norm_ parameters",  # which say whether there are other ranks
    "register algorithm",  # of the calls in backward
    "from_dtensor partition",  # which says who the other ranks are
    "to_dtensor partition",
    "hook bucket",  # torch's
    "topk_hook bucket",
}


def functions() -> dict[str, Any]:
    """The public functions, and the forward of public layers, by name."""
    rooms: dict[str, Any] = {
        "": weft,
        "ddp.": weft.ddp,
        "nn.": weft.nn,
        "sparse.": weft.sparse,
        "schedules.": weft.schedules,
        "trainers.": weft.trainers,
        "distdl.": distdl,
        "sar.": sar,
    }
    found: dict[str, Any] = {"fetch": weft.RemoteRows.fetch}
    for room, module in rooms.items():
        for name in getattr(module, "__all__", dir(module)):
            each = getattr(module, name)
            if inspect.isclass(each) and issubclass(each, nn.Module):
                found[room + name] = each.forward
            elif inspect.isfunction(each):
                found[room + name] = each
    for module in (request, callback, event):
        found[f"oneccl.{module.__name__.rpartition('.')[2]}"] = module.sparse_allreduce
    return found


def test_every_argument_of_every_call_is_in_the_table():
    table = {**ON_PROCESSES, **CALLS}
    lacking = []
    for name, function in functions().items():
        if name in ALONE:
            continue
        key = name if name in table else name.partition(".")[2]
        if key not in table:
            lacking.append(name)
            continue
        for each in inspect.signature(function).parameters:
            if not {each, f"{key} {each}"} & FREE and not table[key].wrong.get(each):
                lacking.append(f"{name} {each}")
    assert lacking == []
    assert functions().keys() >= ALONE


# which make a table, and ranks count these
TABLES = {"ShardedEmbedding", "ShardedEmbeddingBag", "sharded_lookup", "to_dense"}
TABLES |= {"clip_grad_norm_"}


@pytest.mark.parametrize("name", CALLS)
@spmd(RANKS, on=("threads",), timeout=2 * SOON)
def test_a_rank_in_another_call(group, name):
    """All hear of both calls, or what the one raises that is wrong in its own call."""
    call = CALLS[name]
    right = call.right()
    if group.rank == CULPRIT:
        for _ in range(2 if name in TABLES else 0):
            embedding()
        with pytest.raises(weft.WeftError, match=r"different calls.* rank 1 has another"):
            weft.attempt(list, name="another")
    else:
        assert re.search(r"different calls.* rank 1 has another", told(call, right))
    with pytest.raises(weft.WeftError, match=r"^rank 1: OSError: no such file$"):
        if group.rank == CULPRIT:
            weft.attempt(failing)
        call(**right)
    call(**call.right())


MOVED = ("sparse_all_reduce", "sparse_all_gather", "sparse_reduce_scatter", "all_reduce")


@pytest.mark.parametrize("name", [*MOVED, "all_to_all", "exchange", "AllGather"])
@spmd(RANKS, on=("threads",), timeout=2 * SOON)
def test_one_rank_has_no_memory_for_what_it_sends(group, name):
    """As it makes its rows, or what goes along with its statement."""
    call = CALLS[name]
    for room, function in (("base.tensors", "plain"), ("base.memory", "memory_of")):
        with pytest.MonkeyPatch.context() as patch, in_case(function):
            if group.rank == CULPRIT:
                run_out(patch, getattr(importlib.import_module(f"weft.{room}"), function))
            said = told(call, call.right())
        assert said in ("", "rank 1: MemoryError: out of memory")
        assert weft.all_reduce(torch.ones(1)).item() == group.size


def run_out(patch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Let a function of weft's raise MemoryError on this rank's thread, in all who import it."""
    here = threading.get_ident()

    def lacking(*given: Any, **options: Any) -> Any:
        if threading.get_ident() == here:
            raise MemoryError("out of memory")
        return function(*given, **options)

    rooms = ("weft.sparse", "weft.comm", "weft.call", "weft.nn")
    for module in [each for name, each in sys.modules.items() if name.startswith(rooms)]:
        for name, value in list(vars(module).items()):
            if value is function:
                patch.setattr(module, name, lacking)
