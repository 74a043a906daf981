"""Checkpoints of sharded tables and of what optimizers keep: training goes on as if never saved."""

from __future__ import annotations

import copy
import itertools
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

SAVED = ((2, 5), (3, 7), (4, 5))  # ranks and rows; of 4 ranks the last has one row, or none


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


def made(rows, kind, group=None):
    model = Model(rows)
    weft.nn.shard_embeddings(model, min_rows=rows, group=group)
    updates = OPTIMIZERS[kind](model)
    return model, updates


def as_list(updates):
    return updates if isinstance(updates, list) else [updates]


def train(model, updates, steps, group=None):
    """Losses of some steps, over the same words on any number of ranks."""
    losses = []
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(model.table.num_embeddings, (12, 2), generator=generator)
        loss = model(ids.tensor_split(size)[rank]).square().sum() * size / len(ids)
        for update in as_list(updates):
            update.zero_grad()
        loss.backward()
        weft.sync_grads(model, group=group)
        for update in as_list(updates):
            update.step()
        losses.append(weft.all_reduce(loss.detach(), "avg", group).item())
    return losses


def go_on_with_other_numbers_of_ranks(folder):
    """Saved by the first ranks, so many, and loaded by fewer, as many, and more; kinds in turn."""
    with weft.init() as group:
        groups = {size: dist.new_group(range(size)) for size in (2, 3, 4)}
        kinds = itertools.cycle(OPTIMIZERS)
        for (savers, rows), size in itertools.product(SAVED, groups):
            kind = next(kinds)
            place = f"{folder}/{savers} {rows} {size}"
            wanted = [None]
            if group.rank < savers:
                wanted = [save_and_go_on(place, rows, kind, groups[savers])]
            dist.broadcast_object_list(wanted)
            if group.rank < size:
                load_and_go_on(place, rows, kind, groups[size], *wanted[0])
            weft.barrier()


def save_and_go_on(place, rows, kind, group):
    """The losses after a checkpoint, as if it had not been made, and the table at the end."""
    model, updates = made(rows, kind, group)
    train(model, updates, range(3), group)
    dcp.save(weft.nn.sharded_state(model, updates), checkpoint_id=place, process_group=group)
    return train(model, updates, range(3, 6), group), model.table.to_dense()


