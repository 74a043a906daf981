"""Sharded tables give what torch's give, replicated: rows, gradients, training."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.prune import random_unstructured
from torch.utils.checkpoint import checkpoint

import weft
from weft import kernels
from weft.nn.sharded import lookup
from weft.nn.sharded import tables as sharded_tables
from weft.testing import processes, run, spmd

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of Adagrad

DIM = 3
KINDS = {
    nn.Embedding: weft.nn.ShardedEmbedding,
    nn.EmbeddingBag: weft.nn.ShardedEmbeddingBag,
}


def drawn(seed, *shape):
    """Numbers whose sums are exact."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4


def indices(rank, height, *shape, dtype=torch.int64):
    """With duplicates; none on rank 1."""
    shape = (0, *shape[1:]) if rank == 1 else shape
    return torch.randint(height, shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def cut_bags(rank, height, last=False, weighs=False):
    flat, starts = indices(rank, height, 9), [0, 0, 0] if rank == 1 else [0, 4, 4]  # one is empty
    given = flat, torch.tensor([*starts, len(flat)] if last else starts)
    return (*given, drawn(7 + rank, len(flat)).requires_grad_()) if weighs else given


def plain(rank, height):
    return (indices(rank, height, 4, 3, 2),)


def bags(rank, height, dtype=torch.int64):
    return (indices(rank, height, 4, 5, dtype=dtype),)


CASES = {
    "plain": (nn.Embedding, {}, plain),
    "padding": (nn.Embedding, {"padding_idx": 2}, plain),
    "frequency": (nn.Embedding, {"padding_idx": -1, "scale_grad_by_freq": True}, plain),
    "norm": (nn.Embedding, {"max_norm": 1.0, "norm_type": 1.0}, plain),
    "weighted": (nn.EmbeddingBag, {"mode": "sum"}, functools.partial(cut_bags, weighs=True)),
    "int32": (nn.EmbeddingBag, {"mode": "sum"}, functools.partial(bags, dtype=torch.int32)),
}
for mode in ("sum", "mean", "max"):
    ends = {"mode": mode, "include_last_offset": True}
    CASES[f"{mode} of 2-D"] = nn.EmbeddingBag, {"mode": mode, "padding_idx": 3}, bags
    CASES[f"{mode} of offsets"] = nn.EmbeddingBag, {"mode": mode, "padding_idx": 3}, cut_bags
    CASES[f"{mode} to ends"] = nn.EmbeddingBag, ends, functools.partial(cut_bags, last=True)


def used(table, rank, given):
    """The output for some input, after backward; and the gradient of what weighs its rows."""
    output = table(*given)
    (output * drawn(50 + rank, *output.shape)).sum().backward()
    return output.detach(), given[2].grad if len(given) > 2 else torch.zeros(0)


@pytest.fixture(params=["kernels", "operations"])
def arithmetic(request, monkeypatch):
    """What sorts and adds: the kernels, or the operations of torch's that serve on a device."""
    if request.param == "operations":
        monkeypatch.setattr(kernels, "on_host", lambda tensor: False)


def check(group, case, sizes):
    """A lookup and its gradients, against a whole table on every rank."""
    kind, options, inputs = CASES[case]
    height = sum(sizes)
    whole = drawn(0, height, DIM)
    table = KINDS[kind].from_pretrained(whole, freeze=False, **options)
    found = used(table, group.rank, inputs(group.rank, height))
    alone = kind.from_pretrained(whole.clone(), freeze=False, **options)
    outputs = [used(alone, rank, inputs(rank, height)) for rank in range(group.size)]
    torch.testing.assert_close(found, outputs[group.rank])
    grad = table.weight.grad
    assert (grad._indices()[0].diff() > 0).all()
    own = slice(table.first, table.first + len(table.weight))
    torch.testing.assert_close(grad.to_dense(), alone.weight.grad[own] / group.size)
    assert torch.equal(table.to_dense(), alone.weight)
    assert len(table.weight) == sizes[group.rank]


@pytest.mark.parametrize(
    ("on", "sizes"),
    [("threads", [10]), ("threads", [5, 4]), ("threads", [3, 3, 3, 0]), ("verbs", [4, 4, 2])],
)
@pytest.mark.parametrize("case", CASES)
def test_it_gives_what_a_replicated_table_gives(case, sizes, on, arithmetic):
    run(len(sizes), check, case, sizes, on=on)


@spmd(3, on=("gloo",))
def test_it_does_so_over_gloo(group):
    for case in CASES:
        check(group, case, [4, 4, 2])


OPTIMIZERS = {
    "sgd": (functools.partial(torch.optim.SGD, lr=0.1), True),
    "momentum": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5), True),
    "adagrad": (functools.partial(torch.optim.Adagrad, lr=0.1), True),
    "sparse adam": (torch.optim.SparseAdam, True),
    "adamw": (torch.optim.AdamW, False),
}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_work_on_the_shard(optimizer, average):
    make, sparse = OPTIMIZERS[optimizer]

    def trained(kind, ranks, **options):
        table = kind.from_pretrained(drawn(0, 10, DIM), freeze=False, sparse=sparse, **options)
        update = make([table.weight])
        for step in range(3):
            update.zero_grad()
            for rank in ranks * 2:  # accumulated
                loss = table(indices(rank + 2, 10, 3, 3)).square().sum() * (step + 1)
                (loss / (3 if average and kind is nn.Embedding else 1)).backward()
            update.step()
        return table

    alone = trained(nn.Embedding, [0, 1, 2]).weight.detach()
    cut = KINDS[nn.Embedding]
    for each in run(3, lambda group: trained(cut, [group.rank], average=average).to_dense()):
        torch.testing.assert_close(each, alone)


