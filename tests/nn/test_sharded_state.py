"""Checkpoints of sharded tables and of what optimizers keep: training goes on as if never saved."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import deque

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.testing import processes, spmd

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of Adagrad


class Model(nn.Module):
    """A table that is cut, a sparse one that is not, and a dense part."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(rows, 3, mode="sum", sparse=True)
        self.small = nn.Embedding(2, 3, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, ids):
        return self.out(self.table(ids) + self.small(ids[:, 0] % 2))


def of_tables(model):
    return [model.table.weight, model.small.weight]


OPTIMIZERS = {
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "sparse adam and adamw": lambda model: [
        torch.optim.SparseAdam(of_tables(model), lr=0.1),
        torch.optim.AdamW(model.out.parameters(), lr=torch.tensor(0.1)),
    ],
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
    "sparse adam and sgd": lambda model: [
        torch.optim.SGD(model.out.parameters(), lr=0.1),
        torch.optim.SparseAdam(of_tables(model), lr=0.1),
    ],
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def made(rows, kind):
    model = Model(rows)
    weft.nn.shard_embeddings(model, min_rows=rows)
    updates = OPTIMIZERS[kind](model)
    return model, updates


def as_list(updates):
    return updates if isinstance(updates, list) else [updates]


def train(model, updates, steps):
    """Losses of some steps, over the same words on any number of ranks."""
    losses = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(model.table.num_embeddings, (12, 2), generator=generator)
        loss = model(ids.tensor_split(size)[rank]).square().sum() * size / len(ids)
        for update in as_list(updates):
            update.zero_grad()
        loss.backward()
        weft.sync_grads(model)
        for update in as_list(updates):
            update.step()
        losses.append(weft.all_reduce(loss.detach(), "avg").item())
    return losses


def leave_alone(_):
    """What is asked of new optimizers, and under a wrapper, changes neither them nor gradients."""
    model, updates = made(7, "sparse adam and adamw")
    wrapped = DistributedDataParallel(model)
    wrapped(torch.tensor([[dist.get_rank(), 6]])).sum().backward()
    before = [(each.grad, each.detach().clone()) for each in model.parameters()]
    rates = [group["lr"] for update in updates for group in update.param_groups]
    state = weft.nn.sharded_state(wrapped, updates)
    for parameter, (gradient, value) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient and torch.equal(parameter, value)
    assert not any(update.state for update in updates)
    after = [group["lr"] for update in updates for group in update.param_groups]
    assert all(one is other for one, other in zip(rates, after, strict=True))
    kept = state["optimizer"]["state"]
    assert sorted(kept) == sorted(state["model"])
    table = kept["table.weight"]
    assert isinstance(table["exp_avg"], DTensor) and table["exp_avg"].shape == (7, 3)
    assert table["step"] == 0 and kept["out.bias"]["step"] == 0
    assert not isinstance(kept["small.weight"]["exp_avg"], DTensor)
    updates[0].step()
    table = weft.nn.sharded_state(wrapped, updates)["optimizer"]["state"]["table.weight"]
    held = updates[0].state[model.table.weight]["exp_avg"]
    assert table["exp_avg"].to_local().data_ptr() == held.data_ptr()


class Peculiar(torch.optim.Optimizer):
    """Counts its steps, and has a state of its own making, which has another optimizer's inside."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.5)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {"seen": torch.zeros(len(parameter))}
                self.state[parameter]["seen"] += 1 + parameter.grad.to_dense().sum()


def test_state_that_is_made_leaves_no_trace():
    with weft.init():
        model = Model(7)
        parts = weft.nn.shard_embeddings(model, min_rows=7)
        made = torch.optim.NAdam(model.out.parameters(), lr=0.1), Peculiar(of_tables(model))
        for each in made:
            each.register_step_pre_hook(lambda *_: pytest.fail("a step was made"))
        model(torch.tensor([[1, 2]])).sum().backward()
        before = [(each.detach().clone(), each.grad) for each in model.parameters()]
        rate = torch.optim.lr_scheduler.StepLR(made[0], 1)
        state = weft.nn.sharded_state(parts, made)["optimizer"]["state"]
        assert state["out.bias"]["mu_product"] == 1 and state["out.bias"]["step"] == 0
        assert set(state["table.weight"]) == {"seen"}
        for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, value) and parameter.grad is gradient
            assert parameter.requires_grad
        assert not any(each.state for each in (*made, made[1].inner))
        assert made[1].steps == 0 and rate.last_epoch == 0


def test_a_table_whose_gradient_is_said_to_be_sparse_may_be_with_adam_while_it_is_frozen():
    with weft.init():
        model = Model(7)
        for weight in of_tables(model):
            weight.requires_grad_(False)
        adam = torch.optim.Adam(model.parameters())
        kept = weft.nn.sharded_state(model, adam)["optimizer"]["state"]
        assert kept["small.weight"]["exp_avg"].count_nonzero() == 0
        assert not model.small.weight.requires_grad


def test_a_training_that_goes_back_keeps_nothing_of_what_was_new_then():
    with weft.init():
        model, update = made(7, "momentum")
        state = copy.deepcopy(weft.nn.sharded_state(model, update))
        model(torch.tensor([[1, 2]])).sum().backward()
        update.step()
        assert len(update.state) == 4
        weft.nn.load_sharded_state(model, update, state)
        assert not update.state


def keep_momenta_sparse(_):
    """They are dense in a state."""
    model, update = made(7, "momentum")
    train(model, update, range(2))
    state = weft.nn.sharded_state(model, update)
    weft.nn.load_sharded_state(model, update, state)
    for weight in of_tables(model):
        assert update.state[weight]["momentum_buffer"].is_sparse
    assert not state["optimizer"]["state"]["small.weight"]["momentum_buffer"].is_sparse


def load_whole_tables(_):
    """State of one process, whose tables were whole."""
    whole = Model(7)
    updates = OPTIMIZERS["sparse adam and adamw"](whole)
    train(whole, updates, range(2))  # with gradients of all ranks: the same everywhere
    kept = copy.deepcopy(get_optimizer_state_dict(whole, updates))
    state = {"model": get_model_state_dict(whole), "optimizer": kept}
    model, others = made(7, "sparse adam and adamw")
    weft.nn.load_sharded_state(model, others, state)
    losses = train(model, others, range(2, 4))
    assert losses == pytest.approx(train(whole, updates, range(2, 4)), rel=1e-5)
    torch.testing.assert_close(model.table.to_dense(), whole.table.weight.detach())


@spmd(1, 2)
def test_a_group_without_parameters_keeps_its_settings(group):
    """torch takes them away, pytorch#143828: the next step would raise KeyError."""
    model, _ = made(5, next(iter(OPTIMIZERS)))
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.25}]
    optimizer = torch.optim.Adagrad(groups, lr=0.5)
    state = weft.nn.sharded_state(model, optimizer)
    weft.nn.load_sharded_state(model, optimizer, state)
    assert [each["lr"] for each in optimizer.param_groups] == [0.5, 0.25]
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()