def load_and_go_on(place, rows, kind, group, losses, table):
    model, updates = made(rows, kind, group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = weft.nn.sharded_state(model, updates)
    dcp.load(state, checkpoint_id=place, process_group=group)
    weft.nn.load_sharded_state(model, updates, state)
    assert train(model, updates, range(3, 6), group) == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(model.table.to_dense(), table)


def test_a_checkpoint_is_loaded_by_any_number_of_ranks(tmp_path):
    processes(4, go_on_with_other_numbers_of_ranks, tmp_path)


def leave_alone():
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


def momentum():
    model, update = made(7, "momentum")
    train(model, update, range(2))
    state = weft.nn.sharded_state(model, update)
    weft.nn.load_sharded_state(model, update, state)
    for weight in of_tables(model):
        assert update.state[weight]["momentum_buffer"].is_sparse
    assert not state["optimizer"]["state"]["small.weight"]["momentum_buffer"].is_sparse


def from_whole():
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


def on_two_ranks():
    with weft.init():
        leave_alone()
        momentum()
        from_whole()


def test_new_optimizers_sparse_momenta_and_whole_tables():
    processes(2, on_two_ranks)


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
    with weft.init():
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


def test_a_shard_with_several_names_is_saved_and_loaded_as_one(tmp_path):
    processes(2, save_and_load_tied, tmp_path)


def outside_of_the_model():
    """What has a table's weight, but not the table, has it as a DTensor, too."""
    with weft.init():
        model, _ = made(7, "momentum")
        weights = nn.ParameterList([model.table.weight])
        update = torch.optim.SparseAdam(weights.parameters())
        state = weft.nn.sharded_state(weights, update)
        assert isinstance(state["model"]["0"], DTensor)
        assert state["optimizer"]["state"]["0"]["exp_avg"].shape == (7, 3)
        weft.nn.load_sharded_state(weights, update, state)


def test_a_shard_outside_of_its_table_is_saved_and_loaded():
    processes(2, outside_of_the_model)


def make_no_dtensor_of_other_rows():
    """A checkpoint would have rows in wrong places, or too few."""
    with weft.init():
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
            with pytest.raises(
                weft.WeftError, match=r"weight has shape \(2, 3\): it must have \(3, 3"
            ):
                call()


def test_other_rows_than_this_ranks_are_no_dtensor():
    processes(2, make_no_dtensor_of_other_rows)


def save_and_load_the_model_alone(folder):
    """Of a checkpoint of the model alone, and of one with an optimizer's state."""
    with weft.init():
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


def test_a_model_is_saved_and_loaded_without_optimizers(tmp_path):
    processes(2, save_and_load_the_model_alone, tmp_path)


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


def save_after_evaluation():
    """FSDP2's root keeps what it has gathered until a backward."""
    with weft.init():
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


def test_a_model_of_fsdp2_is_saved_after_an_evaluation():
    processes(2, save_after_evaluation)


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


def test_what_is_wrong_is_said():
    with weft.init():
        model, update = made(7, "adagrad")
        state = weft.nn.sharded_state(model, update)
        for given, text in (
            ((None, update), "model is a NoneType: pass a torch.nn.Module"),
            ((model, None), "optimizers has a NoneType: pass a torch.optim.Optimizer"),
            ((model, [update, model]), "optimizers has a Model: pass"),
        ):
            with pytest.raises(weft.WeftError, match=text):
                weft.nn.sharded_state(*given)
            with pytest.raises(weft.WeftError, match=text):
                weft.nn.load_sharded_state(*given, state)
        with pytest.raises(weft.WeftError, match=r"state has \['model'\]: pass what sharded_state"):
            weft.nn.load_sharded_state(model, update, {"model": state["model"]})
        with pytest.raises(weft.WeftError, match="state has NoneType"):
            weft.nn.load_sharded_state(model, update, None)
        with pytest.raises(weft.WeftError, match=r"is of no optimizers: pass \[\] for"):
            weft.nn.load_sharded_state(model, update, weft.nn.sharded_state(model, []))
        other, adam = made(7, "sparse adam and adamw")
        with pytest.raises(weft.WeftError, match="their groups of parameters differ"):
            weft.nn.load_sharded_state(other, adam, state)
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(
            weft.WeftError, match=r"LBFGS keeps nothing of a parameter of shape \(7"
        ):
            weft.nn.sharded_state(model, lbfgs)
        assert not lbfgs.state and all(each.requires_grad for each in model.parameters())
        momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(
            weft.WeftError, match=r"has step, sum of '.*', of which these .* keep momentum_buffer: "
        ):
            weft.nn.load_sharded_state(model, momentum, state)
        assert not momentum.state and momentum.param_groups[0]["lr"] == 0.1
        with pytest.raises(weft.WeftError, match=r"a tensor of shape \(1, .* of a shard of shape"):
            weft.nn.sharded_state(model, torch.optim.Adafactor(model.parameters()))
        of_table, of_whole = (momentum.state[each.weight] for each in (model.table, model.out))
        for kind, keep in (
            ("list", lambda tensor: [tensor]),
            ("dict", lambda tensor: {"0": tensor}),
            ("tuple", lambda tensor: (tensor,)),
        ):
            of_table["seconds"] = keep(torch.ones(2, 2))
            with pytest.raises(
                weft.WeftError, match=rf"shape \(2, 2\) in a {kind} of a shard of shape"
            ):
                weft.nn.sharded_state(model, momentum)
        for unknown, text in ((deque([torch.ones(7)]), "deque"), ({"0": {3}}, "set in a dict")):
            of_table["seconds"] = unknown
            with pytest.raises(weft.WeftError, match=f"keeps a {text} of a shard of"):
                weft.nn.sharded_state(model, momentum)
        of_table["seconds"] = of_whole["seconds"] = [1, None, {"0": 3.5}, torch.tensor(2.0)]
        of_whole["more"] = deque([torch.ones(2, 2)])
        weft.nn.load_sharded_state(model, momentum, weft.nn.sharded_state(model, momentum))
        assert momentum.state[model.table.weight]["seconds"] == of_table["seconds"]
        assert momentum.state[model.out.weight].keys() == of_whole.keys()
        momentum.state.clear()
        momentum.state["global"] = {"k": 1}
        with pytest.raises(weft.WeftError, match="keeps a state of 'global', which is none of"):
            weft.nn.sharded_state(model, momentum)
        with pytest.raises(weft.WeftError, match=r"two optimizers train 'table.weight', of which"):
            weft.nn.sharded_state(model, [update, torch.optim.SGD([model.table.weight])])
        moved = torch.optim.SGD([model.out.weight])
        moved.state[model.table.weight]["seconds"] = 1.0
        alone = torch.optim.SGD([model.table.weight])
        for several in ([moved, alone], [alone, moved]):
            with pytest.raises(weft.WeftError, match=r"SGD keeps a state of 'table.weight', which"):
                weft.nn.sharded_state(model, several)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's
            twice = torch.optim.SGD([model.out.weight, model.out.weight])
        with pytest.raises(weft.WeftError, match=r"SGD trains 'out.weight' twice: pass each"):
            weft.nn.sharded_state(model, twice)
        weft.nn.sharded_state(model, [update, update])
        moved.state.clear()
        moved.state["global"] = torch.ones(3)
        with pytest.raises(weft.WeftError, match="keeps a state of 'global', which is none of"):
            weft.nn.sharded_state(model, moved)
        del moved.state["global"]
        assert not moved.state[model.table.weight]  # which makes an entry
        weft.nn.sharded_state(model, moved)
        foreign = torch.optim.SGD(Model(7).parameters())
        with pytest.raises(
            weft.WeftError, match=r"SGD trains a parameter of shape .* that the model"
        ):
            weft.nn.sharded_state(model, foreign)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        filled = weft.nn.sharded_state(model, plain)
        assert filled["optimizer"].pop("state") == {}  # as torch's dcp_to_torch_save leaves it out
        weft.nn.load_sharded_state(model, plain, filled)
        filled["optimizer"]["state"] = None
        with pytest.raises(weft.WeftError, match="is not of these optimizers"):
            weft.nn.load_sharded_state(model, plain, filled)
        weft.nn.load_sharded_state(model, [], {"model": filled["model"]})
        del state["optimizer"]["state"]["table.weight"]
        with pytest.raises(weft.WeftError, match=r"has nothing of 'table.weight', of which"):
            weft.nn.load_sharded_state(model, update, state)
        assert not any(each.state for each in adam)