def emptied(model):
    """The same model with other parameters: it was on the meta device in between."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    model.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    return model


# what becomes of a model, and what a caller passes of it
CLIPPED = {
    "module": (lambda model: model, lambda model: model),
    "parameters": (lambda model: model, nn.Module.parameters),
    "of an optimizer": (
        lambda model: model,
        lambda model: torch.optim.SGD(model.parameters(), 0.1).param_groups[0]["params"],
    ),
    "a copy": (copy.deepcopy, nn.Module.parameters),
    "unpickled": (lambda model: pickle.loads(pickle.dumps(model)), nn.Module.parameters),
    "replaced": (emptied, nn.Module.parameters),
    "the table alone": (lambda model: model, lambda model: list(model[0].parameters())),
    "the rest alone": (lambda model: model, lambda model: list(model[1].parameters())),
}


@pytest.mark.parametrize(
    ("ranks", "p", "given"),
    [
        *((ranks, p, "parameters") for ranks in (1, 2, 4, 7) for p in (1.0, "inf", 2.0)),
        *((3, 2.0, each) for each in CLIPPED),
    ],
)
def test_clipping_takes_the_norm_of_all_ranks_rows(ranks, p, given):
    whole = nn.Sequential(nn.Embedding(10, DIM), nn.Linear(DIM, 1))
    places = torch.tensor([9, 0, 3, 9])  # rows of some ranks alone
    prepared, passed = CLIPPED[given]

    def program(group):
        model = prepared(weft.nn.shard_embeddings(copy.deepcopy(whole), min_rows=1))
        model(places).square().sum().backward()
        norm = weft.clip_grad_norm_(passed(model), 0.1, p)
        rows = torch.zeros(10, DIM)
        rows[model[0].first :][: len(model[0].weight)] = model[0].weight.grad.to_dense()
        return norm, rows, model[1].weight.grad

    found = run(ranks, program)
    whole(places).square().sum().backward()
    clipped = passed(whole)
    if isinstance(clipped, nn.Module):
        clipped = clipped.parameters()
    norm = nn.utils.clip_grad_norm_(clipped, 0.1, p)
    for each, _, dense in found:
        torch.testing.assert_close(each, norm)
        torch.testing.assert_close(dense, whole[1].weight.grad)
    torch.testing.assert_close(sum(rows for _, rows, _ in found), whole[0].weight.grad)


def set_on(table, name, value):
    """Set an attribute of the table itself; the function that takes it off."""
    setattr(table, name, value)
    return functools.partial(delattr, table, name)


def nothing(*_):
    return None


def with_gradient(table):
    table.weight.grad = torch.ones_like(table.weight)
    return functools.partial(setattr, table.weight, "grad", None)


HOOKS = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "own _backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_state_dict_hooks": "register_state_dict_post_hook",
    "_state_dict_pre_hooks": "register_state_dict_pre_hook",
    "_load_state_dict_pre_hooks": "register_load_state_dict_pre_hook",
    "_load_state_dict_post_hooks": "register_load_state_dict_post_hook",
}


def hooked(method, table):
    return getattr(table, method)(nothing).remove


# what somebody hangs on a table, by what it is called; the function that takes it off
HUNG = {
    **{what: functools.partial(hooked, method) for what, method in HOOKS.items()},
    "weight, _backward_hooks": lambda table: table.weight.register_hook(nothing).remove,
    "weight, _post_accumulate_grad_hooks": (
        lambda table: table.weight.register_post_accumulate_grad_hook(nothing).remove
    ),
    "a gradient, weight.grad": with_gradient,
    "own _buffers": lambda table: set_on(table, "scale", nn.Buffer(torch.ones(1))),
    "own _modules": lambda table: set_on(table, "adapter", nn.Linear(1, 1)),
    "other parameters": lambda table: set_on(table, "bias", nn.Parameter(torch.ones(1))),
    "own forward": lambda table: set_on(table, "forward", nothing),
    "own first": lambda table: set_on(table, "first", 1),  # as the other one has
}


@pytest.mark.parametrize("hung", HUNG)
@spmd(1, 2)
def test_what_hangs_on_a_table_is_not_lost_in_silence(group, hung):
    table = nn.Embedding(10, DIM)
    model = nn.Sequential(nn.Embedding(10, DIM), table)
    before = list(model)
    take_off = HUNG[hung](table)
    with pytest.raises(weft.WeftError, match=rf"'1' has .*{hung}.*, which the table that takes"):
        weft.nn.shard_embeddings(model, min_rows=1, group=group)
    assert list(model) == before
    take_off()
    weft.nn.shard_embeddings(model, min_rows=1, group=group)
    assert model[1] is not table


@pytest.mark.filterwarnings("ignore:.*weight_norm")  # torch's, that there is another way
@spmd(1)
def test_a_table_whose_weight_is_computed_is_not_cut(group):
    model = nn.Sequential(nn.utils.weight_norm(nn.Embedding(10, DIM)))
    with pytest.raises(weft.WeftError, match="'0' has other parameters than a weight, which"):
        weft.nn.shard_embeddings(model, min_rows=1, group=group)


@spmd(1, 2)
def test_attributes_of_a_table_and_of_its_weight_go_along(group):
    model = nn.Sequential(nn.Embedding(10, DIM))
    model[0].users = ["of the table"]
    model[0].weight.no_decay = True
    users = model[0].users
    weft.nn.shard_embeddings(model, min_rows=1, group=group)
    assert model[0].users is users and model[0].weight.no_decay
    assert copy.deepcopy(model)[0].users == users
    assert torch.equal(model(ONE), model[0].to_dense()[3:4])


@pytest.mark.parametrize("scale", [1.0, 1e60, 1e-60])
@spmd(1, 2, 3)
def test_clipping_doubles_as_exactly_as_torch_does(group, scale):
    """Also where one of the ranks has no rows, and where float32 has no such numbers."""
    table = weft.nn.ShardedEmbedding(2, 2, dtype=torch.float64, sparse=False, group=group)
    whole = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    whole.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64) * scale
    table.weight.grad = whole.grad[table.first :][: len(table.weight)].clone()
    norm = weft.clip_grad_norm_(table, scale)
    wanted = nn.utils.clip_grad_norm_([whole], scale)
    torch.testing.assert_close(norm, wanted, rtol=1e-14, atol=0)
    own = whole.grad[table.first :][: len(table.weight)]
    torch.testing.assert_close(table.weight.grad, own, rtol=1e-14, atol=0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # torch's, that it is new
@spmd(2, 3)
def test_clipping_wrongly_on_one_rank_raises_on_all(group):
    model = nn.Sequential(nn.Embedding(10, DIM, sparse=True), nn.Linear(DIM, 1))
    weft.nn.shard_embeddings(model, min_rows=1, group=group)
    model(torch.tensor([9, 0])).sum().backward()
    before = [each.grad for each in model.parameters()]
    erring = group.rank == 1
    for most, p, text in (
        (-1.0, 2.0, "^rank 1: max_norm is -1.0 and norm_type 2.0: the first"),
        (1.0, "two", "^rank 1: max_norm is 1.0 and norm_type 'two': the first"),
        (2.0, 2.0, "^the ranks differ in max_norm: .*1.0, rank 1 has 2.0"),
        (1.0, 3.0, "^the ranks differ in norm_type: .*2.0, rank 1 has 3.0"),
    ):
        with pytest.raises(weft.WeftError, match=text):
            weft.clip_grad_norm_(model.parameters(), *(most, p) if erring else (1.0, 2.0))
    other = nn.Parameter(torch.ones(2, 2).to_sparse_csr())
    if erring:
        other.grad = other.detach().clone()
    with pytest.raises(weft.WeftError, match=r"^rank 1: a gradient has layout torch\.sparse_csr"):
        weft.clip_grad_norm_([other, *model.parameters()], 1.0)
    assert all(each.grad is was for each, was in zip(model.parameters(), before, strict=True))
    assert weft.clip_grad_norm_(model.parameters(), 1.0) > 1


def test_clipping_tables_of_two_groups_tells_both_what_is_wrong():
    def program(group):
        pair, everyone = group.subset(sorted({0, group.rank or 1})), group
        if group.rank == 2:
            pair = group.subset([2])
        model = nn.ModuleList(
            weft.nn.ShardedEmbedding(4, 2, group=each) for each in (pair, everyone)
        )
        for table in model:
            table(torch.tensor([3, 0])).sum().backward()
        try:
            weft.clip_grad_norm_(model.parameters(), -1.0 if group.rank == 0 else 1.0)
        except weft.WeftError as error:
            return str(error)

    assert all("max_norm is -1.0 and norm_type 2.0" in each for each in run(3, program))


@pytest.mark.parametrize("on", ["threads", "verbs"])
def test_many_tables_take_the_exchanges_of_one_and_each_row_once(on, arithmetic, monkeypatch):
    sent = []  # numbers that rank 0 sends, by exchange
    real = lookup.apply

    def spy(scatter, tensors):
        if scatter.group.rank == 0:
            sent.append([each.numel() for each in tensors])
        return real(scatter, tensors)

    monkeypatch.setattr(lookup, "apply", spy)
    ids, offsets = torch.tensor([[8, 1, 1], [8, 8, 0]]), torch.tensor([0, 2])

    def program(group):
        one = weft.nn.ShardedEmbedding.from_pretrained(drawn(1, 9, 2), freeze=False)
        other = weft.nn.ShardedEmbeddingBag.from_pretrained(drawn(2, 4, 5), freeze=False)
        frozen = weft.nn.ShardedEmbedding.from_pretrained(drawn(3, 4, 1))
        given = [ids, (ids[1] // 4, offsets), ids[:, :0], ids[0] % 2]
        rows = weft.nn.sharded_lookup([one, other, frozen, one], given)
        # of rank 1 some are not used
        sum(each.sum() for each in rows[: 2 if group.rank else None]).backward()
        assert [tuple(each.shape) for each in rows] == [(2, 3, 2), (2, 5), (2, 0, 1), (3, 2)]
        return [table.weight.grad.to_dense() for table in (one, other)]

    grads = [torch.cat(each) for each in zip(*run(2, program, on=on), strict=True)]
    # counts and indices; a number for each table, and rows
    assert sent == [[4 + 5, 4 + 2], [4 + 2 * 2 + 5 + 2 * 2] * 2]
    wanted = torch.zeros(9, 2)
    wanted.index_add_(0, ids.flatten(), torch.ones(6, 2))
    wanted.index_add_(0, ids[0] % 2, torch.full((3, 2), 0.5))
    assert torch.equal(grads[0], wanted)
    assert grads[1].sum() == 10


@pytest.mark.parametrize(("count", "reads"), [(1, (1, 1)), (3, (2, 1))])
def test_how_often_the_host_waits_for_a_device(count, reads, monkeypatch):
    """Forward, for how many rows are wanted; backward, for how many rows a gradient has."""
    waits = []

    def counted(group, numbers):
        waits.append(group.rank)
        return numbers.tolist()

    for module in (lookup, sharded_tables):
        monkeypatch.setattr(module, "read", counted)
    monkeypatch.setattr(kernels, "on_host", lambda tensor: False)

    def program(group):
        tables = [weft.nn.ShardedEmbedding(6, DIM, padding_idx=2) for _ in range(count)]
        rows = weft.nn.sharded_lookup(tables, [torch.tensor([[1, 4], [2, 1]])] * count)
        forward = waits.count(group.rank)
        sum(rows).sum().backward()
        return forward, waits.count(group.rank) - forward

    assert run(2, program, on="verbs") == [reads, reads]


@pytest.mark.parametrize("on", ["threads", "verbs"])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_table_that_no_rank_used_has_no_gradient(sparse, on, arithmetic):
    """As with plain tables, whose optimizers then leave them alone, momentum or not."""

    def program(group):
        tables = [weft.nn.ShardedEmbedding(6, DIM, sparse=sparse) for _ in range(3)]
        rows = weft.nn.sharded_lookup(tables, [torch.tensor([1, 4])] * 3)
        rows[0 if group.rank else 1].sum().backward()
        return [table.weight.grad is not None for table in tables]

    assert run(3, program, on=on) == [[True, True, False]] * 3


def test_ranks_that_look_up_tables_of_one_size_in_another_order_are_told_so():
    def program(group):
        one, other = (weft.nn.ShardedEmbedding(6, DIM) for _ in range(2))
        ids = torch.tensor([1, 4])
        for call in (lambda table: table(ids), weft.nn.ShardedEmbedding.to_dense):
            with pytest.raises(
                weft.WeftError, match=r"table [01] of its group.*table [01] of its group"
            ):
                call(one if group.rank else other)
        if group.rank:
            with pytest.raises(RuntimeError):
                weft.nn.ShardedEmbedding(6, DIM, device="nowhere")
        third = weft.nn.ShardedEmbedding(6, DIM)
        assert torch.equal(third(ids), third.to_dense()[ids])
        both = weft.nn.sharded_lookup([one, copy.deepcopy(other)], [ids, ids])
        wanted = torch.stack([one.to_dense()[ids], other.to_dense()[ids]])
        assert torch.equal(torch.stack(both), wanted)

    run(2, program)


ONE = torch.tensor([3])
WRONG = {
    "index 10 is outside of a table of 10 rows": (torch.tensor([[3, 10]]),),
    "index -1 is outside of a table of 10 rows": (torch.tensor([[-1]]),),
    "the input is torch.float32: indices must be": (torch.ones(1, 2),),
    "the input is a list": ([[1, 2]],),
    "ValueError: offsets has to be a 1D Tensor": (ONE, torch.tensor([[0]])),
    r"RuntimeError: .*offsets\[0\]": (ONE, torch.tensor([1])),
    "ValueError: .*must have the same shape": (ONE, torch.tensor([0]), torch.ones(2)),
    "TypeError.*takes from 2 to 4": (ONE, torch.tensor([0]), None, None),
}


@pytest.mark.parametrize("on", ["threads", "verbs"])
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_input_of_one_rank_is_an_error_on_all(text, on, arithmetic):
    def program(group):
        table = weft.nn.ShardedEmbeddingBag(10, DIM, mode="sum")
        right = (torch.tensor([[4]]),)
        with pytest.raises(weft.WeftError, match=text) as caught:
            weft.nn.sharded_lookup([table], [WRONG[text] if group.rank == 1 else right])
        assert torch.equal(table(*right)[0], table.to_dense()[4])
        return str(caught.value)

    first, *others = run(3, program, on=on)
    assert first.startswith("rank 1: ") and others == [first] * 2


def test_rows_of_no_numbers():
    def program(group):
        table = weft.nn.ShardedEmbedding(10, 0)
        wrong = weft.nn.ShardedEmbedding(10, 0, max_norm=1.0, norm_type=float("inf"))
        with pytest.raises(weft.WeftError, match="rank 0: RuntimeError"):  # torch's
            weft.nn.sharded_lookup([table, wrong], [torch.tensor([3] * group.rank).long()] * 2)
        table(torch.tensor([[4, group.rank]])).sum().backward()
        return table(torch.tensor([[4, 1]])).shape, table.weight.grad.shape

    assert run(2, program) == [((1, 2, 0), (5, 0))] * 2


@pytest.mark.parametrize("sparse", [True, False])
@spmd(1, 2)
def test_a_gradient_is_of_the_weight_and_the_settings_that_forward_used(group, sparse):
    half = torch.ones(6, DIM).half()
    table = weft.nn.ShardedEmbedding.from_pretrained(half, freeze=False, sparse=sparse, group=group)
    weights = table.weight.detach().float().requires_grad_()
    rows = torch.func.functional_call(table, {"weight": weights}, torch.arange(6))
    (rows * 1e5).sum().backward()  # more than float16 has
    assert weights.grad.is_sparse == sparse
    assert torch.equal(weights.grad.to_dense(), torch.full_like(weights, 1e5))

    weight = table.weight
    rows = table(torch.arange(6))
    table.weight = nn.Parameter(torch.zeros(1, 1))
    table.embedding_dim = 1
    table.sparse = not sparse
    table.average = False
    rows.sum().backward()
    assert weight.grad.is_sparse == sparse and weight.grad.dtype == torch.float16
    assert torch.equal(weight.grad.to_dense(), torch.ones_like(weight))


@pytest.mark.parametrize("padding", [None, -1])
def test_int32_indices_of_a_table_with_more_rows_than_they_count(padding):
    def program(group):
        kind = torch.int32 if group.rank else torch.int64
        table = weft.nn.ShardedEmbedding(1 << 32, 0, padding_idx=padding)
        bag = weft.nn.ShardedEmbeddingBag(1 << 32, 0, padding_idx=padding, mode="sum")
        given, offsets = torch.tensor([5, 2**31 - 1], dtype=kind), torch.tensor([0], dtype=kind)
        rows, sums = weft.nn.sharded_lookup([table, bag], [given, (given, offsets)])
        return rows.shape, sums.shape

    assert run(2, program) == [((2, 0), (1, 0))] * 2


def test_what_are_no_tables_is_said():
    for tables, text in (([], "tables is empty"), ([nn.Embedding(3, 2)], "tables has a Embedding")):
        with pytest.raises(weft.WeftError, match=text):
            weft.nn.sharded_lookup(tables, [ONE] * len(tables))


def test_ranks_that_differ_are_told_so():
    def program(group):
        def raised(call, *args):
            with pytest.raises(weft.WeftError) as caught:
                call(*args)
            return str(caught.value)

        table = weft.nn.ShardedEmbedding(10, DIM)
        other = weft.nn.ShardedEmbedding(10 + group.rank, DIM)
        double = weft.nn.ShardedEmbedding(10, DIM, dtype=torch.float64)
        ids = torch.tensor([1])
        said = [raised(other, ids), raised(other.to_dense)]
        said.append(raised(weft.nn.sharded_lookup, [table, double], [ids, ids]))
        said.append(raised(weft.nn.sharded_lookup, [table], [ids, ids]))
        with torch.set_grad_enabled(group.rank == 0):
            said.append(raised(table, ids))
        # rank 1 does not use the rows, and calls again while rank 0 is in backward
        rows = table(ids)
        said.append(raised(rows.sum().backward) if group.rank == 0 else raised(table, ids))
        assert torch.equal(table(ids), table.to_dense()[1:2])
        return said

    first, second = run(2, program)
    assert first == second
    parts = ["11 x 3 of float32", "differ in tables", "float32 on cpu and torch.float64 on cpu"]
    parts += ["2 inputs for 1 tables", "torch.no_grad", "sharded_lookup backward of call"]
    assert [part in text for part, text in zip(parts, first, strict=True)] == [True] * 6
    assert first[-1].endswith("add 0 * output.sum() to the loss of a rank that uses no output")


def test_a_rank_holds_its_part_alone():
    whole = drawn(0, 1000, 8)

    def program(group):
        torch.manual_seed(5)  # alike on all ranks, as is usual
        table = weft.nn.ShardedEmbedding(1000, 8, padding_idx=-1)
        given = weft.nn.ShardedEmbedding.from_pretrained(whole)
        assert not given.weight.requires_grad
        made = [each.weight.untyped_storage().nbytes() for each in (table, given)]
        assert made == [250 * 8 * 4] * 2
        return table.to_dense()

    table = run(4, program)[0]
    assert not table[-1].any() and table.unique().numel() > 7000  # no two ranks drew the same
    assert abs(table.std() - 1) < 0.05


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(10, DIM, sparse=True)
        self.small = nn.Embedding(4, DIM)
        self.bags = nn.ModuleDict({"one": nn.EmbeddingBag(9, DIM, mode="sum", padding_idx=1)})
        self.same = self.table
        self.dense = nn.Linear(3 * DIM, 1)

    def forward(self, ids):
        rows = self.table(ids[:, 0]), self.small(ids[:, 1] % 4), self.bags["one"](ids % 9)
        return self.dense(torch.cat(rows, 1))


def test_the_large_tables_of_a_model_are_cut():
    made = [(Model(), Model()) for _ in range(2)]  # here: threads have one default generator

    def program(group):
        model, alone = made[group.rank]
        assert weft.nn.shard_embeddings(model, min_rows=9) is model
        assert type(model.small) is nn.Embedding and model.same is model.table
        assert model.table.sparse and not model.bags["one"].sparse
        ignored = {"table.weight", "same.weight", "bags.one.weight"}
        marked = set(model._ddp_params_and_buffers_to_ignore)
        plain = {name for name in marked if not name.startswith("_orig_mod.")}
        assert ignored >= plain >= ignored - {"same.weight"}
        assert marked == plain | {f"_orig_mod.{name}" for name in plain}  # once it is compiled
        ids = indices(2 * group.rank, 10, 5, 2)
        assert torch.equal(model(ids), alone(ids))
        assert str(model.bags["one"]).startswith("ShardedEmbeddingBag(9, 3, mode='sum'")
        model.load_state_dict({k: 2 * v for k, v in alone.state_dict().items()})  # whole tables
        assert torch.equal(model.table.to_dense(), 2 * alone.table.weight)
        weft.sync_params(model)  # leaves the shards alone
        assert torch.equal(model.bags["one"].to_dense(), 2 * alone.bags["one"].weight)
        alone.tied = nn.Linear(DIM, 10)
        alone.tied.weight = alone.table.weight
        with pytest.raises(weft.WeftError, match=r"'table.weight' and 'tied.weight' are one"):
            weft.nn.shard_embeddings(alone, min_rows=10)

    run(2, program)


def train(cut=True, fsdp=False, folder=None, first=0):
    """Losses of some steps, and the table; in the folder is what it was before step 1."""
    with weft.init():  # whose group outlives the model
        return _train(cut, fsdp, folder, first)


def _train(cut, fsdp, folder, first):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model()
    if cut:
        weft.nn.shard_embeddings(model, min_rows=9)
    if fsdp:
        tables = (each for each in model.modules() if isinstance(each, sharded_tables.ShardedTable))
        shards = {each.weight for each in tables}
        trained = fully_shard(model, ignored_params=shards)
    else:
        trained = DistributedDataParallel(model)
    update = torch.optim.Adagrad(model.parameters(), lr=0.1)
    if first:
        state = weft.nn.sharded_state(model, update)
        dcp.load(state, checkpoint_id=folder)
        weft.nn.load_sharded_state(model, update, state)
    losses = []
    for step in range(first, 3):
        if folder and step == 1 and not first:
            dcp.save(weft.nn.sharded_state(model, update), checkpoint_id=folder)
        ids = torch.randint(10, (8, 2), generator=torch.Generator().manual_seed(step))
        loss = trained(ids.chunk(size)[rank]).square().mean()
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(weft.all_reduce(loss.detach(), "avg").item())
    return losses, model.table.to_dense() if cut else model.table.weight.detach()


def test_the_dense_part_is_carried_by_others():
    (others, other), _ = processes(2, train, False)
    for fsdp in (False, True):
        for losses, table in processes(2, train, True, fsdp):
            assert losses == pytest.approx(others, rel=1e-5)
            torch.testing.assert_close(table, other)


def test_a_checkpoint_of_four_ranks_is_loaded_by_eight(tmp_path):
    (others, other), *_ = processes(4, train, True, False, tmp_path)
    for losses, table in processes(8, train, True, False, tmp_path, 1):
        assert losses == pytest.approx(others[1:], rel=1e-5)
        torch.testing.assert_close(table, other)


# what a rank has in place of its 5 rows, and what is said of it
UNFIT = {
    "too many": (
        lambda rows: torch.zeros(9, DIM),
        r"has shape \(9, 3\): it must have \(5, 3\), this",
    ),
    "too few": (lambda rows: rows[:2], r"has shape \(2, 3\): it must have \(5, 3\), this rank's"),
    "narrow": (lambda rows: rows[:, :1], r"has shape \(5, 1\): it must have \(5, 3\), this rank's"),
    "without elements": (lambda rows: rows.to("meta"), "is on the meta device"),
    "sparse": (
        lambda rows: rows.to_sparse(),
        r"is of layout torch\.sparse_coo, which to_dense\(\) makes",
    ),
}


@pytest.mark.parametrize("erring", [{1}, {0, 1}])
@pytest.mark.parametrize("case", UNFIT)
@spmd(2, on=("threads", "verbs", "processes"))
def test_a_weight_that_is_not_this_ranks_rows_is_an_error_on_all(group, case, erring):
    unfit, text = UNFIT[case]
    table = weft.nn.ShardedEmbedding(10, DIM)
    weight = table.weight
    if group.rank in erring:
        table.weight = nn.Parameter(unfit(weight.detach()))
    for call in (table.to_dense, lambda: table(ONE)):
        with pytest.raises(weft.WeftError, match=rf"^rank {min(erring)}: the weight {text}"):
            call()
    table.weight = weight
    assert torch.equal(table(ONE), table.to_dense()[3:4])


@pytest.mark.filterwarnings("ignore:.*weight_norm")  # torch's, that there is another way
@pytest.mark.parametrize("tables", [1, 2])
@spmd(2, on=("threads", "verbs", "processes"))
def test_a_table_without_its_weight_is_an_error_on_all(group, tables):
    *others, table = [weft.nn.ShardedEmbedding(10, DIM) for _ in range(tables)]
    weight = table.weight
    if group.rank == 1:
        with pytest.raises(weft.WeftError, match="rows, which nothing else may cut"):
            nn.utils.weight_norm(table)
        with pytest.raises(weft.WeftError, match="has no weight, which something took off it"):
            table.as_dtensor()
    for call in (
        table.to_dense,
        lambda: weft.nn.sharded_lookup([*others, table], [ONE] * tables),
        lambda: weft.nn.sharded_lookup([table, *others], [ONE] * tables),
    ):
        with pytest.raises(
            weft.WeftError, match=r"^rank 1: (table \d: )?ShardedEmbedding\(10, 3.*has no we"
        ):
            call()
    table.weight = weight
    assert torch.equal(table(ONE), table.to_dense()[3:4])


def test_the_table_of_another_rank_is_an_error_on_all():
    made = [b""] * 2

    def program(group):
        table = weft.nn.ShardedEmbedding(6, DIM)
        made[group.rank] = pickle.dumps(table)
        weft.barrier()
        other = pickle.loads(made[1 - group.rank])
        raised = []
        for call in (
            other.to_dense,
            lambda: other(ONE),
            lambda: weft.nn.sharded_lookup([table, other], [ONE, ONE]),
        ):
            with pytest.raises(weft.WeftError) as caught:
                call()
            raised.append(str(caught.value))
        assert torch.equal(table(ONE), table.to_dense()[3:4])
        return raised

    found, others = run(2, program)
    said = "the table is that of rank 1 of 2, and not of rank 0 of 2: make one here, and load its"
    assert found == others
    for text, start in zip(found, ("", "", "table 1: "), strict=True):
        assert text.startswith(f"rank 0: {start}{said}")


@spmd(2)
def test_tables_of_several_groups_are_not_looked_up_at_once(group):
    with group.split(range(2)) as other:
        tables = [weft.nn.ShardedEmbedding(6, DIM, group=each) for each in (group, other)]
        with pytest.raises(weft.WeftError, match="cut over several groups: ask those of one group"):
            weft.nn.sharded_lookup(tables, [ONE, ONE])
        assert torch.equal(tables[0](ONE), tables[0].to_dense()[3:4])


def test_recomputed_rows_are_fetched_by_ranks_without_input_too():
    def program(group):
        table = weft.nn.ShardedEmbedding.from_pretrained(drawn(0, 9, DIM), freeze=False)
        dense = torch.ones(2, DIM, requires_grad=True)
        sums = checkpoint(
            lambda ids, dense: dense.square().sum() + table(ids).sum(),
            torch.tensor([1, 8, 1])[: 0 if group.rank else None],
            dense,
            use_reentrant=False,
        )
        sums.backward()
        return table.weight.grad.to_dense()[:, 0].tolist(), dense.grad.tolist()

    twos = [[2.0] * DIM] * 2
    assert run(2, program) == [([0, 1, 0, 0, 0], twos), ([0, 0, 0, 0.5], twos)]


def wrap():
    """Whether shards stay what they are, whatever takes the model."""
    with weft.init():
        table = weft.nn.ShardedEmbedding(4, DIM, group=dist.group.WORLD)
        model = nn.Sequential(table, nn.Linear(DIM, 1))
        shard = model[0].weight.detach().clone()
        with pytest.raises(weft.WeftError, match=r"would overwrite the shard '0.weight'"):
            DistributedDataParallel(model)
        weft.nn.shard_embeddings(model)
        with pytest.raises(weft.WeftError, match=r"would overwrite the shard '0.0.weight'"):
            DistributedDataParallel(nn.Sequential(model))
        DistributedDataParallel(model)
        compiled = torch.compile(copy.deepcopy(model), backend="eager")
        wrapped = DistributedDataParallel(compiled)
        assert torch.equal(wrapped.get_parameter("module._orig_mod.0.weight"), shard)
        for wrapper in (
            fully_shard,
            functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
            functools.partial(distribute_module, device_mesh=DeviceMesh("cpu", [0, 1])),
            lambda model: random_unstructured(model[0], "weight", 1),
        ):
            with pytest.raises(weft.WeftError, match=r"of ShardedEmbedding\(4, 3.*ignored_params="):
                wrapper(copy.deepcopy(model))
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        weft.sync_params(copied)
        copied(torch.tensor([1, 2])).sum().backward()
        weft.sync_grads(copied)
        assert copied[0].weight.grad._nnz() == 1
        assert torch.equal(copied[0].weight, shard) and torch.equal(model[0].weight, shard)
        return shard


def test_no_wrapper_overwrites_a_shard():
    first, second = processes(2, wrap)
    assert not torch.equal(first, second)


def tied_layer(weight):
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = weight
    return layer


def registered(weight):
    module = nn.Module()
    module.register_buffer("rows", weight)
    return module


def given_another_weight(table):
    """The layer has the weight first, and the table is given it."""
    layer = nn.Linear(DIM, len(table.weight), bias=False)
    layer.weight.data = table.weight.data
    table.weight = layer.weight
    return [layer, table]


# the parts of a model that has a shard under other names than the table's
TIED = {
    "a layer behind it": lambda table: [table, tied_layer(table.weight)],
    "a layer before it": lambda table: [tied_layer(table.weight), table],
    "a layer's weight": given_another_weight,
    "a list": lambda table: [table, nn.ParameterList([table.weight])],
    "a list without the table": lambda table: [nn.ParameterList([table.weight])],
    "a buffer": lambda table: [table, registered(table.weight)],
}


@pytest.mark.parametrize("rows", [5, 6])
@pytest.mark.parametrize("tied", TIED)
@spmd(1, 2, 3, on=("threads", "processes"))
def test_a_shard_is_this_ranks_own_under_every_name(group, tied, rows):
    whole = drawn(0, rows, DIM)
    table = weft.nn.ShardedEmbedding.from_pretrained(whole, freeze=False, sparse=False)
    dense = nn.Linear(1, 1, bias=False)
    nn.init.constant_(dense.weight, 1.0 + group.rank)
    model = nn.ModuleList([*TIED[tied](table), dense])
    weft.sync_params(model)
    assert torch.equal(table.to_dense(), whole) and dense.weight == 1

    loss = table(torch.tensor([0])).sum() + dense(torch.ones(1, 1)).sum()
    loss.backward()
    gradient = torch.zeros_like(table.weight)
    gradient[: group.rank == 0] = 1  # the mean of all ranks'
    assert torch.equal(table.weight.grad, gradient)
    weft.sync_grads(model, average=False)
    assert torch.equal(table.weight.grad, gradient) and dense.weight.grad == group.size
    norm = weft.clip_grad_norm_(model, 100.0)
    assert norm == pytest.approx((DIM + group.size**2) ** 0.5)


class Tied(nn.Module):
    """A model whose shard has several names, one of them the model's own."""

    def __init__(self, table, how):
        super().__init__()
        self.parts = nn.ModuleList(TIED[how](table))
        self.rows = table.weight
        self.dense = nn.Linear(DIM, 1)
        self.look_up = [table]

    def forward(self, ids):
        return self.dense(self.look_up[0](ids)).sum()