def tied(rows, kind):
    """A model whose shard has two more names, one of which comes before the table's own."""
    model, _ = made(rows, kind)
    head = nn.Linear(3, 1, bias=False)
    head.weight = model.table.weight
    wholly = nn.ModuleDict({"before": head, "model": model})
    wholly.behind = nn.ParameterList([model.table.weight])
    return wholly, OPTIMIZERS[kind](model)


NAMES = ("before.weight", "model.table.weight", "behind.0")


def save_and_load_tied(folder):
    """Rows of each rank, under each name."""
    for kind in ("momentum", "sparse adam and sgd"):
        whole, updates = tied(7, kind)
        train(whole["model"], updates, range(2))
        wanted = whole["model"].table.to_dense()
        state = weft.nn.sharded_state(whole, updates)
        for name in NAMES:
            assert isinstance(state["model"][name], DTensor), name
            assert state["model"][name].shape == (7, 3)
        dcp.save(state, checkpoint_id=f"{folder}/{kind}")
        losses = train(whole["model"], updates, range(2, 4))

        other, updates = tied(7, kind)
        with torch.no_grad():
            other["model"].table.weight.zero_()
        state = weft.nn.sharded_state(other, updates)
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        weft.nn.load_sharded_state(other, updates, state)
        assert other["before"].weight is other["model"].table.weight
        assert torch.equal(other["model"].table.to_dense(), wanted)
        assert train(other["model"], updates, range(2, 4)) == pytest.approx(losses, rel=1e-5)

        for name in NAMES:  # a state of whole tables
            state["model"][name] = 2 * wanted
        weft.nn.load_sharded_state(other, updates, state)
        assert torch.equal(other["model"].table.to_dense(), 2 * wanted)
        assert not other["before"]._state_dict_hooks  # the calls leave none behind
        assert not other["before"]._load_state_dict_pre_hooks


