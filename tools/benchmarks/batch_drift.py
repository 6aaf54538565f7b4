#!/usr/bin/env python
"""Measures how far an image's features move when it is batched with a larger image.

    python tools/benchmarks/batch_drift.py
    python tools/benchmarks/batch_drift.py small.jpg large.jpg --out drift.png --json drift.json

Side by side, with the same weights: this backbone, with the valid region and without, timm's,
mmsegmentation's and mmdetection's; then the boxes of a detector and the label map of a segmentor.
An image alone is padded to the multiple that the model needs, in a batch to the larger image.
Features are compared where there is image. Their drift at a position is the length of the change
as a share of the mean length of all the image's features on that map.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run from a checkout, uninstalled

MEASURED = ('pcpvt_small', 'svt_small', 'pvt_small')
WHOLES = [str(ROOT / f'configs/{name}_cpvt_s.py') for name in ('retinanet', 'semantic_fpn')]
STRIDES = (4, 8, 16, 32)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # RGB, those of ImageNet
MULTIPLE = 32  # that other libraries' backbones want both sides of an image to be, in pixels
COLORS = (1e-6, 1.0)  # drift at the two ends of the colours


class Backbone(NamedTuple):
    """A pyramid of some library, and how it wants to be called."""

    library: str  # as the table names it
    multiple: int  # of pixels, to which an image alone is padded
    maps: Callable[[Tensor, Tensor], Sequence[Tensor]]  # of (B, 3, H, W) and true sizes (B, 2)


def batch_drift(
    images: Sequence[str] = (),
    archs: Sequence[str] = MEASURED,
    weights: Sequence[str] = (),
    models: Sequence[str] = WHOLES,
    score_thr: float = 0.05,
    out: str = 'batch_drift.png',
    json_file: str | None = None,
) -> None:
    """Print the tables, draw the heat map and write the numbers.

    Args:
        images: files of an image and a larger one; none: two photographs of scikit-image.
        archs: names from `ARCHS`, each measured in every library that has it.
        weights: `ARCH=FILE`, checkpoints of backbones; without, they are random but not tiny.
        models: `CONFIG` or `CONFIG=CHECKPOINT`, of detectors and segmentors.
        score_thr: boxes that score less do not count.
        out: the picture.
        json_file: where the numbers go, with the keys `images`, `features` and `models`.
    """
    from cpvt_pyramid import ARCHS as known
    from cpvt_pyramid.runner.launch import UserError, make_folder

    for arch in archs:
        if arch not in known:
            raise UserError(f'unknown arch {arch!r}; one of {", ".join(known)}')
    files = dict(text.partition('=')[::2] for text in weights)
    for arch, path in files.items():
        if arch not in archs or not path:
            raise UserError(f'--weights takes ARCH=FILE with one of {", ".join(archs)}')
    for path in filter(None, (out, json_file)):
        make_folder(Path(path).parent)
        if Path(path).exists():
            raise UserError(f'{path} is there already')
    if Path(out).suffix != '.png':
        raise UserError(f'--out {out}: the picture is a .png')
    small, large = read_images(images)
    wholes = [read_model(text) for text in models]

    heats = {}
    for arch in archs:
        for backbone in progress(backbones(arch, files.get(arch)), arch):
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
        'models': [],
    }
    print(features_table(results['features']))
    for model in progress(wholes, 'models'):
        results['models'] += model_drifts(model, small, large, score_thr)
    if wholes:
        print(f'\n{models_table(results["models"], score_thr)}')
    draw(heats, small, large, Path(out))
    print(f'\n{out}')
    if json_file:
        Path(json_file).write_text(json.dumps(results, indent=1) + '\n')


# Images, (H, W, 3) BGR uint8 as mm reads them


def read_images(paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The image and the larger one."""
    import numpy as np
    from skimage import data

    from cpvt_pyramid.runner.launch import UserError
    from cpvt_pyramid.runner.prediction import read_image

    if not paths:
        return data.chelsea()[..., ::-1].copy(), data.astronaut()[..., ::-1].copy()
    if len(paths) != 2:
        raise UserError(f'{len(paths)} images; give two, the second one larger, or none')
    try:
        small, large = (read_image(path) for path in paths)
    except OSError as error:
        raise UserError(f'cannot read {" and ".join(paths)}: {error}') from error
    if (np.array(small.shape) >= large.shape)[:2].all():
        raise UserError(f'{paths[1]} is not larger than {paths[0]}: beside it nothing is padded')
    return small, large