def leave_tied_shards_alone():
    """DistributedDataParallel takes only a model that marks them, and leaves them then."""
    with weft.init():
        whole = drawn(0, 6, DIM)
        for how in TIED:
            table = weft.nn.ShardedEmbedding.from_pretrained(
                whole, freeze=False, sparse=False, average=False
            )
            model = nn.Sequential(*TIED[how](table), nn.Linear(DIM, 1))
            weft.nn.shard_embeddings(model)
            DistributedDataParallel(model)
            model.append(tied_layer(table.weight))  # afterwards
            last = f"{len(model) - 1}.weight"
            with pytest.raises(weft.WeftError, match=rf"shard '{last}', which is '0\..*', too, by"):
                DistributedDataParallel(model)
            model = weft.nn.shard_embeddings(Tied(table, how))
            DistributedDataParallel(torch.compile(model, backend="eager"))
            trained = DistributedDataParallel(model)
            weft.ddp.register(trained)
            trained(torch.tensor([0, dist.get_rank()])).backward()
            rows = table.weight.grad.any(1).tolist()
            assert rows == ([True, True, False] if dist.get_rank() == 0 else [False] * 3), how
            assert torch.equal(table.to_dense(), whole), how
            assert torch.equal(model.dense.weight.grad[0], 1.5 * whole[0] + whole[1] / 2), how


