"""Measures how much an image's features change when it is batched with a larger image.

    python -m benchmarks.batch_drift
    python -m benchmarks.batch_drift --images small.jpg large.jpg --out drift.png
    python -m benchmarks.batch_drift --archs pcpvt_small --strides 8 32 \
      --backbones cpvt_pyramid timm mmseg

All backbones have the same weights: ours with and without the images' true sizes, and the ports in
timm, mmsegmentation and mmdetection. An image alone is padded to the multiple that the model needs;
in the batch, to the larger image. The drift of a feature vector is the norm of its change relative
to the mean norm of the map's vectors. Only positions inside the image count. family_drift.py
measures whole detectors and segmentors.
"""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from cpvt_pyramid.app.tooling.command import (
    UserError,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.app.tooling.files import atomic_write, make_folder, write_text
from cpvt_pyramid.app.tooling.report import text_table

prepare_for_torch()  # before torch is imported

with imports_of('batch_drift'):
    import matplotlib.pyplot as plt
    import numpy as np
    import torch
    import torch.nn.functional as F
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from skimage import data
    from torch import Tensor, nn
    from tqdm import tqdm

    from cpvt_pyramid import ARCHS, CPVTPyramid, load_weights
    from cpvt_pyramid.app.images.reading import read_image
    from cpvt_pyramid.padding.batching import ceil_div, padded_size
    from tests.models import ports

MEASURED = ('pcpvt_small', 'svt_small', 'pvt_small')
BACKBONES = ('cpvt_pyramid', 'cpvt_pyramid, unmasked', 'timm', 'mmseg', 'mmdet')
STRIDES = (4, 8, 16, 32)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, RGB
MULTIPLE = 32  # other libraries' backbones take images whose sides are multiples of it, in pixels
COLOR_RANGE = (1e-5, 1.0)  # drift at the ends of the color scale
COLOR_MAP = 'YlOrRd'


class Backbone(NamedTuple):
    """A pyramid, and how to call it."""

    library: str  # its name in the table
    multiple: int  # an image alone is padded to multiples of it, in pixels
    maps: Callable[[Tensor, Tensor], Sequence[Tensor]]  # takes (B, 3, H, W) and true sizes (B, 2)


def batch_drift(
    *,
    images: Sequence[str] = (),
    archs: Sequence[Literal[tuple(ARCHS)]] = MEASURED,
    backbones: Sequence[Literal[BACKBONES]] = BACKBONES,
    strides: Sequence[Literal[STRIDES]] = STRIDES,
    weights: Sequence[str] = (),
    out: str = 'batch_drift.png',
    json: str | None = None,
) -> None:
    """Print the table and draw the heat maps.

    Args:
        images: files of an image and of a larger one; by default two photographs from scikit-image
        archs: architectures, each measured in every library that has it
        backbones: rows of the table and the picture
        strides: columns of the picture
        weights: checkpoints of backbones, as ARCH=FILE; without one, weights are random
        out: the picture, a .png file
        json: also write the numbers to this file
    """
    files = dict(text.partition('=')[::2] for text in weights)
    for arch, path in files.items():
        if arch not in archs or not path:
            raise UserError(f'--weights must be ARCH=FILE with one of {", ".join(archs)}')
    for path in filter(None, (out, json)):
        make_folder(Path(path).parent)
        if Path(path).exists():
            raise UserError(f'{path} already exists; remove it or name another file')
    if Path(out).suffix != '.png':
        raise UserError(f'--out must end in .png, got {out}')
    small, large = read_images(images)

    heats = {}
    for arch in archs:
        chosen = [b for b in backbones_of(arch, files.get(arch)) if b.library in backbones]
        for backbone in tqdm(chosen, arch, leave=False, disable=None):
            heats[arch, backbone.library] = heat_maps(backbone, small, large)
    results = {
        'images': [image.shape[:2] for image in (small, large)],
        'features': [
            {
                'arch': arch,
                'library': library,
                'max': {s: float(heat.max()) for s, heat in zip(STRIDES, maps)},
                'mean': {s: float(heat.mean()) for s, heat in zip(STRIDES, maps)},
            }
            for (arch, library), maps in heats.items()
        ],
    }
    print(features_table(results['features']))
    draw(heats, small, large, strides, Path(out))
    print(f'\n{out}')
    if json:
        write_text(json, json_format.dumps(results, indent=1) + '\n')


# Images, (H, W, 3) BGR uint8 as mm reads them


def read_images(paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The image and the larger image."""
    if not paths:
        return data.chelsea()[..., ::-1].copy(), data.astronaut()[..., ::-1].copy()
    if len(paths) != 2:
        raise UserError(f'--images must be two files, the second image larger; got {len(paths)}')
    try:
        small, large = (read_image(path)[..., ::-1].copy() for path in paths)
    except OSError as error:
        raise UserError(f'cannot read {" and ".join(paths)}: {error}') from error
    if (np.array(small.shape) >= large.shape)[:2].all():
        raise UserError(f'{paths[1]} must be larger than {paths[0]}; else nothing is padded')
    return small, large


def normed(image: np.ndarray) -> Tensor:
    """(3, H, W), as a data preprocessor passes it to a backbone."""
    image = torch.from_numpy(image[..., ::-1].copy()).float()
    return ((image - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)


# Backbones


def backbones_of(arch: str, checkpoint: str | None) -> list[Backbone]:
    """An architecture in every library that has it, with the same weights."""
    ours = ports.randomize(CPVTPyramid(arch)).eval()
    if checkpoint:
        try:
            load_weights(ours, checkpoint)
        except (OSError, ValueError) as error:
            raise UserError(str(error)) from error
    found = [Backbone('cpvt_pyramid', 1, ours), without_sizes('cpvt_pyramid, unmasked', 1, ours)]
    for library in ports.ports_of(arch):
        model = ports.build(library, arch, ours.state_dict())
        found.append(without_sizes(library, MULTIPLE, model))
    return found


def without_sizes(library: str, multiple: int, model: nn.Module) -> Backbone:
    return Backbone(library, multiple, lambda image, _: model(image))


def heat_maps(backbone: Backbone, small: np.ndarray, large: np.ndarray) -> list[np.ndarray]:
    """The relative drift of the small image's features at each stride, (h, w)."""
    images = normed(small), normed(large)
    with torch.no_grad():
        apart = backbone.maps(*padded(images[:1], backbone.multiple))
        together = backbone.maps(*padded(images, backbone.multiple))
    heats = []
    for alone, joint, stride in zip(apart, together, STRIDES):
        height, width = (ceil_div(side, stride) for side in small.shape[:2])
        alone, joint = alone[0, :, :height, :width], joint[0, :, :height, :width]
        heat = (joint - alone).norm(dim=0) / alone.norm(dim=0).mean()
        heats.append(heat.numpy())
    return heats


def padded(images: Sequence[Tensor], multiple: int) -> tuple[Tensor, Tensor]:
    """A batch of images (3, H, W), padded to the next multiple, and their sizes."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = padded_size(sizes.max(0)[0].tolist(), multiple)
    batch = [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images]
    return torch.stack(batch), sizes


# Table and picture


def features_table(rows: Sequence[dict]) -> str:
    """Maximum and mean drift of the features at each stride."""
    lines = []
    for row in rows:
        cells = [f'{row["max"][s]:.0e} ({row["mean"][s]:.0e})' for s in STRIDES]
        lines.append([row['arch'], row['library'], *cells])
    head = ['arch', 'backbone', *(f'stride {s}: max (mean)' for s in STRIDES)]
    return text_table(head, lines)


def draw(
    heats: dict[tuple[str, str], list[np.ndarray]],
    small: np.ndarray,
    large: np.ndarray,
    strides: Sequence[int],
    out: Path,
) -> None:
    """Draw the image alone and in its batch, and below them a row of drifts for each backbone, over
    the image."""
    small, large = (image[..., ::-1] for image in (small, large))
    height, width = (max(sides) for sides in zip(small.shape[:2], large.shape[:2]))
    batch = np.full((height, 2 * width + 8, 3), 255, dtype=np.uint8)
    batch[:, :width] = 0
    batch[: small.shape[0], : small.shape[1]] = small
    batch[: large.shape[0], width + 8 : width + 8 + large.shape[1]] = large

    wide = 2.4  # inches, of a map
    high = wide * small.shape[0] / small.shape[1]
    size = (1.9 + wide * len(strides), (high + 0.4) * len(heats) + 1.6 * high + 1.2)
    figure = plt.figure(figsize=size, layout='constrained')
    top, body = figure.subfigures(
        2, 1, height_ratios=[1.6 * high + 0.3, size[1] - 1.6 * high - 0.3]
    )
    for ax, image, title in zip(
        top.subplots(1, 2, width_ratios=[1, 2]),
        (small, batch),
        ('image alone', 'in a batch, padded to the larger image'),
    ):
        ax.imshow(image)
        ax.set_title(title, fontsize=15)
        ax.axis('off')
    axes = body.subplots(len(heats), len(strides), squeeze=False)
    for row, ((arch, library), maps) in zip(axes, heats.items()):
        row[0].set_ylabel(f'{library}\n{arch}', rotation=0, ha='right', va='center', fontsize=14)
        for ax, stride in zip(row, strides):
            heat = maps[STRIDES.index(stride)]
            draw_over(ax, small, heat, stride)
            ax.set_xlabel(f'largest change {heat.max():.1g}', fontsize=13, labelpad=3)
    for ax, stride in zip(axes[0], strides):
        ax.set_title(f'stride {stride}', fontsize=15)
    shown = ScalarMappable(LogNorm(*COLOR_RANGE), COLOR_MAP)
    bar = body.colorbar(shown, ax=axes, location='bottom', fraction=0.02, aspect=50, pad=0.02)
    bar.set_label('relative change of the features in the batch', fontsize=14)
    with atomic_write(out, '.png') as draft:
        figure.savefig(draft, dpi=100)
    plt.close(figure)


def draw_over(ax: Axes, image: np.ndarray, heat: np.ndarray, stride: int) -> None:
    """Draw the drift of a map over its image in gray: the color is that of the drift, and the more,
    the less of the image shows."""
    gray = image.mean(-1)
    rows, columns = heat.shape
    extent = (0, columns * stride, rows * stride, 0)
    share = LogNorm(*COLOR_RANGE)(heat.clip(*COLOR_RANGE)).clip(0, 1)
    ax.imshow(gray, cmap='gray', vmin=0, vmax=255)
    colors = plt.get_cmap(COLOR_MAP)(share)
    colors[..., 3] = 0.9 * share
    ax.imshow(colors, extent=extent, interpolation='nearest')
    ax.set(xticks=[], yticks=[], xlim=(0, image.shape[1]), ylim=(image.shape[0], 0))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(batch_drift, argv)


if __name__ == '__main__':
    sys.exit(main())