def normed(image: np.ndarray) -> Tensor:
    """(3, H, W), as a data preprocessor gives it to a backbone."""
    import torch

    image = torch.from_numpy(image[..., ::-1].copy()).float()
    return ((image - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)


# Backbones


def backbones(arch: str, checkpoint: str | None) -> list[Backbone]:
    """An architecture in every library that has it, with one set of weights."""
    import mmdet.models.backbones as mmdet
    import mmseg.models.backbones as mmseg
    from timm.models.twins import Twins
    from torch.nn import Identity

    from cpvt_pyramid import ARCHS, CPVTPyramid, load_weights
    from cpvt_pyramid.runner.launch import UserError
    from cpvt_pyramid.weights import to_format

    ours = randomize(CPVTPyramid(arch)).eval()
    if checkpoint:
        try:
            load_weights(ours, checkpoint)
        except (OSError, ValueError) as error:
            raise UserError(str(error)) from error
    tensors = ours.state_dict()
    alone = Backbone('cpvt_pyramid', 1, ours)
    blind = Backbone('cpvt_pyramid, unmasked', 1, lambda image, _: ours(image))

    a = ARCHS[arch]
    windows = [a.window] * len(a.dims) if a.window else None
    shape = dict(
        num_heads=list(a.heads), mlp_ratios=list(a.mlp_ratios), sr_ratios=list(a.sr_ratios)
    )
    if a.position == 'learned':
        theirs = mmdet.PyramidVisionTransformer(
            embed_dims=a.dims[0] // a.heads[0], num_layers=list(a.depths), **shape
        )
        theirs.eval().load_state_dict(to_format(tensors, 'mmdet'))
        return [alone, blind, Backbone('mmdet', MULTIPLE, lambda image, _: theirs(image))]

    shape.update(embed_dims=list(a.dims), depths=list(a.depths))
    theirs = (
        mmseg.SVT(windiow_sizes=windows, norm_after_stage=a.stage_norm, qkv_bias=True, **shape)
        if windows
        else mmseg.PCPVT(norm_after_stage=a.stage_norm, qkv_bias=True, **shape)
    )
    theirs.eval().load_state_dict(to_format(tensors, 'mmseg'))
    timm = Twins(num_classes=0, wss=windows, **shape).eval()
    timm.norm = Identity()  # the classifier's; and it has no stage norms
    timm.load_state_dict({k: v for k, v in tensors.items() if not k.startswith('norm_list')})
    return [
        alone,
        blind,
        Backbone('mmseg', MULTIPLE, lambda image, _: theirs(image)),
        Backbone(
            'timm',
            MULTIPLE,
            lambda image, _: timm.forward_intermediates(image, intermediates_only=True),
        ),
    ]


def heat_maps(backbone: Backbone, small: np.ndarray, large: np.ndarray) -> list[np.ndarray]:
    """The drift of the small image's features at each stride: (h, w), as a share."""
    import torch

    images = normed(small), normed(large)
    with torch.no_grad():
        apart = backbone.maps(*padded(images[:1], backbone.multiple))
        together = backbone.maps(*padded(images, backbone.multiple))
    heats = []
    for alone, joint, stride in zip(apart, together, STRIDES):
        height, width = (math.ceil(side / stride) for side in small.shape[:2])
        alone, joint = alone[0, :, :height, :width], joint[0, :, :height, :width]
        heat = (joint - alone).norm(dim=0) / alone.norm(dim=0).mean()
        heats.append(heat.numpy())
    return heats


def padded(images: Sequence[Tensor], multiple: int) -> tuple[Tensor, Tensor]:
    """Images (3, H, W) as a batch of the least size that `multiple` divides, and their sizes."""
    import torch
    import torch.nn.functional as F

    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = (math.ceil(side / multiple) * multiple for side in sizes.max(0)[0].tolist())
    batch = [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images]
    return torch.stack(batch), sizes


def randomize(model: nn.Module) -> nn.Module:
    """The same random weights at each call: large enough that what a position gets from others
    counts, as in a trained model; biases and norms too."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            # In residual branches and tables, half of what keeps the variance.
            gain = 0.5 if 'backbone' in name or not hasattr(model, 'backbone') else 1.0
            value *= gain / (1 if len(parameter) == 1 else math.sqrt(parameter[0].numel()))
        else:
            value = 0.1 * value + (name.endswith('weight'))
        parameter.data.copy_(value)
    return model


# Whole models


class Whole(NamedTuple):
    """A detector or a segmentor as it was asked for."""

    name: str  # of the config
    cfg: Any
    checkpoint: str
    weights: dict | None  # of the checkpoint; None: random


def read_model(text: str) -> Whole:
    """`CONFIG` or `CONFIG=CHECKPOINT`."""
    from cpvt_pyramid.runner import launch

    config, _, checkpoint = text.partition('=')
    cfg = launch.load_config(config)
    cfg.model.backbone.init_cfg = None
    if not str(cfg.model.data_preprocessor.type).startswith('ValidRegion'):
        raise launch.UserError(f'{config}: its data_preprocessor has no valid_region')
    weights = launch.read_checkpoint(checkpoint) if checkpoint else None
    return Whole(Path(config).stem, cfg, checkpoint, weights)


def model_drifts(
    whole: Whole, small: np.ndarray, large: np.ndarray, score_thr: float
) -> list[dict]:
    """How far a detector's boxes or a segmentor's labels move, with padding closed off step by
    step: nowhere, as with mm's own preprocessor; in the backbone; in neck and head, too, where
    the config has convolutions for that.
    """
    from mmengine.registry import MODELS, init_default_scope

    from cpvt_pyramid.runner import launch

    init_default_scope(whole.cfg.default_scope)
    blind = without_convs(whole.cfg.model)
    steps = {'nothing': blind, 'backbone': blind}
    if blind != whole.cfg.model:
        steps['backbone, neck, head'] = whole.cfg.model
    rows = []
    for closed, config in steps.items():
        model = randomize(MODELS.build(config)).eval()
        if whole.weights:
            launch.load_weights(model, whole.weights, whole.checkpoint)
        model.data_preprocessor.valid_region = closed != 'nothing'
        row = {'config': whole.name, 'closed': closed}
        if hasattr(model, 'decode_head'):
            row |= label_drift(model, small, large)
        else:
            row |= box_drift(model, small, large, score_thr)
        rows.append(row)
    return rows


def without_convs(config: Any) -> Any:
    """A model's config with plain convolutions where it has `ValidRegionConv`."""
    if isinstance(config, dict):
        if config.get('type') == 'ValidRegionConv':
            return dict(config, type='Conv2d')
        return type(config)({key: without_convs(value) for key, value in config.items()})
    if isinstance(config, (list, tuple)):
        return type(config)(without_convs(value) for value in config)
    return config


def box_drift(model: nn.Module, small: np.ndarray, large: np.ndarray, score_thr: float) -> dict:
    """Of the boxes in the small image: how many, how many come and go, how far the rest move."""
    from torchvision.ops import box_iou

    alone, joint = (
        found[found.scores >= score_thr]
        for found in (
            predict(model, [small])[0].pred_instances,
            predict(model, [small, large])[0].pred_instances,
        )
    )
    overlap = box_iou(alone.bboxes, joint.bboxes)
    overlap[alone.labels[:, None] != joint.labels] = 0
    pairs = []  # best first, each box once
    for index in overlap.flatten().argsort(descending=True).tolist():
        i, j = divmod(index, len(joint))
        if overlap[i, j] < 0.5:
            break
        if not any(i == a or j == b for a, b in pairs):
            pairs.append((i, j))
    left, right = ([pair[k] for pair in pairs] for k in (0, 1))
    scores = alone.scores[left] - joint.scores[right]
    sides = alone.bboxes[left] - joint.bboxes[right]
    return {
        'boxes': len(alone),
        'vanish': len(alone) - len(pairs),
        'appear': len(joint) - len(pairs),
        'score': float(scores.abs().max()) if pairs else 0.0,
        'pixels': float(sides.abs().max()) if pairs else 0.0,
    }


def label_drift(model: nn.Module, small: np.ndarray, large: np.ndarray) -> dict:
    """The share of the small image's pixels that get another label.

    mmsegmentation tests no images of several sizes at once; padded to the larger one's size, an
    image is as it would be there, because nothing of an image goes into another.
    """
    maps = []
    for image in (small, large):
        size = [
            math.ceil(max(sides) / MULTIPLE) * MULTIPLE for sides in zip(image.shape, small.shape)
        ]
        model.data_preprocessor.test_cfg = {'size': size[:2]}
        maps.append(predict(model, [small])[0].pred_sem_seg.data)
    return {'relabelled': float((maps[0] != maps[1]).float().mean())}


def predict(model: nn.Module, images: Sequence[np.ndarray]) -> list:
    """A detector's or a segmentor's predictions for images in one batch, at their own sizes."""
    import torch
    from mmdet.structures import DetDataSample
    from mmseg.structures import SegDataSample

    kind = SegDataSample if hasattr(model, 'decode_head') else DetDataSample
    samples = []
    for image in images:
        size = image.shape[:2]
        meta = dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0))
        samples.append(kind(metainfo=meta))
    inputs = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    with torch.no_grad():
        return model.test_step({'inputs': inputs, 'data_samples': samples})


