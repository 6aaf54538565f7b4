"""The comparison of an exported graph with PyTorch, on real images, before a file is written.

Maps and logits are compared with those of the exportable model in PyTorch, in the same batch. The
outputs are compared with those of the original model for each image alone, so that a result that
depends on the batch is found, too.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...padding.batching import padded_size
from ..images.reading import resize_image
from ..predict.masks import CELL
from ..predict.sessions import padded_inputs
from ..tooling.command import one_line
from ..tooling.report import markdown_table
from .base import Batch, Exportable, Settings
from .comparison import (
    HEAD,
    TOLERANCES,
    Arrays,
    Check,
    Tolerances,
    compare_boxes,
    compare_outputs,
    compare_tensor,
    inside,
    is_detection,
    worst,
)
from .self_test import SIZES, Sample, draw, thinned

Runner = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]

Size = tuple[int, int]  # height and width

# The images of each batch: sizes that the graph was not captured at, odd ones, less than a window,
# more than 1333, and a batch of three.
BATCHES: tuple[tuple[Size, ...], ...] = (
    ((256, 320),),
    ((201, 333),),
    ((211, 1341),),
    ((33, 47),),
    ((224, 192), (224, 192), (224, 192)),
)
MIXED = (160, 213), (213, 160), (97, 130)  # for what takes images of any sizes in one batch
TOGETHER = 160, 224  # is padded to one size with the others of a mixed batch
SEEDS = 4  # synthetic images of each size, of which that with the highest scores is taken


def batches_for(model: Exportable, settings: Settings) -> list[Sequence[Size]]:
    """The height and width of the images of each batch."""
    is_told_sizes = 'valid' in model.input_shapes(settings)
    if settings.size is not None:
        sizes = sizes_up_to(settings.size)
        batches: list[Sequence[Size]] = [[settings.size], [settings.size] * 3, [sizes[1]]]
        return [*batches, sizes] if is_told_sizes else batches
    if not is_told_sizes:
        return list(BATCHES)
    if model.takes_any_padding:
        return [*BATCHES, MIXED]
    return [*BATCHES, padded_alike(TOGETHER, model.preprocessing.divisor)]


def sizes_up_to(size: Size) -> list[Size]:
    """The fixed size of a file, and two smaller ones."""
    height, width = size
    return [size, (height * 2 // 3 | 1, max(width - 7, 1)), (height, max(width // 2, 1))]


def padded_alike(size: Size, divisor: int) -> list[Size]:
    """Three sizes that are padded to one, that of `size` padded to multiples of the divisor."""
    height, width = padded_size(size, divisor)
    return [
        (height, width),
        (height - divisor + 1, width - divisor + 1),
        (height - (divisor - 1) // 2, width - (divisor - 1) // 3),
    ]


class Single(NamedTuple):
    """An image as the original model gets it, which knows no batches."""

    pixels: Tensor  # (1, 3, H, W)
    original: Optional[Size] = None  # which label maps have
    canvas: Optional[Size] = None  # to which the file pads it


def original_sizes(model: Exportable, settings: Settings, sizes: Sequence[Size]) -> list[Size]:
    """Heights and widths from which images of these sizes may have been resized.

    A file of one size that is not told the true sizes resizes the padding with the image. Only in
    images that were not resized it is known to the pixel where the padding begins.
    """
    if 'valid' not in model.input_shapes(settings) and settings.size not in (None, sizes[0]):
        return list(sizes)
    factors = ((5, 3), (2, 3), (7, 4))
    return [
        (height * a // b + 1, width * a // b + 1) for (height, width), (a, b) in zip(sizes, factors)
    ]


def single(model: Exportable, settings: Settings, image: np.ndarray, original: Size) -> Single:
    """An image (H, W, 3) as the original model gets it to compare with the file."""
    pixels = as_tensor(image)
    kept = original if model.takes_original else None  # others do not ask for it
    if settings.size is None or settings.size == image.shape[:2]:
        return Single(pixels, kept)
    if 'valid' in model.input_shapes(settings):
        return Single(pixels, kept, canvas=settings.size)
    # The file takes the padding for image.
    down, right = (whole - side for whole, side in zip(settings.size, image.shape[:2]))
    return Single(F.pad(pixels, (0, right, 0, down)), settings.size if kept else None)


class PyTorchResults(NamedTuple):
    """What PyTorch gives for a batch."""

    inputs: dict[str, np.ndarray]
    stages: Arrays  # of the exportable model, in the same batch
    references: list[Arrays]  # outputs of the original model for each image


def verify(
    model: Exportable,
    runners: Mapping[str, Runner],
    images: Sequence[np.ndarray],
    settings: Settings,
    progress: Callable[[Sequence], Sequence] = list,
) -> list[Check]:
    """Compare a graph in each runtime with the model in float32, on images (H, W, 3) RGB that are
    resized. Returns all comparisons, also those that failed."""
    checks = []
    given = cycle(images)
    tolerances = TOLERANCES[settings.dtype]
    for sizes in progress(batches_for(model, settings)):
        batch = [resize_image(next(given), size) for size in sizes]
        expected = results_in_pytorch(model, batch, settings)
        for runtime, run in runners.items():
            try:
                found = run(expected.inputs)
            except Exception as error:  # the runtimes' own kinds
                text = f'{type(error).__name__}: {one_line(error)}'
                failure = Check('runtime', math.nan, 0, '', text)
                checks += worst([failure], batch, runtime)
                continue
            checks += worst(compare_batch(model, found, expected, tolerances), batch, runtime)
    return checks


def results_in_pytorch(
    model: Exportable, batch: Sequence[np.ndarray], settings: Settings
) -> PyTorchResults:
    """What PyTorch gives for images (H, W, 3)."""
    originals = original_sizes(model, settings, [image.shape[:2] for image in batch])
    inputs = padded_inputs(batch, model.input_shapes(settings), originals)
    singles = [single(model, settings, *given) for given in zip(batch, originals)]
    return PyTorchResults(
        inputs,
        stages_of(model, inputs),
        [reference_of(model, image) for image in singles],
    )


def compare_batch(
    model: Exportable, found: Arrays, expected: PyTorchResults, tolerances: Tolerances
) -> list[Check]:
    """Compare what a file gives for a batch."""
    compared = {*expected.references[0]}
    detects = is_detection(expected.references[0])
    if detects:
        compared.add('masks')  # which not all references have; see `compare_masks`
    checks = [
        compare_tensor(name, found[name], x, tolerances.maps)
        for name, x in expected.stages.items()
        if name in found and not (name in model.output_names and name in compared)
    ]
    for i, reference in enumerate(expected.references):
        ours = {name: found[name][i] for name in model.output_names}
        if not detects:
            ours = {name: inside(ours[name], x.shape) for name, x in reference.items()}
        checks += compare_outputs(ours, reference, tolerances)
        if 'masks' in model.output_names:
            theirs = {name: expected.stages[name][i] for name in model.output_names}
            checks += compare_masks(ours, theirs, tolerances)
    return checks


def compare_masks(found: Arrays, expected: Arrays, tolerances: Tolerances) -> list[Check]:
    """Compare the pixels of instance masks, of the boxes that are in both."""
    used = expected['labels'] >= 0
    expected = {name: x[used] for name, x in expected.items()}
    checks = compare_boxes(found, expected, tolerances)
    return [check for check in checks if check.stage == 'masks']


def stages_of(model: Exportable, inputs: Mapping[str, np.ndarray]) -> Arrays:
    with torch.no_grad():
        stages = model.stages(Batch(**{name: torch.from_numpy(x) for name, x in inputs.items()}))
    return {name: x.numpy() for name, x in stages.items()}


def reference_of(model: Exportable, image: Single) -> Arrays:
    """The outputs of the original model for an image."""
    original = None if image.original is None else torch.tensor([image.original])
    context = nullcontext() if image.canvas is None else model.on_canvas(image.canvas)
    with torch.no_grad(), context:
        found = model.reference(image.pixels, original)
    return {name: x[0].numpy() for name, x in found.items()}


def make_samples(model: Exportable, settings: Settings) -> list[Sample]:
    """Synthetic images and PyTorch's outputs for them, for a file that can test itself."""
    sizes = SIZES if settings.size is None else sizes_up_to(settings.size)
    samples = []
    for number, size in enumerate(sizes):
        # Each image is drawn with other seeds.
        seeds = range(number, SEEDS * len(sizes), len(sizes))
        candidates = seeds if 'scores' in model.output_names else seeds[:1]
        drawn = [make_sample(model, seed, size, settings) for seed in candidates]
        samples.append(max(drawn, key=sum_of_scores))
    return samples


