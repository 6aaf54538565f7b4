"""The comparison of an exported graph with PyTorch, on real images, before a file is written.

Maps and logits are compared with those of the exportable model in PyTorch, in the same batch. The
outputs are compared with those of the original model for each image alone, so that a result that
depends on the batch is found, too.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, tee
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ...padding.batching import padded_size
from ..images.reading import resize_image
from ..predict.masks import CELL
from ..predict.sessions import padded_inputs
from ..tooling.command import one_line
from ..tooling.report import markdown_table
from .about import Settings
from .base import Batch, Exportable, in_float32
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
    matched,
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
NOISY_IMAGES = 64  # enough to see a result of one image in twenty
SEEDS = 4  # synthetic images of each size, of which that with the highest scores is taken


def batches_for(model: Exportable, settings: Settings) -> list[Sequence[Size]]:
    """The height and width of the images of each batch."""
    fixed = settings.size
    batches = [[fixed], [fixed] * 3] if fixed else list(BATCHES)
    if 'valid' not in input_names(model, settings):
        return batches
    if fixed:
        mixed = padded_alike(model, fixed)
        batches.append([mixed[1]])
    elif model.takes_any_padding:
        mixed = MIXED
    else:
        mixed = padded_alike(model, padded_size(TOGETHER, model.preprocessing.divisor))
    return [*batches, mixed]


def padded_alike(model: Exportable, size: Size) -> list[Size]:
    """A size, and two smaller ones that may be in a batch with it."""
    height, width = size
    if model.takes_any_padding:
        return [size, (height * 2 // 3 | 1, max(width - 7, 1)), (height, max(width // 2, 1))]
    divisor = model.preprocessing.divisor
    down, right = (height - 1) % divisor, (width - 1) % divisor
    return [size, (height - down, width - right), (height - down // 2, width - right // 3)]


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
        # Only label maps have the size of the original image.
        originals = original_sizes(sizes) if model.takes_original else [None] * len(sizes)
        given_sizes = originals if model.takes_original else None
        inputs = padded_inputs(batch, input_shapes(model, settings), given_sizes)
        expected = stages_of(model, inputs)
        references = [reference_of(model, as_tensor(x), o) for x, o in zip(batch, originals)]
        noisy = [tee(noisy_results(model, image, tolerances), len(runners)) for image in batch]
        for place, (runtime, run) in enumerate(runners.items()):
            try:
                found = run(inputs)
            except Exception as error:  # the runtimes' own kinds
                text = f'{type(error).__name__}: {one_line(error)}'
                checks += worst([Check('runtime', math.nan, 0, '', text)], batch, runtime)
                continue
            # Instance masks are no part of the references. Their pixels count, not their values.
            compared = (
                {*references[0], 'masks'} if is_detection(references[0]) else {*references[0]}
            )
            each = [
                compare_tensor(name, found[name], x, tolerances.maps)
                for name, x in expected.items()
                if name in found and not (name in model.output_names and name in compared)
            ]
            for i, reference in enumerate(references):
                ours = {name: found[name][i] for name in model.output_names}
                if not is_detection(reference):
                    ours = {name: inside(ours[name], x.shape) for name, x in reference.items()}
                each += compare_outputs(ours, reference, noisy[i][place], tolerances)
                if 'masks' in model.output_names:
                    theirs = {name: expected[name][i] for name in model.output_names}
                    each += compare_masks(ours, theirs, tolerances)
            checks += worst(each, batch, runtime)
    return checks


def compare_masks(found: Arrays, expected: Arrays, tolerances: Tolerances) -> list[Check]:
    """Compare the pixels of instance masks, of the boxes that are in both."""
    used = expected['labels'] >= 0
    expected = {name: x[used] for name, x in expected.items()}
    checks = compare_boxes(found, expected, (), tolerances)
    return [check for check in checks if check.stage == 'masks']


def original_sizes(sizes: Sequence[Size]) -> list[Size]:
    """Heights and widths from which images of these sizes may have been resized."""
    factors = ((5, 3), (2, 3), (7, 4))
    return [tuple(side * a // b + 1 for side in s) for s, (a, b) in zip(sizes, factors)]


def input_names(model: Exportable, settings: Settings) -> list[str]:
    return model.input_names(settings.has_valid, fixed=settings.size is not None)


def input_shapes(model: Exportable, settings: Settings) -> dict[str, list[Optional[int]]]:
    """The shape of each input of a graph; None for a dimension of any length."""
    shapes = dict.fromkeys(input_names(model, settings), [None, 2])
    return shapes | {'images': [None, 3, *(settings.size or (None, None))]}


def stages_of(model: Exportable, inputs: Mapping[str, np.ndarray]) -> Arrays:
    with torch.no_grad():
        stages = model.stages(Batch(**{name: torch.from_numpy(x) for name, x in inputs.items()}))
    return {name: in_float32(x).numpy() for name, x in stages.items()}


def reference_of(
    model: Exportable, image: Tensor, original: Optional[tuple[int, int]] = None
) -> Arrays:
    """The outputs of the original model for an image (1, 3, H, W)."""
    with torch.no_grad():
        found = model.reference(image, None if original is None else torch.tensor([original]))
    return {name: in_float32(x[0]).numpy() for name, x in found.items()}


def noisy_results(model: Exportable, image: np.ndarray, tolerances: Tolerances) -> Iterator[Arrays]:
    """The outputs of the original model for an image (H, W, 3) with noise, always the same."""
    random, noise = torch.Generator().manual_seed(0), tolerances.noise
    pixels = as_tensor(image)
    for _ in range(NOISY_IMAGES):
        with model.with_noise(noise / 255, random):
            noisy = pixels + noise * torch.randn(pixels.shape, generator=random)
            yield reference_of(model, noisy)


def make_samples(model: Exportable, settings: Settings) -> list[Sample]:
    """Synthetic images and PyTorch's outputs for them, for a file that can test itself."""
    shapes = input_shapes(model, settings)
    sizes: Sequence[Size] = SIZES
    if settings.size:
        sizes = padded_alike(model, settings.size) if 'valid' in shapes else [settings.size]
    samples = []
    for number, (size, original) in enumerate(zip(sizes, original_sizes(sizes))):
        # Each image is drawn with other seeds.
        seeds = range(number, SEEDS * len(sizes), len(sizes))
        stages_by_seed = {}
        for seed in seeds if 'scores' in model.output_names else seeds[:1]:
            stages = stages_of(model, padded_inputs([draw(seed, *size)], shapes, [original]))
            stages_by_seed[seed] = {name: x[0] for name, x in stages.items()}
        seed = max(stages_by_seed, key=lambda seed: sum_of_scores(stages_by_seed[seed]))
        samples.append(make_sample(model, seed, size, original, stages_by_seed[seed], settings))
    return samples


