"""A program as people wrote them for DistDL: a small network on four workers, one training step.

Its imports are weft's, and so is the arithmetic of cuts. The images lie on one worker, are cut into
2 x 2 for a convolution with halo exchange, then along channels, then along features for a linear
layer whose weight is cut 2 x 2; the loss is on the first worker. Test cases run it and
`sequential`, which has everything.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from weft.compat.distdl import (
    AllSumReduce,
    Broadcast,
    HaloExchange,
    MPIPartition,
    Repartition,
    SumReduce,
    zero_volume_tensor,
)
from weft.nn import ZeroVolumeCorrector

BATCH, CHANNELS, HEIGHT, WIDTH, OUT = 3, 4, 9, 8, 5
KERNEL, STRIDE = [3, 3], [2, 1]


def data():
    seed = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=seed, dtype=torch.float64)

    return {
        "images": draw(BATCH, 1, HEIGHT, WIDTH),
        "targets": draw(BATCH, OUT),
        "conv": draw(CHANNELS, 1, *KERNEL),
        "linear": draw(OUT, CHANNELS * 4 * 6),
        "bias": draw(OUT),
    }


def sequential():
    """Loss, and the gradients of all weights and of the images."""
    all_of = {name: value.requires_grad_() for name, value in data().items()}
    x = F.relu(F.conv2d(all_of["images"], all_of["conv"], stride=STRIDE))
    y = F.linear(x.flatten(1), all_of["linear"], all_of["bias"])
    loss = ((y - all_of["targets"].detach()) ** 2).mean()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in all_of.items()}


class FeatureConv(torch.nn.Module):
    """Its weight lies on the first worker; the images are cut along height and width."""

    def __init__(self, P_x, P_root, weight, kernel_size, stride):
        super().__init__()
        self.P_x, self.kernel_size, self.stride = P_x, kernel_size, stride
        self.weight = torch.nn.Parameter(weight) if P_root.active else zero_volume_tensor()
        self.w_broadcast = Broadcast(P_root, P_x, preserve_batch=False)

    def forward(self, input, global_shape):
        halo, read = self.halo_of(global_shape)
        x = F.pad(input, [width for pair in halo[::-1] for width in pair])
        x = HaloExchange(self.P_x, [(0, 0), (0, 0), *halo])(x)[:, :, *read]
        return F.conv2d(x, self.w_broadcast(self.weight), stride=self.stride)

    def halo_of(self, global_shape):
        """What this worker reads of its neighbours, and where that is in its part with it."""
        grid = self.P_x.grid
        out = [(n - k) // s + 1 for n, k, s in zip(global_shape[2:], KERNEL, STRIDE, strict=True)]
        own, made = (grid.box(shape).slices[2:] for shape in (global_shape, (1, 1, *out)))
        halo, read = [], []
        for mine, there, k, s in zip(own, made, KERNEL, STRIDE, strict=True):
            first, last = there.start * s, (there.stop - 1) * s + k
            before, after = max(mine.start - first, 0), max(last - mine.stop, 0)
            halo.append((before, after))
            read.append(slice(first - mine.start + before, last - mine.start + before))
        return halo, read


class Linear(torch.nn.Module):
    """Its weight is cut in both dimensions; the first column of workers has the bias."""

    def __init__(self, P_x, P_y, P_w, weight, bias):
        super().__init__()
        self.P_w = P_w
        self.x_broadcast = Broadcast(P_x, P_w, preserve_batch=True)
        self.y_sum_reduce = SumReduce(P_w, P_y, transpose_src=True, preserve_batch=True)
        if P_w.active:
            part = P_w.grid.box(weight.shape).slices
            self.weight = torch.nn.Parameter(weight[part].clone())
            self.bias = None
            if P_w.index[1] == 0:
                self.bias = torch.nn.Parameter(bias[part[0]].clone())

    def forward(self, input):
        x = self.x_broadcast(input)
        if self.P_w.active:
            x = F.linear(x, self.weight, self.bias)
        return self.y_sum_reduce(x)


def main():
    """The first worker's loss, and each worker's gradients of its weights and of its images."""
    P_world = MPIPartition()
    P_world._comm.Barrier()
    P_base = P_world.create_partition_inclusive(np.arange(4))
    P_0 = P_base.create_partition_inclusive([0])
    P_root = P_0.create_cartesian_topology_partition([1, 1, 1, 1])
    P_root_2d = P_0.create_cartesian_topology_partition([1, 1])
    P_lo = P_base.create_partition_inclusive(np.arange(0, 2))
    P_hi = P_base.create_partition_inclusive(np.arange(2, 4))
    P_conv = P_base.create_cartesian_topology_partition([1, 1, 2, 2])
    P_flat = P_base.create_cartesian_topology_partition([1, 4, 1, 1])
    P_flat_2d = P_base.create_cartesian_topology_partition([1, 4])
    P_fc_in = P_lo.create_cartesian_topology_partition([1, 2])
    P_fc_out = P_hi.create_cartesian_topology_partition([1, 2])
    P_fc_mtx = P_base.create_cartesian_topology_partition([2, 2])

    all_of = data()
    scatter = Repartition(P_root, P_conv)
    conv = FeatureConv(P_conv, P_root, all_of["conv"], KERNEL, STRIDE)
    to_channels = Repartition(P_conv, P_flat)
    to_features = Repartition(P_flat_2d, P_fc_in)
    linear = Linear(P_fc_in, P_fc_out, P_fc_mtx, all_of["linear"], all_of["bias"])
    gather = Repartition(P_fc_out, P_root_2d)

    x = images = zero_volume_tensor(BATCH, dtype=torch.float64)
    if P_root.active:
        x = images = all_of["images"].requires_grad_()
    if P_conv.active:
        x = F.relu(conv(scatter(x), all_of["images"].shape))
        x = to_channels(x)
        x = x.view(x.size(0), -1)
    y = gather(linear(to_features(x)))
    loss = ((y - all_of["targets"]) ** 2).mean() if P_root.active else ZeroVolumeCorrector()(y)
    loss.backward()
    if P_fc_mtx.active:  # all workers of a row of the weight's grid have the same bias
        told = AllSumReduce(P_fc_mtx, axes_reduce=(1,))
        assert told(torch.ones(1)).item() == 2

    found = {name: parameter.grad for name, parameter in conv.named_parameters()}
    found |= {f"linear.{name}": each.grad for name, each in linear.named_parameters()}
    found["images"] = images.grad
    return loss.item(), P_fc_mtx.index, found


if __name__ == "__main__":
    loss, index, found = main()
    print(index, loss, {name: None if g is None else tuple(g.shape) for name, g in found.items()})