# Tables and picture


def features_table(rows: Sequence[dict]) -> str:
    """The features' drift, largest and mean, at each stride."""
    lines = []
    for row in rows:
        cells = [f'{row["max"][s]:.0e} ({row["mean"][s]:.0e})' for s in STRIDES]
        lines.append([row['arch'], row['library'], *cells])
    return table(['arch', 'backbone', *(f'stride {s}: max (mean)' for s in STRIDES)], lines)


def models_table(rows: Sequence[dict], score_thr: float) -> str:
    """What moves in the predictions of whole models."""
    head = [
        'config', 'padding closed off in', f'boxes >= {score_thr:g}', 'vanish', 'appear',
        'max score change', 'max shift, pixels', 'pixels relabelled',
    ]  # fmt: skip
    forms = dict(
        boxes='{}', vanish='{}', appear='{}', score='{:.1e}', pixels='{:.1e}', relabelled='{:.3%}'
    )
    lines = [
        [row['config'], row['closed']]
        + [form.format(row[key]) if key in row else '' for key, form in forms.items()]
        for row in rows
    ]
    return table(head, lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown that is aligned to be read as it is."""
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    rows = [head, ['-' * width for width in widths], *lines]
    return '\n'.join(
        '| ' + ' | '.join(cell.ljust(width) for cell, width in zip(row, widths)) + ' |'
        for row in rows
    )


def draw(
    heats: dict[tuple[str, str], list[np.ndarray]],
    small: np.ndarray,
    large: np.ndarray,
    out: Path,
) -> None:
    """A row of heat maps for each backbone, below the image alone and in its batch."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.colors import LogNorm
    from PIL import Image

    from cpvt_pyramid.runner.resume import appearing_whole

    small, large = (image[..., ::-1] for image in (small, large))
    height, width = (max(sides) for sides in zip(small.shape[:2], large.shape[:2]))
    batch = np.full((height, 2 * width + 8, 3), 255, dtype=np.uint8)
    batch[:, :width] = 0
    batch[: small.shape[0], : small.shape[1]] = small
    batch[: large.shape[0], width + 8 : width + 8 + large.shape[1]] = large

    wide = 1.7  # inches, of a map
    high = wide * small.shape[0] / small.shape[1]
    size = (2.1 + wide * len(STRIDES), (high + 0.2) * len(heats) + 1.6 * high + 1.2)
    figure = plt.figure(figsize=size, layout='constrained')
    top, body = figure.subfigures(
        2, 1, height_ratios=[1.6 * high + 0.3, size[1] - 1.6 * high - 0.3]
    )
    for ax, image, title in zip(
        top.subplots(1, 2, width_ratios=[1, 2]),
        (small, batch),
        ('an image alone', 'in a batch, padded to the larger one'),
    ):
        ax.imshow(image)
        ax.set_title(title, fontsize=11)
        ax.axis('off')
    axes = body.subplots(len(heats), len(STRIDES), squeeze=False)
    for row, ((arch, library), maps) in zip(axes, heats.items()):
        row[0].set_ylabel(f'{library}\n{arch}', rotation=0, ha='right', va='center', fontsize=10)
        for ax, heat in zip(row, maps):
            shown = ax.imshow(
                heat.clip(*COLORS), cmap='inferno', norm=LogNorm(*COLORS), aspect='auto'
            )
            ax.set_box_aspect(small.shape[0] / small.shape[1])
            ax.set(xticks=[], yticks=[])
            ax.set_xlabel(f'largest {heat.max():.1g}', fontsize=8, labelpad=1)
    for ax, stride in zip(axes[0], STRIDES):
        ax.set_title(f'stride {stride}', fontsize=11)
    bar = body.colorbar(shown, ax=axes, location='bottom', fraction=0.02, aspect=60, pad=0.01)
    bar.set_label(
        "how far the batch moves the image's features,\nas a share of their mean length "
        '(black: floating-point noise)'
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    plt.close(figure)
    with appearing_whole(out) as draft:  # in 256 colours: a third of the bytes
        Image.open(drawn).convert('RGB').quantize().save(draft, 'PNG', optimize=True)


def progress(items: Iterable, what: str) -> Iterable:
    from tqdm import tqdm

    return tqdm(list(items), desc=what, leave=False, disable=None)  # None: on a terminal only


def main(argv: list[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser('batch_drift', description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add(
        'images',
        nargs='*',
        metavar='IMAGE',
        help='an image and a larger one; default: photographs that come with scikit-image',
    )
    add(
        '--archs',
        nargs='+',
        default=MEASURED,
        metavar='ARCH',
        help=f'architectures ({" ".join(MEASURED)})',
    )
    add(
        '--weights',
        nargs='+',
        default=[],
        metavar='ARCH=FILE',
        help='checkpoints of backbones; without one, weights are random but not tiny',
    )
    add(
        '--models',
        nargs='*',
        default=WHOLES,
        metavar='CONFIG[=CHECKPOINT]',
        help='detectors and segmentors (retinanet_cpvt_s, semantic_fpn_cpvt_s); none: leave out',
    )
    add(
        '--score-thr',
        type=float,
        default=0.05,
        metavar='SCORE',
        help='boxes that score less do not count (%(default)s)',
    )
    add('--out', default='batch_drift.png', metavar='FILE.png', help='the picture (%(default)s)')
    add('--json', dest='json_file', metavar='FILE', help='write the numbers, too')
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.runner.launch import run_tool

    return run_tool('batch_drift', batch_drift, arguments, 'nothing is written')


if __name__ == '__main__':
    sys.exit(main())
