"""Time the communication routines and what a person would write instead.

    python benchmarks/communication.py [--ranks 4] [--rounds 5] [--elements 25000000]
    python benchmarks/communication.py --call all_to_all --bytes 262144 --rounds 40
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/communication.py --call sync_grads

The results of all contenders are checked first; then they take turns in one run. The routines are:

* `sync_params` and `sync_grads`, of a model of many small tensors, and of one of as many larger
  tensors. The others are SAR's way (one `all_reduce` for each tensor) and the fastest way on gloo
  (one call for all tensors, flattened). Gradients are also sent in bfloat16, as
  DistributedDataParallel's `bf16_compress_hook` does;
* `all_to_all`. The others are gloo's `all_to_all_single` with sizes that are known, and the same
  with an exchange of sizes before it;
* `all_reduce`. The other is gloo's.

`--call` chooses among them. `--bytes` sets the sizes for the last two. Times are medians over the
rounds, of the slowest rank; calls of 256 KiB to 1 MiB have eight times as many rounds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import weft
from turns import on_ranks, turns
from weft.group.group import Group

SMALL = 1000  # elements of a small tensor
SIZES = (8, *(1 << power for power in range(10, 26, 2)))  # bytes that each sends to each
QUICK = 1 << 17  # bytes up to which a call is made often enough for one time to be steady
SHORT = 1 << 20  # bytes up to which times of a call spread so far that more rounds are needed
OFTEN = 8  # times as many rounds for the sizes between
MODELS = ("sync_params", "sync_grads")
CALLS = ("all_to_all", "all_reduce")

Rows = list[list[str]]


def measure(
    group: Group, rounds: int, contenders: dict[str, Callable[[], object]], calls: int = 1
) -> Rows:
    """Median milliseconds of each contender, of the slowest rank, and as multiples of the first."""
    times = turns(group, rounds, contenders, calls=calls)
    medians = {name: statistics.median(each) for name, each in times.items()}
    first = next(iter(medians.values()))
    return [
        [name, f"{seconds * 1e3:.2f}", f"{seconds / first:.2f}"]
        for name, seconds in medians.items()
    ]


def model(count: int, elements: int, rank: int) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(rank)
    made = nn.ParameterList()
    for _ in range(count):
        parameter = nn.Parameter(torch.randint(-9, 9, (elements,), generator=generator).float())
        parameter.grad = torch.randint(-9, 9, (elements,), generator=generator).float()
        made.append(parameter)
    return made


def sar_params(module: nn.Module, gloo: dist.ProcessGroup) -> None:
    for tensor in module.state_dict().values():
        if gloo.rank():
            tensor.zero_()
        dist.all_reduce(tensor, group=gloo)


def gloo_params(module: nn.Module, gloo: dist.ProcessGroup) -> None:
    tensors = [tensor.detach() for tensor in module.parameters()]
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.broadcast(flat, group_src=0, group=gloo)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()


def sar_grads(module: nn.Module, gloo: dist.ProcessGroup) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=gloo)


def gloo_grads(
    module: nn.Module, gloo: dist.ProcessGroup, dtype: torch.dtype = torch.float32
) -> None:
    gradients = [parameter.grad for parameter in module.parameters()]
    flat = torch.cat([gradient.view(-1) for gradient in gradients]).to(dtype)
    dist.all_reduce(flat, group=gloo)
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()].view(gradient.shape))
        at += gradient.numel()


def synchronise(
    group: Group,
    gloo: dist.ProcessGroup,
    rounds: int,
    names: Sequence[str],
    count: int,
    elements: int,
) -> Rows:
    """Parameters and gradients of a model of `count` tensors of so many elements."""
    ways: dict[str, dict[str, Callable[[nn.ParameterList], object]]] = {
        "sync_params": {
            "weft": weft.sync_params,
            "one all_reduce each (SAR)": lambda m: sar_params(m, gloo),
            "flat broadcast (gloo)": lambda m: gloo_params(m, gloo),
        },
        "sync_grads": {
            "weft": lambda m: weft.sync_grads(m, average=False),
            "one all_reduce each (SAR)": lambda m: sar_grads(m, gloo),
            "flat all_reduce (gloo)": lambda m: gloo_grads(m, gloo),
            "weft, bfloat16": lambda m: weft.sync_grads(
                m, average=False, wire_dtype=torch.bfloat16
            ),
            "flat all_reduce, bfloat16 (gloo)": lambda m: gloo_grads(m, gloo, torch.bfloat16),
        },
    }
    shown: Rows = []
    for name in names:
        contenders = ways[name]
        for way, contender in contenders.items():
            mine = model(count, elements, group.rank)
            contender(mine)
            everyone = [model(count, elements, rank) for rank in range(group.size)]
            for number, parameter in enumerate(mine):
                found = parameter.detach() if name == "sync_params" else parameter.grad
                want = everyone[0][number].detach()
                if name == "sync_grads":
                    want = torch.stack([each[number].grad for each in everyone]).sum(0)
                assert torch.equal(found, want), (name, way)
        mine = model(count, elements, group.rank)
        # numbers as a model has them: zeros would travel in fewer bytes. Sums grow from round to
        # round, and would slow down when they overflow
        for parameter in mine:
            parameter.data.normal_()
            parameter.grad.normal_().mul_(1e-12)
        bound = {way: functools.partial(contender, mine) for way, contender in contenders.items()}
        shown += [[name, f"{count} x {elements}", *row] for row in measure(group, rounds, bound)]
    return shown


def tensors(
    group: Group, gloo: dist.ProcessGroup, rounds: int, names: Sequence[str], sizes: Sequence[int]
) -> Rows:
    """The calls that move one tensor, or one for each rank, of so many bytes each."""
    ways = {"all_to_all": exchange, "all_reduce": reduce}
    shown: Rows = []
    for nbytes in sizes:
        for name in names:
            contenders = ways[name](group, gloo, nbytes)
            # a short call often enough for its time to be steady; one of a few milliseconds takes
            # up to four times as long where ranks share a core, so few rounds have a chance median
            often = OFTEN if QUICK < nbytes <= SHORT else 1
            timed = measure(group, rounds * often, contenders, 20 if nbytes <= QUICK else 1)
            shown += [[name, f"{nbytes} B", *row] for row in timed]
    return shown


def exchange(group: Group, gloo: dist.ProcessGroup, nbytes: int) -> dict[str, Callable[[], object]]:
    """Ways of `all_to_all`, checked. All send the same memory, as warm for one as for another."""
    source = torch.cat(
        [
            torch.full((nbytes,), group.rank * group.size + to, dtype=torch.uint8)
            for to in range(group.size)
        ]
    )
    inputs = list(source.split(nbytes))
    result = torch.empty_like(source)
    sizes = torch.tensor([tensor.numel() for tensor in inputs])

    def known() -> None:
        dist.all_to_all_single(result, source, group=gloo)

    def fresh() -> None:
        dist.all_to_all_single(torch.empty_like(source), source, group=gloo)

    def unknown() -> torch.Tensor:
        coming = torch.empty_like(sizes)
        dist.all_to_all_single(coming, sizes, group=gloo)
        result = source.new_empty(int(coming.sum()))
        dist.all_to_all_single(result, source, coming.tolist(), sizes.tolist(), group=gloo)
        return result

    found = weft.all_to_all(inputs)
    known()
    assert torch.equal(torch.cat(found), result) and torch.equal(unknown(), result)
    for rank, tensor in enumerate(found):
        assert tensor.eq(rank * group.size + group.rank).all()
    return {
        "weft": lambda: weft.all_to_all(inputs),
        "gloo, sizes discovered": unknown,
        "gloo, sizes known": fresh,
        "gloo, sizes known, memory reused": known,
    }


def reduce(group: Group, gloo: dist.ProcessGroup, nbytes: int) -> dict[str, Callable[[], object]]:
    """Ways of `all_reduce`, checked. Gloo's is in place; summing zeros leaves them so."""
    tensor = torch.ones(max(1, nbytes // 4))
    assert weft.all_reduce(tensor).eq(group.size).all()
    place = torch.zeros_like(tensor)
    return {
        "weft": lambda: weft.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor.clone(), group=gloo),
        "gloo, in place": lambda: dist.all_reduce(place, group=gloo),
    }


def rank(arguments: argparse.Namespace) -> Rows:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    gloo = dist.group.WORLD
    assert gloo is not None
    with weft.init() as group:
        rows: Rows = []
        chosen = arguments.call or [*MODELS, *CALLS]
        models = [name for name in MODELS if name in chosen]
        for each in (SMALL, arguments.elements // arguments.tensors) if models else ():
            rows += synchronise(group, gloo, arguments.rounds, models, arguments.tensors, each)
        sizes = arguments.bytes or [size for size in SIZES if size <= arguments.largest]
        calls = [name for name in CALLS if name in chosen]
        rows += tensors(group, gloo, arguments.rounds, calls, sizes)
    dist.destroy_process_group()
    return rows


def show(rows: Rows, ranks: int) -> None:
    table = Table(title=f"{ranks} ranks", title_justify="left")
    for column in ("call", "data", "way", "ms", "of weft's"):
        table.add_column(column, justify="right" if column in ("ms", "of weft's") else "left")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before[:2] != row[:2]:
            table.add_section()
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=200, help="of a model")
    parser.add_argument("--elements", type=int, default=25_000_000, help="of all tensors")
    parser.add_argument("--largest", type=int, default=1 << 24, help="bytes of an exchange")
    parser.add_argument("--bytes", type=int, action="append", help="of an exchange, instead")
    parser.add_argument("--call", choices=[*MODELS, *CALLS], action="append", help="all, if none")
    on_ranks(rank, parser.parse_args(), show)


if __name__ == "__main__":
    main()
