"""An algorithm of one's own: make the rows a dense tensor and all-reduce that.

With the values it sends marks of the rows that are present. A sum of zero is a row, and min, max
and prod must tell a missing row from a row of zeros. Missing rows hold the neutral element (-0.0
for sums), so each row of the result has exactly the bits of its values' reduction.

It is an example of an algorithm, and it is the fastest nowhere: weft's `mask` does the same without
the rows that no rank has. Frameworks that make sparse gradients dense do what it does.

    python examples/dense_algorithm/dense.py
"""

import torch

import weft
from weft import kernels
from weft.schedules import dense_all_reduce


def traffic(sizes, union):
    """Two ring all-reduces, of the marks and of the table: 2 (P - 1) / P of their bytes."""
    steps = 2 * (sizes.ranks - 1)
    nbytes = sizes.height * (sizes.partial + 1)
    return weft.sparse.Traffic(2 * steps, 2 * steps, steps / sizes.ranks * nbytes)


def applies(sizes):
    """Why the algorithm cannot serve a call, or None."""
    if sizes.in_order:
        return "op is a function, which has no neutral element"
    if sizes.height > max(1 << 20, 64 * sizes.total):
        return "the dense tensor is more than 64 times all rows"
    return None


@weft.algorithm(applies=applies, traffic=traffic)
def dense(rows, call):
    """One rank's program: it takes this rank's canonical rows and returns the canonical sum."""
    group, height, indices = call.group, call.sizes.height, rows.indices.long()

    there = torch.zeros(height, dtype=torch.uint8)
    there[indices] = 1
    dense_all_reduce(group, there, "bor").wait()
    union = there.nonzero().view(-1)

    table = torch.full((height, *call.row_shape), call.op.neutral(call.partial), dtype=call.partial)
    table[indices] = rows.values.to(call.partial)
    if table.numel():
        dense_all_reduce(group, table, "sum" if call.op.mean else call.op.name).wait()

    result = call.result(len(union))  # where the caller wants it
    result.indices.copy_(union)
    kernels.finish(table[union], result.values, call.divisor)  # divides for avg, rounds once
    return result


def main():
    with weft.init() as group:
        mine = weft.Rows(torch.tensor([group.rank, 9]), torch.ones(2, 4), height=10)
        total = weft.sparse_all_reduce(mine, algorithm="dense")
        other = weft.sparse_all_reduce(mine, algorithm="gather")
        if not (total.indices.equal(other.indices) and total.values.equal(other.values)):
            raise SystemExit(f"FAILED: rank {group.rank}: {total} is not {other}")
        if group.rank == 0:
            print(f"{len(total)} rows, the last is {total.values[-1].tolist()}")
            print(weft.explain(mine))
        else:
            weft.explain(mine)  # every rank takes part


if __name__ == "__main__":
    main()