def sum_of_scores(sample: Sample) -> float:
    scores = sample['outputs'].get('scores')
    return 0.0 if scores is None else float(scores.sum())


def make_sample(model: Exportable, seed: int, size: Size, settings: Settings) -> Sample:
    """A synthetic image, and PyTorch's outputs for it."""
    [original] = original_sizes(model, settings, [size])
    inputs = padded_inputs([draw(seed, *size)], model.input_shapes(settings), [original])
    stages = stages_of(model, inputs)
    outputs = {name: stages[name][0] for name in model.output_names}
    shapes = {name: np.array(x.shape) for name, x in outputs.items()}
    if model.details.get('masks') == 'image':
        shapes['masks'][1:] = [-(-side // CELL) for side in size]
    outputs = {name: inside(x, shapes[name].tolist()) for name, x in outputs.items()}
    if is_detection(outputs):
        outputs = {name: x[outputs['labels'] >= 0] for name, x in outputs.items()}
    image = {
        'seed': np.array(seed),
        'size': np.array(size),
        'original': np.array(original),
    }
    return {'image': image, 'shapes': shapes, 'outputs': thinned(outputs)}


def as_tensor(image: np.ndarray) -> Tensor:
    """(1, 3, H, W) float32 of an image (H, W, 3)."""
    return torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float32))


def write_report(path: Path, about: dict[str, Any], checks: Sequence[Check]) -> list[Path]:
    """Write the report next to a model: NAME.report.json and NAME.report.md; returns both paths."""
    failed = [check for check in checks if not check.passed]
    result = {
        'model': path.name,
        'passed': not failed,
        'about': {k: v for k, v in about.items() if k not in ('classes', 'palette')},
        'checks': [check._asdict() | {'passed': check.passed} for check in checks],
    }
    data, table = path.with_suffix('.report.json'), path.with_suffix('.report.md')
    data.write_text(json.dumps(result, indent=1) + '\n')
    table.write_text(
        f'# {path.name}\n\n'
        f'{len(checks) - len(failed)} of {len(checks)} comparisons with PyTorch passed. Maps and '
        'logits: with the same batch; outputs: with each image alone. Each row is the largest '
        'difference in the batch.\n\n'
        f'{markdown_table(HEAD, [check.cells for check in checks])}\n'
    )
    return [data, table]
