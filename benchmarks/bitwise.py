"""Measures whether an image's features have the same bits alone and in batches of one size.

    python -m benchmarks.bitwise
    python -m benchmarks.bitwise --archs svt_small --size 800x1344 --batch 4 --threads 1 8

Each backbone runs with the package's fast operations, with plain operations of PyTorch, and in
onnxruntime and OpenVINO, in batches of 2, 3 and so on. The processor times of an image alone and in
the largest batch show the price of running images one by one, which gives the same bits everywhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from cpvt_pyramid.tooling.command import (
    UserError,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.tooling.report import markdown_table

prepare_for_torch()  # before torch is imported

with imports_of('bitwise'):
    import torch
    from torch import Tensor, nn
    from tqdm import tqdm

    from benchmarks.measuring import least_seconds, parse_size
    from benchmarks.runtimes import InRuntime, exported
    from cpvt_pyramid import ARCHS, CPVTPyramid
    from cpvt_pyramid.ops.dispatch import plain

PATHS = ('fast operations', 'plain operations', 'onnxruntime', 'openvino')
HEAD = (
    'model',
    'path',
    'threads',
    'same bits in batches of',
    'largest relative difference',
    'processor ms per image: alone',
    'in the largest batch',
)


class Row(NamedTuple):
    """A model on a path."""

    arch: str
    path: str
    threads: int
    same_bits: list[int]  # the sizes of batches
    relative: float  # the largest difference / the largest value of a map
    alone: float  # milliseconds of processor time per image
    together: float

    def cells(self, batch: int) -> list[str]:
        if len(self.same_bits) == batch - 1:
            sizes = f'2 to {batch}'
        else:
            sizes = ', '.join(map(str, self.same_bits)) or 'none'
        times = f'{self.alone:.1f}', f'{self.together:.1f}'
        return [self.arch, self.path, str(self.threads), sizes, f'{self.relative:.1g}', *times]


@torch.no_grad()
def measure(model: Callable[[Tensor], Sequence[Tensor]], images: Tensor) -> tuple:
    """The fields of a `Row` after `threads`."""
    alone = [model(image[None]) for image in images]
    same_bits = []
    relative = 0.0
    for count in range(2, len(images) + 1):
        differences = [0.0]
        is_same = True
        for level, maps in enumerate(model(images[:count])):
            for row, found in enumerate(maps):
                expected = alone[row][level][0]
                is_same = is_same and torch.equal(found, expected)
                largest = (found - expected).abs().max() / expected.abs().max()
                differences.append(float(largest))
        if is_same:
            same_bits.append(count)
        relative = max(relative, *differences)
    one_by_one = least_seconds(lambda: [model(image[None]) for image in images], time.process_time)
    together = least_seconds(lambda: model(images), time.process_time)
    milliseconds = 1000 / len(images)  # per image
    return same_bits, relative, milliseconds * one_by_one, milliseconds * together


def paths_of(model: nn.Module, file: bytes) -> Iterator[tuple[str, nn.Module]]:
    """A backbone, which is also exported to a file, on each path."""
    yield PATHS[0], model
    yield PATHS[1], model
    for path in PATHS[2:]:
        yield path, InRuntime(lambda _: file, path, True)


def bitwise(
    *,
    archs: Sequence[str] = ('pcpvt_nano', 'pcpvt_small'),
    size: str = '128x160',
    batch: int = 8,
    threads: Sequence[int] = (1, 2),
) -> None:
    """Measure, and print a table.

    Args:
        archs: backbones, with random weights.
        size: of the images, in pixels, as SIDE or HEIGHTxWIDTH.
        batch: images of the largest batch.
        threads: numbers of threads.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise UserError(f'unknown arch {arch!r}; one of {", ".join(ARCHS)}')
    height, width = parse_size(size)
    rows = []
    bar = tqdm(total=len(archs) * len(PATHS) * len(threads), disable=None)
    for arch in archs:
        torch.manual_seed(0)
        images = torch.randn(batch, 3, height, width)
        backbone = CPVTPyramid(arch).eval()
        file = exported(backbone, None)  # for all sizes
        for count in threads:
            torch.set_num_threads(count)
            for path, model in paths_of(backbone, file):
                with plain() if path == PATHS[1] else nullcontext():
                    rows.append(Row(arch, path, count, *measure(model, images)))
                bar.update()
    bar.close()
    print(markdown_table(HEAD, [row.cells(batch) for row in rows]))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(bitwise, argv)


if __name__ == '__main__':
    sys.exit(main())