def outside_of_the_model(_):
    """What has a table's weight, but not the table, has it as a DTensor, too."""
    model, _ = made(7, "momentum")
    weights = nn.ParameterList([model.table.weight])
    update = torch.optim.SparseAdam(weights.parameters())
    state = weft.nn.sharded_state(weights, update)
    assert isinstance(state["model"]["0"], DTensor)
    assert state["optimizer"]["state"]["0"]["exp_avg"].shape == (7, 3)
    weft.nn.load_sharded_state(weights, update, state)


def make_no_dtensor_of_other_rows(_):
    """A checkpoint would have rows in wrong places, or too few."""
    table = weft.nn.ShardedEmbedding(6, 3)
    update = torch.optim.SGD(table.parameters(), lr=0.1)
    rank = dist.get_rank()
    pickled = [None] * 2
    dist.all_gather_object(pickled, pickle.dumps(table))
    swapped = pickle.loads(pickled[1 - rank])
    with pytest.raises(weft.WeftError, match=rf"that of rank {1 - rank} of 2, and not of rank"):
        swapped.state_dict()
    with pytest.raises(weft.WeftError, match=r"tensor has shape \(2,\): it must have \(3,\)"):
        table.as_dtensor(torch.zeros(2))
    table.weight.data = table.weight.data[:2]
    for call in (
        table.as_dtensor,
        table.state_dict,
        lambda: weft.nn.sharded_state(table, update),
    ):
        with pytest.raises(weft.WeftError, match=r"weight has shape \(2, 3\): it must have \(3, 3"):
            call()


def save_and_load_the_model_alone(folder):
    """Of a checkpoint of the model alone, and of one with an optimizer's state."""
    for optimizers in (lambda model: [], OPTIMIZERS["adagrad"]):
        model, _ = made(7, "sgd")
        place = f"{folder}/{len(as_list(optimizers(model)))}"
        dcp.save(weft.nn.sharded_state(model, optimizers(model)), checkpoint_id=place)
        wanted = model.table.to_dense()
        with torch.no_grad():
            model.table.weight.zero_()
        state = weft.nn.sharded_state(model, [])
        assert state["optimizer"] == {}
        dcp.load(state, checkpoint_id=place)
        weft.nn.load_sharded_state(model, [], state)
        assert torch.equal(model.table.to_dense(), wanted)
    state["optimizer"] = weft.nn.sharded_state(model, OPTIMIZERS["adagrad"](model))["optimizer"]
    weft.nn.load_sharded_state(model, iter([]), state)
    assert torch.equal(model.table.to_dense(), wanted)


@pytest.mark.parametrize("assign", [False, True])
@spmd(1, 3)
def test_a_state_of_whole_tables_leaves_each_rank_its_rows_alone(group, assign):
    whole = torch.arange(12.0).view(6, 2)
    table = weft.nn.ShardedEmbedding(6, 2, group=group)
    table.load_state_dict({"weight": whole}, assign=assign)
    assert torch.equal(table.to_dense(), whole)
    assert table.weight.untyped_storage().nbytes() == table.weight.nbytes
    with torch.no_grad():
        table.weight.zero_()
    assert torch.equal(whole, torch.arange(12.0).view(6, 2))


