"""A convolution network on images that are cut in a 2 x 2 grid, equal to the whole network.

Each rank has a quarter of every image, and of everything that is computed from it. Before a
convolution, HaloExchange brings the adjacent pixels that the kernel needs, and the rank convolves
without padding. The weights are on the first rank only: Broadcast copies them to the others, and
its adjoint sums their gradients. SumReduce sums the ranks' parts of the mean over all pixels; its
adjoint copies the gradient to them.

The task is to tell which letter an image shows, in the fonts of matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from torch import Tensor, nn
from torch.nn import functional

import weft

HEIGHT, WIDTH = 30, 26  # in 2 x 2 parts of even lengths: (16, 14) by (14, 12)
LETTERS = "aegknqsR"
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono-Oblique")
CHANNELS = (1, 6, 8)
KERNELS = (5, 3)


class Whole(nn.Module):
    """The network in one process, by torch alone."""

    def __init__(self) -> None:
        super().__init__()
        sizes = zip(CHANNELS, CHANNELS[1:], KERNELS, strict=False)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, kernel, padding=kernel // 2, dtype=torch.float64)
            for a, b, kernel in sizes
        )
        self.head = nn.Linear(CHANNELS[-1], len(LETTERS), dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)  # the same whoever makes it
        for each in self.parameters():
            nn.init.uniform_(each, -0.3, 0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.convolutions
        x = functional.max_pool2d(first(x).relu(), 2)
        x = second(x).relu()
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class Parted(nn.Module):
    """The same network on a grid; its parameters are on the grid's first rank."""

    def __init__(self, grid: weft.Partition) -> None:
        super().__init__()
        self.grid = grid
        nothing = weft.nn.zero_volume_tensor(dtype=torch.float64)
        self.names = []
        for name, value in Whole().named_parameters():
            mine = value.detach() if grid.rank == grid.ranks[0] else nothing
            self.register_parameter(name.replace(".", "_"), nn.Parameter(mine.clone()))
            self.names.append(name)
        self.broadcast = weft.nn.Broadcast(grid, (2, 3))
        self.halos = nn.ModuleList(
            weft.nn.HaloExchange(grid, (0, 0, kernel // 2, kernel // 2)) for kernel in KERNELS
        )
        self.sum = weft.nn.SumReduce(grid, (2, 3))

    def parameter(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "_"))

    def convolve(self, x: Tensor, number: int) -> Tensor:
        weight = self.broadcast(self.parameter(f"convolutions.{number}.weight"))
        bias = self.broadcast(self.parameter(f"convolutions.{number}.bias"))
        return functional.conv2d(self.halos[number](x), weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """The logits on the first rank, a tensor without elements on the others."""
        x = functional.max_pool2d(self.convolve(x, 0).relu(), 2)  # shards are even: none is torn
        x = self.convolve(x, 1).relu()
        total = self.sum(x.sum((2, 3), keepdim=True))
        if not total.numel():
            return total
        mean = total.flatten(1) / (HEIGHT // 2 * (WIDTH // 2))
        return functional.linear(mean, self.parameter("head.weight"), self.parameter("head.bias"))


def images() -> tuple[Tensor, Tensor]:
    """The letters in all fonts, [number, 1, HEIGHT, WIDTH], and which they are."""
    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    found, labels = [], []
    for name in FONTS:
        font = FT2Font(str(folder / f"{name}.ttf"))
        font.set_size(20, 72)
        for label, letter in enumerate(LETTERS):
            font.set_text(letter)
            font.draw_glyphs_to_bitmap()
            glyph = np.asarray(font.get_image(), dtype=np.float64) / 255
            canvas = np.zeros((HEIGHT, WIDTH))
            top, left = (HEIGHT - glyph.shape[0]) // 2, (WIDTH - glyph.shape[1]) // 2
            canvas[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph
            found.append(torch.from_numpy(canvas)[None])
            labels.append(label)
    return torch.stack(found), torch.tensor(labels)


def lengths(grid: weft.Partition, count: int) -> list[tuple[int, ...]]:
    """How images are cut: balanced in pairs of pixels, so that no pooled pair is torn."""
    halves = weft.nn.grid.balanced(HEIGHT // 2, grid.shape[2])
    columns = weft.nn.grid.balanced(WIDTH // 2, grid.shape[3])
    return [(count,), (1,), tuple(2 * n for n in halves), tuple(2 * n for n in columns)]


def compare(grid: weft.Partition) -> dict[str, float]:
    """Run both networks; returns the loss and how far outputs and gradients are apart.

    Raises:
        SystemExit: they differ by more than rounding.
    """
    torch.set_num_threads(1)
    x, labels = images()
    x.requires_grad_()
    first = weft.Partition((1, 1, 1, 1), ranks=grid.ranks[:1], group=grid.group)
    cut = weft.nn.Repartition(first, grid, lengths=lengths(grid, len(x)))
    join = weft.nn.Repartition(grid, first)
    root = grid.rank == first.ranks[0]

    model = Parted(grid)
    part = cut(x if root else weft.nn.zero_volume_tensor(dtype=x.dtype))
    part = part.detach().requires_grad_()  # each rank holds its part of the images
    logits = model(part)
    loss = functional.cross_entropy(logits, labels) if root else logits
    weft.nn.ZeroVolumeCorrector()(loss).backward()
    of_images = join(part.grad)
    if not root:
        return {}

    whole = Whole()
    expected = whole(x)
    functional.cross_entropy(expected, labels).backward()
    apart = {"logits": logits - expected, "images": of_images - x.grad}
    for name in model.names:
        apart[name] = model.parameter(name).grad - whole.get_parameter(name).grad
    worst = {name: float(each.detach().abs().max()) for name, each in apart.items()}
    for name, most in worst.items():
        if not most < 1e-12:
            raise SystemExit(f"FAILED: {name} or its gradient differs by {most:g}")
    return {"loss": loss.item(), "apart": max(worst.values()), "compared": len(worst)}


def drawn(grid: weft.Partition) -> str:
    """What the first convolution needs of the images, as a text."""
    halo = Parted(grid).halos[0]
    cuts = weft.nn.grid.boxes(lengths(grid, len(LETTERS) * len(FONTS)))
    shapes = {rank: box.shape for rank, box in zip(grid.ranks, cuts, strict=True)}
    return halo.plan(shapes).draw()


def grid_of(size: int) -> weft.Partition:
    """2 x 2 where there are four ranks, else as much of that as there is."""
    rows, columns = {1: (1, 1), 2: (1, 2), 3: (1, 2)}.get(size, (2, 2))
    return weft.Partition((1, 1, rows, columns))


def main() -> None:
    parser = argparse.ArgumentParser(description="a convolution network on images in parts")
    parser.add_argument("--picture", action="store_true", help="draw who holds what")
    options = parser.parse_args()
    with weft.init() as group:
        grid = grid_of(group.size)
        if not grid.active:
            return
        found = compare(grid)
        if found:
            if options.picture:
                print(drawn(grid))
            print(
                f"{grid.shape[2]} x {grid.shape[3]} ranks: loss {found['loss']:.6f}, logits and "
                f"{found['compared'] - 1:.0f} gradients within {found['apart']:.1e} of one process"
            )
            print("PASSED")


if __name__ == "__main__":
    main()
