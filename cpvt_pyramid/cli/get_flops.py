"""Count the parameters and FLOPs of a config's detector or segmentor, by module.

    cpvt get-flops configs/retinanet_cpvt_s.py
    cpvt get-flops configs/semantic_fpn_svt_s.py --size 512 512 --depth 2

FLOPs are multiply-additions, as in papers, of matrix products, convolutions and attention, fused or
not, from one image to the network's raw outputs; decoding boxes and resizing segmentation masks is
left out. The second stage of a two-stage detector is counted for the proposals of random weights,
at most as many as the config allows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..tooling.command import UserError, check_at_least, one_line, run_command

if TYPE_CHECKING:
    from mmengine.config import Config
    from torch import nn

    from ..flops import Counter


class Row(NamedTuple):
    """A module with its submodules."""

    name: str
    type: str
    parameters: int
    flops: int  # multiply-additions


def get_flops(
    config: str,
    *,
    size: tuple[int, int] = (800, 1344),
    depth: int = 1,
    cfg_options: Sequence[str] = (),
) -> None:
    """Print the table.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py
        size: height and width of the image, in pixels
        depth: levels of submodules to list
        cfg_options: override settings of the config, for example
            model.backbone.arch=svt_small
    """
    from ..tooling.report import text_table

    rows = count(config, size, depth, cfg_options)
    cells = [
        (
            row.name,
            row.type,
            f'{row.parameters / 1e6:.2f}M',
            f'{row.flops / 1e9:.2f}',
            f'{row.flops / max(rows[0].flops, 1):.1%}',
        )
        for row in rows
    ]
    print(text_table(['', '', 'parameters', 'GFLOPs', 'share'], cells))


def count(
    config: str, size: tuple[int, int], depth: int, cfg_options: Sequence[str] = ()
) -> list[Row]:
    """The model first, then its submodules that have parameters or FLOPs."""
    from ..config.load import load_config

    if min(size) < 1:
        raise UserError(f'--size must be at least 1 1, got {size[0]} {size[1]}')
    check_at_least('--depth', depth, 0)
    model, counter = counted(load_config(config, cfg_options), size)
    return list(rows_of(model, counter, depth))


def counted(cfg: Config, size: tuple[int, int]) -> tuple[nn.Module, Counter]:
    """The model of a config, and the counter after one image.

    On the meta device if possible; operations that depend on values, such as the proposals of
    two-stage detectors, need the CPU. Up to the raw outputs if the model can stop there.
    """
    import torch

    from ..flops import Counter
    from ..mm.samples import data_sample
    from ..predict.openmmlab.models import build_model

    torch.manual_seed(0)
    model = build_model(cfg, 'cpu')
    samples = [data_sample(cfg.default_scope == 'mmseg', size)]
    for device, mode in itertools.product(('meta', 'cpu'), ('tensor', 'predict')):
        on_device = copy.deepcopy(model).to(device)
        image = torch.empty(1, 3, *size, device=device).normal_()
        try:
            with Counter() as counter, torch.no_grad():
                on_device(image, samples, mode=mode)
            return model, counter
        except Exception as error:  # models fail in many ways on an unsuitable device or size
            problem = error
    raise UserError(f'the model fails on an image of {size[0]}x{size[1]}: {one_line(problem)}')


def rows_of(model: nn.Module, counter: Counter, depth: int) -> Iterator[Row]:
    """The model and its submodules down to a depth, in order."""
    root = type(model).__name__
    for name, module in model.named_modules():
        if name and name.count('.') >= depth:
            continue
        parameters = sum(p.numel() for p in module.parameters())
        flops = counter.by_module.get(f'{root}.{name}' if name else root, 0)
        if parameters or flops:
            yield Row(name or 'model', type(module).__name__, parameters, flops)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(get_flops, argv)