@pytest.mark.parametrize("rows", [1, 2, 3])
@spmd(2)
def test_what_may_be_of_a_ranks_rows_alone_is_refused_on_all(group, rows):
    """A rank may have one row of them, or none."""
    table = weft.nn.ShardedEmbedding(rows, 1, group=group)
    optimizer = torch.optim.Adagrad(table.parameters())
    for kept in ([torch.ones_like(table.weight)], [table.weight.detach()[:, 0]]):
        optimizer.state[table.weight]["extra"] = kept
        with pytest.raises(weft.WeftError, match="in a list of a shard of shape"):
            weft.nn.sharded_state(table, optimizer)


def save_after_evaluation(_):
    """FSDP2's root keeps what it has gathered until a backward."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    weft.nn.shard_embeddings(model, 1)
    fully_shard(model[1])
    fully_shard(model, ignored_params={model[0].weight})
    optimizer = torch.optim.Adagrad(model.parameters())
    ids = torch.tensor([1, 3])
    model(ids).sum().backward()
    optimizer.step()
    wanted = weft.nn.sharded_state(model, optimizer)
    with torch.no_grad():
        model(ids)
    state = weft.nn.sharded_state(model, optimizer)
    assert state["optimizer"]["state"].keys() == wanted["optimizer"]["state"].keys()
    with torch.no_grad():
        model(ids)
    weft.nn.load_sharded_state(model, optimizer, state)


def begun(program, folder):
    with weft.init():
        program(folder)


@pytest.mark.parametrize(
    "program",
    [
        leave_alone,
        keep_momenta_sparse,
        load_whole_tables,
        save_and_load_tied,
        outside_of_the_model,
        make_no_dtensor_of_other_rows,
        save_and_load_the_model_alone,
        save_after_evaluation,
    ],
)
def test_on_two_ranks(program, tmp_path):
    processes(2, begun, program, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process serves here
@pytest.mark.parametrize(
    ("kind", "setting", "lacking"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "nothing of 'table.weight', .* momentum_buffer"),
        (torch.optim.Adam, {"amsgrad": True}, "exp_avg_sq, step of 'table.weight', .* max_exp_avg"),
    ],
)
def test_settings_of_a_checkpoint_that_ask_for_more_state(
    tmp_path, monkeypatch, kind, setting, lacking
):
    """An optimizer that was made with others asks the checkpoint for less than it then has."""

    def made_with(**settings):
        model = Model(7)
        weft.nn.shard_embeddings(model, 1)
        return model, kind(model.parameters(), **settings)

    def filled(model, optimizer):
        state = weft.nn.sharded_state(model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        return state

    def refuse(self, closure):
        raise AssertionError("there is none")

    with weft.init():
        model, optimizer = made_with(lr=0.05, **setting)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        dcp.save(weft.nn.sharded_state(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
        kept = optimizer.state[model.table.weight].keys()

        model, fewer = made_with(lr=0.1)
        state = filled(model, fewer)
        with pytest.raises(
            weft.WeftError, match=f"{lacking}.* give the optimizer its {next(iter(setting))} "
        ):
            weft.nn.load_sharded_state(model, fewer, state)
        assert not fewer.state and fewer.param_groups[0]["lr"] == 0.1

        model, alike = made_with(lr=0.1, **setting)
        state = filled(model, alike)
        weft.nn.load_sharded_state(model, alike, state)
        assert alike.state[model.table.weight].keys() == kept
        assert alike.param_groups[0]["lr"] == 0.05

        alike.param_groups[0]["weight_decay"] = 0.5
        monkeypatch.setattr(kind, "step", refuse)  # as one that needs a closure does
        weft.nn.load_sharded_state(model, alike, state)


def refuses(text, call, *arguments):
    with pytest.raises(weft.WeftError, match=text):
        call(*arguments)


def test_what_is_wrong_is_said():
    with weft.init():
        save, load = weft.nn.sharded_state, weft.nn.load_sharded_state
        model, update = made(7, "adagrad")
        state = save(model, update)
        for given, text in (
            ((None, update), "model is a NoneType: pass a torch.nn.Module"),
            ((model, None), "optimizers has a NoneType: pass a torch.optim.Optimizer"),
            ((model, [update, model]), "optimizers has a Model: pass"),
        ):
            refuses(text, save, *given)
            refuses(text, load, *given, state)
        text = r"state has \['model'\]: pass what sharded_state"
        refuses(text, load, model, update, {"model": state["model"]})
        refuses("state has NoneType", load, model, update, None)
        refuses(r"is of no optimizers: pass \[\] for", load, model, update, save(model, []))
        other, adam = made(7, "sparse adam and adamw")
        refuses("their groups of parameters differ", load, other, adam, state)
        lbfgs = torch.optim.LBFGS(model.parameters())
        refuses(r"LBFGS keeps nothing of a parameter of shape \(7", save, model, lbfgs)
        assert not lbfgs.state and all(each.requires_grad for each in model.parameters())
        momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        text = r"has step, sum of '.*', of which these .* keep momentum_buffer: "
        refuses(text, load, model, momentum, state)
        assert not momentum.state and momentum.param_groups[0]["lr"] == 0.1
        factored = torch.optim.Adafactor(model.parameters())
        refuses(r"a tensor of shape \(1, .* of a shard of shape", save, model, factored)
        of_table, of_whole = (momentum.state[each.weight] for each in (model.table, model.out))
        for kind, keep in (
            ("list", lambda tensor: [tensor]),
            ("dict", lambda tensor: {"0": tensor}),
            ("tuple", lambda tensor: (tensor,)),
        ):
            of_table["seconds"] = keep(torch.ones(2, 2))
            refuses(rf"shape \(2, 2\) in a {kind} of a shard of shape", save, model, momentum)
        for unknown, text in ((deque([torch.ones(7)]), "deque"), ({"0": {3}}, "set in a dict")):
            of_table["seconds"] = unknown
            refuses(f"keeps a {text} of a shard of", save, model, momentum)
        of_table["seconds"] = of_whole["seconds"] = [1, None, {"0": 3.5}, torch.tensor(2.0)]
        of_whole["more"] = deque([torch.ones(2, 2)])
        load(model, momentum, save(model, momentum))
        assert momentum.state[model.table.weight]["seconds"] == of_table["seconds"]
        assert momentum.state[model.out.weight].keys() == of_whole.keys()
        momentum.state.clear()
        momentum.state["global"] = {"k": 1}
        refuses("keeps a state of 'global', which is none of", save, model, momentum)
        of_the_table = torch.optim.SGD([model.table.weight])
        text = r"two optimizers train 'table.weight', of which"
        refuses(text, save, model, [update, of_the_table])
        moved = torch.optim.SGD([model.out.weight])
        moved.state[model.table.weight]["seconds"] = 1.0
        for several in ([moved, of_the_table], [of_the_table, moved]):
            refuses(r"SGD keeps a state of 'table.weight', which", save, model, several)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's
            twice = torch.optim.SGD([model.out.weight, model.out.weight])
        refuses(r"SGD trains 'out.weight' twice: pass each", save, model, twice)
        save(model, [update, update])
        moved.state.clear()
        moved.state["global"] = torch.ones(3)
        refuses("keeps a state of 'global', which is none of", save, model, moved)
        del moved.state["global"]
        assert not moved.state[model.table.weight]  # which makes an entry
        save(model, moved)
        foreign = torch.optim.SGD(Model(7).parameters())
        refuses(r"SGD trains a parameter of shape .* that the model", save, model, foreign)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        filled = save(model, plain)
        assert filled["optimizer"].pop("state") == {}  # as torch's dcp_to_torch_save leaves it out
        load(model, plain, filled)
        filled["optimizer"]["state"] = None
        refuses("is not of these optimizers", load, model, plain, filled)
        load(model, [], {"model": filled["model"]})
        del state["optimizer"]["state"]["table.weight"]
        refuses(r"has nothing of 'table.weight', of which", load, model, update, state)
        assert not any(each.state for each in adam)
