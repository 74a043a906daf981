"""Numbers in fewer bytes between hosts: how many fewer, how quickly, and what calls gain by it.

    python benchmarks/packing.py                                             # the code alone
    tools/netlab -n 4 --rate 1gbit --raw -- python benchmarks/packing.py [--rounds 6]

Alone: bytes of several kinds of numbers, as a share of what they were, and the speed at which one
core writes and reads them, piece by piece as they travel, everything in its cache; what comes back
is checked bit by bit. *gradients* and *weights* are those of a small transformer after 30 steps on
the text of Python's own library.

Under a launcher: calls with and without packing (`WEFT_PACK`), by turns in one run, on the same
data, results compared bit by bit first. *out* is what left the network interface for the bytes that
the call says it sent, both of rank 0; times are medians over the rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import weft
from turns import turns
from weft.kernels import floats
from weft.kernels.compile import compiler
from weft.wire import default

NUMBERS = 1 << 22
PIECE = 1 << 18  # bytes, as in weft.wire.pieces
MODEL = 8_000_000  # parameters
DTYPES = (torch.float32, torch.bfloat16)

Rows = list[list[str]]


def trained() -> tuple[Tensor, Tensor]:
    """Gradients and weights of a small transformer in the middle of its training."""
    torch.manual_seed(0)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    embed, body = nn.Embedding(256, 256), nn.TransformerEncoder(layer, 3)
    model = nn.Sequential(embed, body, nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(30):
        starts = torch.randint(0, len(data) - 65, (16,))
        rows = torch.stack([data[start : start + 65] for start in starts])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat(gradients), torch.cat([each.detach().flatten() for each in model.parameters()])


def numbers() -> dict[str, Tensor]:
    torch.manual_seed(0)
    normal, wide = torch.randn(NUMBERS), torch.randn(NUMBERS) * torch.randn(NUMBERS).mul(3).exp()
    gradients, weights = trained()
    return {
        "normal": normal,
        "gradients": gradients,
        "weights": weights,
        "half zeros (ReLU)": normal.relu(),
        "log-normal, sigma 3": wide,
        "random bits": torch.randint(-(2**31), 2**31 - 1, (NUMBERS,)).int().view(torch.float32),
    }


def coded(kind: str, values: Tensor) -> tuple[float, float, float]:
    """Share of the bytes that is left, and GB/s of writing and of reading; checked."""
    raw = values.view(torch.uint8).numpy().data
    count = PIECE // values.itemsize
    room = bytearray(floats.most_bytes(kind, count))
    back = torch.empty(PIECE, dtype=torch.uint8).numpy().data
    total = wrote = read = 0.0
    pieces = range(0, len(raw) - PIECE + 1, PIECE)
    for start in pieces:
        piece, took = raw[start : start + PIECE], []
        for _ in range(3):
            begin = time.perf_counter()
            size = floats.pack_floats(kind, piece, memoryview(room))
            middle = time.perf_counter()
            floats.unpack_floats(kind, memoryview(room), back)
            took.append((middle - begin, time.perf_counter() - middle))
        assert back == piece
        total += size
        wrote += min(each for each, _ in took)
        read += min(each for _, each in took)
    nbytes = PIECE * len(pieces)
    return total / nbytes, nbytes / wrote / 1e9, nbytes / read / 1e9


def alone() -> Rows:
    rows = []
    for kind in floats.FLOATS.values():
        compiler.make(floats.floats_key(kind))
    for name, values in numbers().items():
        row = [name]
        for dtype in DTYPES:
            share, wrote, read = coded(floats.FLOATS[dtype], values.to(dtype).contiguous())
            row += [f"{share:.3f}", f"{wrote:.1f}", f"{read:.1f}"]
        rows.append(row)
    return rows


def left() -> int:
    """Bytes that left this host's interfaces."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[9]) for line in lines if not line.strip().startswith("lo:"))


def calls(rank: int) -> dict[str, Callable[[dist.ProcessGroup], list[Tensor]]]:
    """What is timed, by name; each returns its results."""
    draw = torch.Generator().manual_seed(rank)
    dense = torch.randn(MODEL, generator=draw)
    keys = (1_000_000 ** torch.rand(50_000, generator=draw, dtype=torch.float64)).long().unique()
    values = torch.randn(len(keys), 64, generator=draw)
    model = nn.ModuleList(nn.Linear(500, 500) for _ in range(MODEL // 250_500))

    def reduced(dtype: torch.dtype) -> Callable[[dist.ProcessGroup], list[Tensor]]:
        return lambda group: [weft.all_reduce(dense.to(dtype), group=group)]

    def synchronised(group: dist.ProcessGroup) -> list[Tensor]:
        weft.sync_params(model, group=group)
        return [each.detach() for each in model.parameters()]

    def sparse(wire_dtype: torch.dtype | None) -> Callable[[dist.ProcessGroup], list[Tensor]]:
        return lambda group: list(
            weft.sparse_all_reduce((keys, values), wire_dtype=wire_dtype, group=group)
        )

    return {
        "all_reduce, 8M float32": reduced(torch.float32),
        "all_reduce, 8M bfloat16": reduced(torch.bfloat16),
        "sync_params, 8M float32": synchronised,
        "sparse_all_reduce, Zipf": sparse(None),
        "the same, wire_dtype=bfloat16": sparse(torch.bfloat16),
    }


def between_hosts(rounds: int) -> Rows:
    """One rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = []
    with weft.init() as wire:
        groups = {pack: dist.new_group() for pack in ("0", "1")}

        def run(pack: str, call: Callable[[dist.ProcessGroup], list[Tensor]]) -> list[Tensor]:
            os.environ["WEFT_PACK"] = pack  # looked at as long as nothing was packed
            return call(groups[pack])

        for name, call in calls(wire.rank).items():
            results = [run(pack, call) for pack in groups for _ in range(2)]
            for first, *others in zip(*results, strict=True):
                for other in others:
                    assert torch.equal(first.view(torch.uint8), other.view(torch.uint8)), name
            shares = {}
            for pack in groups:
                dist.barrier()
                traffic, before = default.resolve(groups[pack]).traffic, left()
                said = traffic.bytes
                run(pack, call)
                dist.barrier()  # by now all of it was received
                shares[pack] = (left() - before) / max(1, traffic.bytes - said)
            ways = {pack: functools.partial(run, pack, call) for pack in groups}
            times = turns(wire, rounds, ways)
            middle = {pack: statistics.median(each) for pack, each in times.items()}
            rows.append(
                [
                    name,
                    *(f"{share:.2f}" for share in shares.values()),
                    *(
                        f"{middle[pack] * 1e3:.0f} ({min(each) * 1e3:.0f}-{max(each) * 1e3:.0f})"
                        for pack, each in times.items()
                    ),
                    f"{middle['0'] / middle['1']:.2f}",
                ]
            )
    dist.destroy_process_group()
    return rows


def show(title: str, columns: list[str], rows: Rows) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    if "RANK" not in os.environ:
        each = [f"{dtype}"[6:] + what for dtype in DTYPES for what in ("", " GB/s", " read")]
        show(f"one core, load {load}", ["numbers", *each], alone())
        return
    rows = between_hosts(arguments.rounds)
    if os.environ["RANK"] == "0":
        columns = ["call", "out", "packed", "ms", "packed", "times as fast"]
        show(f"{os.environ['WORLD_SIZE']} ranks, load {load}", columns, rows)


if __name__ == "__main__":
    main()
