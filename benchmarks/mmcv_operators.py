"""Times mmcv's compiled operators beside those that cpvt_pyramid makes of torchvision's.

    make compiled
    python -m benchmarks.mmcv_operators
    python -m benchmarks.mmcv_operators --rounds 20 --threads 1

The first table has calls of operators, the second one whole models: a training step and a
prediction of the shipped configs, for one image of 512 x 512, with random weights, and boxes of any
score. Both kinds of operators take turns, in one process; medians of the clock are shown, and ours
relative to the compiled ones. `cpvt doctor` says which operators are installed.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

from cpvt_pyramid.app.tooling.command import (
    UserError,
    check_at_least,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.app.tooling.report import markdown_table
from cpvt_pyramid.mmcv_operators import compile_command, found, link_file

prepare_for_torch()  # before torch is imported

with imports_of('mmcv_operators'):
    import torch
    from mmcv import ops
    from torch import Tensor, nn

    from benchmarks import ROOT
    from benchmarks.machine import machine
    from benchmarks.timing import show_progress, time_call, torch_threads
    from cpvt_pyramid.app.config.load import load_config
    from cpvt_pyramid.app.predict.openmmlab.loading import build_model
    from tests.models.mmcv_extension import both_extensions, operators
    from tests.models.samples import random_data

CONFIGS = (
    'retinanet_cpvt_s',
    'mask_rcnn_cpvt_s',
    'dino_cpvt_s',
    'mask2former_cpvt_s',
    'semantic_fpn_cpvt_s',
    'upernet_cpvt_s',
    'segformer_b0',
)
SIDE = 512  # of the image, in pixels
CLASSES = 20
BOTH = ('compiled', 'ours')


def mmcv_operators(
    *, configs: Sequence[str] = CONFIGS, rounds: int = 7, threads: Sequence[int] = (1, 2)
) -> None:
    """Print the tables.

    Args:
        configs: names of shipped configs
        rounds: how often each call is timed
        threads: of PyTorch
    """
    check_at_least('rounds', rounds, 1)
    for name in configs:
        if not (ROOT / f'configs/{name}.py').is_file():
            raise UserError(f'no config {name!r} in configs/')
    if found() in (None, link_file()):
        raise UserError(f'mmcv has no compiled operators; {compile_command()}')
    logging.disable(logging.WARNING)  # of mm, about its initialization
    about = machine('cpu')
    print(f'{about["processor"]}, {about["cores"]} cores, torch {torch.__version__}')
    for title, calls in (('operator', operator_calls()), ('model', model_calls(configs))):
        rows = [(name, *cells(name, call, rounds, threads)) for name, call in calls]
        head = [f'{whose}, {amount(n)}' for n in threads for whose in (*BOTH, 'ratio')]
        print('\n' + markdown_table((title, *head), rows), end='')


def amount(threads: int) -> str:
    return f'{threads} thread' + 's' * (threads > 1)


def cells(
    name: str, call: Callable[[], object], rounds: int, threads: Sequence[int]
) -> Iterator[str]:
    """For each number of threads: milliseconds compiled, ours, and ours relative to compiled."""
    for number in threads:
        show_progress(f'{name}, {amount(number)}')
        with torch_threads(number):
            compiled, ours = medians(call, rounds)
        yield f'{1000 * compiled:.1f}'
        yield f'{1000 * ours:.1f}'
        yield f'{ours / compiled:.2f}'


def medians(call: Callable[[], object], rounds: int) -> list[float]:
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for extension, measured in zip(both_extensions(), times):
            with operators(extension):
                seconds = time_call(call).clock
            if turn:  # the first one prepares memory and kernels
                measured.append(seconds)
    return [statistics.median(measured) for measured in times]


def operator_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    torch.manual_seed(0)
    for count in (1000, 20000):
        boxes, scores = random_boxes(count), torch.rand(count)
        yield f'nms, {count} boxes', lambda b=boxes, s=scores: ops.nms(b, s, 0.5)
    boxes, scores = random_boxes(1000), torch.rand(1000)
    yield 'soft nms, 1000 boxes', lambda: ops.soft_nms(boxes, scores)

    feature = torch.randn(1, 256, 200, 336, requires_grad=True)
    rois = torch.cat([torch.zeros(512, 1), random_boxes(512)], 1)
    yield from both_passes(
        'roi_align, 512 regions of 7 x 7', lambda: ops.roi_align(feature, rois, 7, 0.25), feature
    )
    x = torch.randn(1, 256, 50, 84, requires_grad=True)
    weight = torch.randn(256, 256, 3, 3, requires_grad=True)
    offset = torch.randn(1, 18, 50, 84, requires_grad=True)
    mask = torch.rand(1, 9, 50, 84, requires_grad=True)
    yield from both_passes(
        'deform_conv, 256 channels of 50 x 84',
        lambda: ops.deform_conv2d(x, offset, weight, 1, 1),
        x,
        offset,
        weight,
    )
    yield from both_passes(
        'modulated_deform_conv, the same',
        lambda: ops.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1),
        x,
        offset,
        mask,
        weight,
    )


def both_passes(
    name: str, call: Callable[[], Tensor], *inputs: Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    def forward() -> None:
        with torch.no_grad():
            call()

    def forward_and_backward() -> None:
        torch.autograd.grad(call().sum(), inputs)

    yield name, forward
    yield f'{name}, with gradients', forward_and_backward


def random_boxes(count: int) -> Tensor:
    """In an image of 1333 x 800."""
    corner = torch.rand(count, 2) * torch.tensor([1200, 700])
    return torch.cat([corner, corner + 8 + torch.rand(count, 2) * 120], 1)


def model_calls(configs: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    for name in configs:
        cfg = load_config(ROOT / f'configs/{name}.py')
        cfg.model.backbone.init_cfg = None
        for settings in (cfg.model.get('test_cfg'), (cfg.model.get('test_cfg') or {}).get('rcnn')):
            if settings and 'score_thr' in settings:
                settings.score_thr = 0.0
        torch.manual_seed(0)
        model = build_model(cfg, 'cpu')
        model.init_weights()
        is_segmentor = cfg.default_scope == 'mmseg'
        masks = 'mask' in name
        data = random_data(is_segmentor, [[SIDE, SIDE]], classes=CLASSES, masks=masks)
        yield f'{name}, training step', lambda m=model, d=data: training_step(m, d)
        yield f'{name}, prediction', lambda m=model, d=data: predict(m, d)


def training_step(model: nn.Module, data: dict) -> None:
    torch.manual_seed(0)  # of samplers
    model.train().zero_grad()
    prepared = model.data_preprocessor(data, training=True)
    losses = model(**prepared, mode='loss')
    model.parse_losses(losses)[0].backward()


def predict(model: nn.Module, data: dict) -> None:
    with torch.no_grad():
        model.eval().test_step(data)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(mmcv_operators, argv)


if __name__ == '__main__':
    sys.exit(main())
