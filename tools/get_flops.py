#!/usr/bin/env python
"""Counts the parameters and FLOPs of a config's detector or segmentor, module by module.

    python tools/get_flops.py configs/retinanet_cpvt_s.py
    python tools/get_flops.py configs/semantic_fpn_svt_s.py --size 512 512 --depth 2

FLOPs are multiply-additions, as in papers, of matrix products, convolutions and attention, which
is counted fused or not. They are of the network's raw outputs for one image: what decodes boxes
or resizes label maps is left out. The second stage of a two-stage detector is counted for the
proposals that random weights make, at most as many as the config lets through.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from cpvt_pyramid.flops import Counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, uninstalled


class Row(NamedTuple):
    """A module, and all that is in it."""

    name: str
    type: str
    parameters: int
    flops: int  # multiply-additions


def get_flops(
    config: str, size: Sequence[int] = (800, 1344), depth: int = 1, cfg_options: Sequence[str] = ()
) -> list[Row]:
    """Print the table.

    Args:
        config: path of the config file.
        size: height and width of the image, in pixels.
        depth: levels of modules below the model.
        cfg_options: `key=value` settings that override the config's.

    Returns:
        The rows: the model, and below it its modules that have parameters or FLOPs.
    """
    from cpvt_pyramid.runner import launch

    if min(size) < 1 or depth < 0:
        raise launch.UserError(f'--size {size[0]} {size[1]} --depth {depth}: sizes are from 1 up')
    cfg = launch.load_config(config, cfg_options)
    model, counter = counted(cfg, size)
    rows = list(rows_of(model, counter, depth))
    width = max(len(row.name) + 2 * row.name.count('.') for row in rows)
    kind = max(len(row.type) for row in rows)
    print(f'{"":{width}}  {"":{kind}}  parameters    GFLOPs   share')
    for row in rows:
        share = row.flops / max(counter.total, 1)
        print(
            f'{row.name:{width}}  {row.type:{kind}}  {row.parameters / 1e6:9.2f}M'
            f'{row.flops / 1e9:10.2f}{share:8.1%}'
        )
    return rows


def counted(cfg, size: Sequence[int]) -> tuple[nn.Module, Counter]:
    """The model of a config, and the cost of an image: on the meta device where that works, which
    it does not for what looks at values, as the proposals of two stages; and as far as the raw
    outputs, where the model can stop there."""
    import torch

    from cpvt_pyramid.flops import Counter
    from cpvt_pyramid.runner import launch

    torch.manual_seed(0)
    model = launch.build_model(cfg, 'cpu')
    for device, mode in itertools.product(('meta', 'cpu'), ('tensor', 'predict')):
        on_device = copy.deepcopy(model).to(device)
        image = torch.empty(1, 3, *size, device=device).normal_()
        try:
            with Counter() as counter, torch.no_grad():
                on_device(image, samples(cfg, size), mode=mode)
            return model, counter
        except Exception as error:  # whatever a model makes of a device or of a size
            problem = error
    raise launch.UserError(f'an image of {size[0]}x{size[1]}: {launch.one_line(problem)}')


def samples(cfg, size: Sequence[int]) -> list:
    """What comes with the image in mm: its size."""
    shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    if cfg.default_scope == 'mmdet':
        from mmdet.structures import DetDataSample as Sample
    else:
        from mmseg.structures import SegDataSample as Sample
    return [Sample(metainfo={**shapes, 'scale_factor': (1.0, 1.0)})]


def rows_of(model: nn.Module, counter: Counter, depth: int) -> Iterator[Row]:
    """The model and its modules down to a depth, in their order."""
    root = type(model).__name__
    for name, module in model.named_modules():
        if name and name.count('.') >= depth:
            continue
        parameters = sum(p.numel() for p in module.parameters())
        flops = counter.by_module.get(f'{root}.{name}' if name else root, 0)
        if parameters or flops:
            yield Row(name or 'model', type(module).__name__, parameters, flops)


def main(argv: Sequence[str] | None = None) -> int:
    from cpvt_pyramid.runner.options import add_cfg_options

    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser('get_flops', description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file, for example configs/retinanet_cpvt_s.py')
    add('--size', type=int, nargs=2, default=(800, 1344), metavar=('H', 'W'), help='in pixels')
    add('--depth', type=int, default=1, metavar='N', help='levels of modules (%(default)s)')
    add_cfg_options(parser, 'model.backbone.arch=svt_small')
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.runner.launch import run_tool

    def tool(**arguments) -> None:
        get_flops(**arguments)

    return run_tool('get_flops', tool, arguments, 'nothing is counted')


if __name__ == '__main__':
    sys.exit(main())
