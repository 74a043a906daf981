"""An algorithm of one's own: make the rows a dense tensor and all-reduce that.

Beside the values travels a mark of which rows are there: a sum of zero is a row, and min, max and
prod need to tell a missing row from a zero. Missing rows hold the neutral element (-0.0 for sums),
so that every row that is there has exactly the bits its own values give.

weft has `mask`, which does the same without the rows that are nobody's: so this one is quickest
nowhere, and is an example. It is what frameworks do whose sparse gradients are made dense.

    python examples/dense_algorithm/dense.py
"""

import torch

import weft
from weft import kernels


def cost(load):
    """A ring all-reduce of the marks, and one of the table: 2 (P - 1) / P of their bytes."""
    steps, nbytes = 2 * (load.ranks - 1), load.height * (load.partial + 1)
    return weft.sparse.Cost(
        rounds=2 * steps,
        messages=2 * steps,
        bytes=steps / load.ranks * nbytes,
        merged=3 * load.height * load.partial + load.merging(load.union + load.mean),
        memory=nbytes,
    )


def applies(load):
    """None, or why it cannot serve a load."""
    if load.in_order:
        return "op is a function, which has no neutral element"
    if load.height > max(1 << 20, 64 * load.total):
        return "the dense tensor is more than 64 times all rows"
    return None


@weft.algorithm(cost=cost, applies=applies)
def dense(rows, call):
    """One rank's program: its canonical rows in, the canonical sum out."""
    wire, height, indices = call.wire, call.load.height, rows.indices.long()

    there = torch.zeros(height, dtype=torch.uint8)
    there[indices] = 1
    wire.dense_all_reduce(there, "bor").wait()
    union = there.nonzero().view(-1)

    table = torch.full((height, *call.row_shape), call.op.neutral(call.partial), dtype=call.partial)
    table[indices] = rows.values.to(call.partial)
    if table.numel():
        wire.dense_all_reduce(table, "sum" if call.op.mean else call.op.name).wait()

    result = call.result(len(union))  # where the caller wants it
    result.indices.copy_(union)
    kernels.finish(table[union], result.values, call.divisor)  # divides for avg, rounds once
    return result


def main():
    with weft.init() as wire:
        mine = weft.Rows(torch.tensor([wire.rank, 9]), torch.ones(2, 4), height=10)
        total = weft.sparse_all_reduce(mine, algorithm="dense")
        other = weft.sparse_all_reduce(mine, algorithm="gather")
        if not (total.indices.equal(other.indices) and total.values.equal(other.values)):
            raise SystemExit(f"FAILED: rank {wire.rank}: {total} is not {other}")
        if wire.rank == 0:
            print(f"{len(total)} rows, the last is {total.values[-1].tolist()}")
            print(weft.explain(mine))
        else:
            weft.explain(mine)  # every rank takes part


if __name__ == "__main__":
    main()