def test_no_wrapper_overwrites_a_shard_with_several_names():
    processes(2, leave_tied_shards_alone)


def test_torch_calls_weft_once_of_a_new_module_if_there_was_a_sharded_table():
    processes(1, copies_are_guarded)


def copies_are_guarded():
    hooks = torch.nn.modules.module._global_module_registration_hooks
    with weft.init():
        assert len(hooks) == 0
        table = weft.nn.ShardedEmbedding(4, DIM, group=dist.group.WORLD)
        copies = [copy.deepcopy(table), pickle.loads(pickle.dumps(table))]
        assert len(hooks) == 1
        for each in copies:
            with pytest.raises(weft.WeftError, match="would overwrite the shard"):
                DistributedDataParallel(nn.Sequential(each, nn.Linear(DIM, 1)))


def in_half_precision(table, scaler, synchronised):
    """The scale and the weights after each of three steps, in the second of which a row overflows.

    Args:
        table: of 4 rows of DIM values.
        scaler: of the loss.
        synchronised: what a dense layer's gradients go through.
    """
    torch.manual_seed(0)
    dense = nn.Linear(DIM, 1, bias=False)
    optimizer = torch.optim.SGD([*table.parameters(), *dense.parameters()], lr=0.1)
    ids = torch.tensor([0, 3])
    found = []
    for step in range(3):
        optimizer.zero_grad()
        rows = table(ids)
        if step == 1:  # in no other gradient
            rows.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), torch.inf))
        scaler.scale(dense(rows).sum()).backward()
        synchronised(dense)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), dense.weight.tolist()))
    return found


def scaled(sparse):
    """The same with a sharded table, of which the last rank has the row that overflows."""
    weight = torch.arange(4.0 * DIM).view(4, DIM)
    with weft.init():
        table = weft.nn.ShardedEmbedding.from_pretrained(weight, freeze=False, sparse=sparse)
        scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
        found = in_half_precision(table, scaler, weft.sync_grads)
        plain = nn.Embedding.from_pretrained(weight, freeze=False)
        wanted = in_half_precision(plain, torch.amp.GradScaler("cpu"), lambda dense: None)
        assert torch.equal(table.to_dense(), plain.weight)
    return found, wanted


@pytest.mark.parametrize("sparse", [False, True])
def test_torch_scales_the_loss_alike_on_every_rank(sparse):
    for found, wanted in processes(2, scaled, sparse):
        assert found == wanted
        assert [scale for scale, _ in found] == [2.0**16, 2.0**15, 2.0**15]
