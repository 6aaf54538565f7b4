"""Measures where a detector or segmentor spends its time on a CPU, part by part.

    python -m benchmarks.parts configs/retinanet_cpvt_s.py --size 800x1344 --threads 1
    python -m benchmarks.parts configs/semantic_fpn_cpvt_s.py --size 512 --threads 1

One image goes from a JPEG file to its prediction, and through a training step, with the pipelines
and the optimizer of the config. Each figure is the processor time of all threads, the minimum of
the rounds; their sum can be less than the fastest round.

    data             decoding, resizing and flipping, and normalizing
    backbone, neck   in training: forward | backward
    head             its layers; its losses with the assignment of targets; and the backward pass
                     of both
    post-processing  from the head's raw outputs to boxes, or to labels at the size of the image;
                     in training, to the proposals of a detector with two stages
    optimizer        the step of all parameters

An untrained detector finds hardly a box: post-processing takes longer with a --checkpoint.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpvt_pyramid.tooling.command import (
    UserError,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.tooling.report import text_table

prepare_for_torch()  # before torch is imported

with imports_of('parts'):
    import cv2
    import numpy as np
    import torch
    from mmengine.config import Config
    from mmengine.dataset import Compose, pseudo_collate
    from mmengine.logging import MMLogger
    from mmengine.optim import build_optim_wrapper
    from torch import Tensor, nn

    from benchmarks.measuring import parse_size
    from cpvt_pyramid.config.load import load_config
    from cpvt_pyramid.config.parts import kind_of, leaves
    from cpvt_pyramid.accelerate import use_winograd
    from cpvt_pyramid.predict.openmmlab.models import (
        build_model,
        fetch_checkpoint,
        load_whole_model,
    )
    from cpvt_pyramid.predict.openmmlab.postprocessing import skip_unused

PARTS = ('data', 'backbone', 'neck', 'head', 'losses', 'post-processing', 'optimizer', 'other')
BACKWARD = ', backward'  # suffix of a part
# Steps of a pipeline.
CHANGES_SIZE = ('Resize', 'RandomResize', 'RandomChoiceResize', 'RandomCrop')
METHODS = {  # of heads, and the part that each is
    'loss': 'head',
    'predict': 'head',
    'forward': 'head',
    'loss_by_feat': 'losses',
    'loss_and_target': 'losses',
    'predict_by_feat': 'post-processing',
}
BOX = (0.2, 0.2, 0.7, 0.7)  # of the training image, relative to its size


class Stopwatch:
    """Processor time of named parts. A part that starts inside another interrupts it.

    Attributes:
        seconds: of each part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.part = 'other'
        self.start = time.process_time()

    def switch(self, part: str) -> str:
        """Start a part; returns the one that it interrupts."""
        now = time.process_time()
        before = self.part
        self.seconds[before] += now - self.start
        self.part = part
        self.start = now
        return before

    def timed(self, part: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of a function that is a part, or is inside one."""
        before = self.switch(part)
        try:
            return function(*args, **kwargs)
        finally:
            self.switch(before)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Time all calls of a method of an object as a part."""
        setattr(owner, method, functools.partial(self.timed, part, getattr(owner, method)))

    def watch_backward(self, module: nn.Module, part: str) -> None:
        """Time what follows the gradient of a module's outputs as the backward pass of a part.

        Autograd runs the functions in the reverse order of the forward pass.
        """

        def start(grad: Tensor) -> None:
            self.switch(part + BACKWARD)

        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for x in outputs:
                if x.requires_grad:
                    x.register_hook(start)

        module.register_forward_hook(hook)


def parts(
    config: str,
    *,
    checkpoint: str | None = None,
    size: str = '512',
    rounds: int = 3,
    threads: int | None = None,
) -> None:
    """Print the table.

    Args:
        config: config file of a detector or segmentor
        checkpoint: weights of the model; by default random ones
        size: of the image that the model sees, in pixels, as SIDE or HEIGHTxWIDTH
        rounds: passes and training steps, after one more that is not measured
        threads: CPU threads; by default as many as torch takes
    """
    if min(rounds, threads or 1) < 1:
        raise UserError('--rounds and --threads must be at least 1')
    pixels = parse_size(size)
    cfg = load_config(config)
    for part in (cfg.model, cfg.model.get('backbone', {})):
        part.pop('init_cfg', None)
    weights = fetch_checkpoint(checkpoint) if checkpoint else None
    model = build_model(cfg, 'cpu')
    if weights:
        load_whole_model(model, weights, checkpoint)
    else:
        MMLogger.get_current_instance().setLevel('WARNING')  # not a line per parameter
        model.init_weights()  # a detector's scores start low; else all anchors would be sorted
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with tempfile.TemporaryDirectory() as folder:
            step = Steps(model, cfg, pixels, Path(folder))
            columns = [
                ('inference', measured(step.predict, step.stopwatch, rounds)),
                ('training', measured(step.train, step.stopwatch, rounds)),
            ]
        print(table(f'{Path(config).stem}, {size}, {torch.get_num_threads()} threads', columns))
    finally:
        torch.set_num_threads(before)


class Steps:
    """A model's inference and training on an image in a file, and the time of their parts. The
    model's methods are replaced by timed ones; `size` is height and width."""

    def __init__(self, model: nn.Module, cfg: Config, size: tuple[int, int], folder: Path) -> None:
        self.model = model
        self.size = size
        self.example = example(size, folder)
        self.optimizer = build_optim_wrapper(model, cfg.optim_wrapper)
        self.pipelines = {}
        for name in ('train', 'test'):
            steps = next(leaves(cfg[f'{name}_dataloader'].dataset)).pipeline
            sized = [step for step in steps if kind_of(step) not in CHANGES_SIZE]
            where = [kind_of(step) for step in sized].index('LoadAnnotations')
            self.example['reduce_zero_label'] = sized[where].get('reduce_zero_label')
            sized.insert(where + 1, {'type': 'Resize', 'scale': size[::-1], 'keep_ratio': False})
            self.pipelines[name] = Compose(sized)

        skip_unused(model)  # as infer.py
        use_winograd(model)
        self.stopwatch = Stopwatch()
        watch = self.stopwatch.watch
        watch(model.data_preprocessor, 'forward', 'data')
        for name in ('neck', 'backbone'):
            module = getattr(model, name, None)
            if module is not None:
                watch(module, 'forward', name)
                self.stopwatch.watch_backward(module, name)
        heads = [part for name, part in model.named_children() if name.endswith('_head')]
        for head in heads:
            for module in head.modules():
                for method, part in METHODS.items():
                    is_layer = method == 'forward' and module is not head
                    if hasattr(module, method) and not is_layer:
                        watch(module, method, part)
        if hasattr(model, 'postprocess_result'):
            watch(model, 'postprocess_result', 'post-processing')

    def data(self, name: str) -> dict:
        return self.stopwatch.timed(
            'data', lambda: pseudo_collate([self.pipelines[name](dict(self.example))])
        )

    def predict(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model.test_step(self.data('test'))

    def train(self) -> None:
        self.model.train()
        data = self.model.data_preprocessor(self.data('train'), training=True)
        loss: Tensor = self.model.parse_losses(self.model(**data, mode='loss'))[0]
        self.stopwatch.switch('head' + BACKWARD)
        loss.backward()
        self.stopwatch.switch('optimizer')
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stopwatch.switch('other')


def example(size: tuple[int, int], folder: Path) -> dict:
    """What a data set gives to its pipeline: an image of noise, a box and its mask, and labels."""
    height, width = size
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    cv2.imwrite(str(folder / 'image.jpg'), cv2.resize(noise, (width, height)))
    cv2.imwrite(str(folder / 'labels.png'), np.ones(size, np.uint8))
    left, top, right, bottom = (ratio * side for ratio, side in zip(BOX, (width, height) * 2))
    corners = [left, top, right, top, right, bottom, left, bottom]
    instance = {'bbox': [left, top, right, bottom], 'bbox_label': 0, 'ignore_flag': 0}
    return {
        'img_path': str(folder / 'image.jpg'),
        'img_id': 0,
        'height': height,
        'width': width,
        'instances': [instance | {'mask': [corners]}],
        'seg_map_path': str(folder / 'labels.png'),
        'seg_fields': [],
        'label_map': None,
    }


def measured(step: Callable[[], None], stopwatch: Stopwatch, rounds: int) -> dict[str, float]:
    """The least seconds of each part, and of a whole step."""
    step()
    best: dict[str, float] = {}
    for _ in range(rounds):
        stopwatch.switch('other')
        stopwatch.seconds.clear()
        step()
        stopwatch.switch('other')
        found = stopwatch.seconds | {'whole': sum(stopwatch.seconds.values())}
        best = {part: min(seconds, best.get(part, seconds)) for part, seconds in found.items()}
    return best


def table(title: str, columns: list[tuple[str, dict[str, float]]]) -> str:
    rows = []
    for part in (*PARTS, 'whole'):
        cells = [part]
        for _, seconds in columns:
            times = [seconds[key] for key in (part, part + BACKWARD) if key in seconds]
            shown = ' | '.join(f'{1e3 * time:.0f}' for time in times)
            share = sum(times) / seconds['whole']
            cells.append(f'{shown}  {share:4.0%}' if times else '')
        rows.append(cells)
    head = ['', *(name for name, _ in columns)]
    return f'{title}: ms of processor time, share\n{text_table(head, rows)}'


def main(argv: list[str] | None = None) -> int:
    return run_command(parts, argv)


if __name__ == '__main__':
    sys.exit(main())