def sum_of_scores(stages: Arrays) -> float:
    return float(stages['scores'].sum()) if 'scores' in stages else 0.0


def make_sample(
    model: Exportable,
    seed: int,
    size: Size,
    original: Size,
    stages: Arrays,
    settings: Settings,
) -> Sample:
    """The sample of one synthetic image, whose stages are known; see `make_samples`."""
    tolerances = TOLERANCES[settings.dtype]
    outputs = {name: stages[name] for name in model.output_names}
    shapes = {name: np.array(x.shape) for name, x in outputs.items()}
    if model.details.get('masks') == 'image':
        shapes['masks'][1:] = [-(-side // CELL) for side in size]
    outputs = {name: inside(x, shapes[name]) for name, x in outputs.items()}
    sample: Sample = {
        'image': {
            'seed': np.array(seed),
            'size': np.array(size),
            'original': np.array(original),
        },
        'shapes': shapes,
    }
    if is_detection(outputs):
        outputs = {name: x[outputs['labels'] >= 0] for name, x in outputs.items()}
        noisy = noisy_results(model, draw(seed, *size), tolerances)
        sample['ties'] = ties(outputs, noisy, tolerances)
    sample['outputs'] = thinned(outputs)
    return sample


def ties(expected: Arrays, noisy: Iterable[Arrays], tolerances: Tolerances) -> Arrays:
    """The boxes that all images with noise have, and those that some have and `expected` has not:
    a result with which `compare_boxes` finds ties."""
    known = {name: expected[name] for name in ('boxes', 'scores', 'labels')}
    count = len(known['scores'])
    always = set(range(count))
    for result in noisy:
        pairs = matched(known, result, tolerances)
        always &= {row for row, _ in pairs}
        new = sorted(set(range(len(result['scores']))) - {row for _, row in pairs})
        known = {name: np.concatenate([x, result[name][new]]) for name, x in known.items()}
    rows = [*sorted(always), *range(count, len(known['scores']))]
    return {name: x[rows] for name, x in known.items()}


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
