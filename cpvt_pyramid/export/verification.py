"""The comparison of an exported graph with PyTorch, on real images, before a file is written.

Maps and logits are compared with those of the exportable model in PyTorch, in the same batch. The
outputs are compared with those of the original model for each image alone, so that a wrong result
in a padded batch is found, too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..tooling.report import markdown_table
from .base import Exportable

Runner = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]

# Height and width of the images of each batch: sizes that the graph was not captured at, odd ones,
# less than a window, more than 1333, batches of one and of three, with padding and without.
BATCHES = (
    ((256, 320),),
    ((201, 333),),
    ((211, 1341),),
    ((33, 47),),
    ((160, 213), (213, 160), (97, 130)),
    ((224, 192), (224, 192), (224, 192)),
)


class Tolerances(NamedTuple):
    """How much the graph may differ from PyTorch."""

    maps: float  # maps and logits: largest difference / largest value
    boxes: float  # of a box, in pixels
    scores: float  # of a score or probability
    pixels: float  # share of the pixels with another label, where two classes are equally likely
    # Of the images in which ties are looked for, see `Comparison.boxes`; standard deviation, of
    # pixels from 0 to 255
    noise: float


TOLERANCES = {
    torch.float32: Tolerances(maps=1e-3, boxes=0.1, scores=1e-3, pixels=1e-3, noise=0.01),
    torch.float16: Tolerances(maps=5e-2, boxes=2.0, scores=2e-2, pixels=2e-2, noise=1.0),
}
NOISY_IMAGES = 64  # enough to see a result of one image in twenty


class Check(NamedTuple):
    """One comparison of the report."""

    sizes: list[str]  # of the images of the batch, such as '160x213'
    stage: str  # what was compared: the name of a stage or an output
    error: float  # the measured difference
    tolerance: float  # the largest difference allowed
    unit: str  # of both
    note: str = ''  # such as the number of boxes

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


def batches_for(size: Optional[tuple[int, int]], has_valid: bool) -> list[list[tuple[int, int]]]:
    """The sizes of the images of each batch.

    Args:
        size: H and W of the graph, if they are fixed.
        has_valid: whether the graph takes padded batches.
    """
    if size is None:
        return [list(sizes) for sizes in BATCHES if has_valid or len(set(sizes)) == 1]
    height, width = size
    if not has_valid:
        return [[size], [size] * 3]
    odd = max(height * 2 // 3 | 1, 1), max(width - 7, 1)
    return [[size], [odd], [size, odd, (height, max(width // 2, 1))], [size] * 3]


def verify(
    model: Exportable,
    run: Runner,
    images: Sequence[np.ndarray],
    size: Optional[tuple[int, int]] = None,
    has_valid: bool = True,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[Sequence], Sequence] = list,
) -> list[Check]:
    """Compare a graph with the model in PyTorch.

    Args:
        model: the exportable model in float32.
        run: the graph: from inputs to stages and outputs, by name.
        images: (H, W, 3) RGB, resized to the sizes of the batches, in turn.
        size: H and W of the graph, if they are fixed.
        has_valid: whether the graph takes padded batches.
        dtype: of the weights in the graph, on which the tolerances depend.
        progress: wraps the batches, such as `tqdm`.

    Returns:
        All comparisons, also those that failed.
    """
    checks, turn = [], 0
    for sizes in progress(batches_for(size, has_valid)):
        alone = [resized(images[(turn + i) % len(images)], *s) for i, s in enumerate(sizes)]
        turn += len(sizes)
        height, width = size or map(max, zip(*sizes))
        batch = torch.zeros(len(sizes), 3, height, width)
        for place, image in zip(batch, alone):
            place[:, : image.shape[2], : image.shape[3]] = image
        valid = torch.tensor(sizes) if has_valid else None
        inputs = {'images': batch.numpy()} | ({'valid': valid.numpy()} if has_valid else {})
        found = {name: torch.from_numpy(np.asarray(x)) for name, x in run(inputs).items()}
        with torch.no_grad():
            expected = model.stages(batch, valid)
            references = [model.reference(image) for image in alone]
        names = [f'{h}x{w}' for h, w in sizes]
        compare = Comparison(names, TOLERANCES[dtype])
        for name in expected:
            if name not in model.output_names or name not in references[0]:
                if name in found:
                    compare.tensors(name, found[name], expected[name])
        for i, reference in enumerate(references):
            ours = {name: found[name][i] for name in model.output_names}
            theirs = {name: x[0] for name, x in reference.items()}
            compare.outputs(model, ours, theirs, alone[i])
        checks += compare.worst()
    return checks


class Comparison:
    """The comparisons of one batch, whose images have these sizes."""

    def __init__(self, sizes: list[str], tolerances: Tolerances) -> None:
        self.sizes = sizes
        self.tolerances = tolerances
        self.checks: list[Check] = []

    def worst(self) -> list[Check]:
        """For each stage, the comparison of the image with the largest error."""
        result: dict[tuple[str, str], Check] = {}
        for check in self.checks:
            key = check.stage, check.unit
            if key not in result or not check.error <= result[key].error:  # NaN is the worst
                result[key] = check
        return list(result.values())

    def add(self, stage: str, error: float, tolerance: float, unit: str, note: str = '') -> None:
        self.checks.append(Check(self.sizes, stage, float(error), tolerance, unit, note))

    def tensors(self, name: str, found: Tensor, expected: Tensor) -> None:
        """Maps and logits, the padding included."""
        if found.shape != expected.shape:
            shapes = f'{tuple(found.shape)} instead of {tuple(expected.shape)}'
            return self.add(name, float('nan'), self.tolerances.maps, 'relative', shapes)
        scale = expected.float().abs().max().clamp(min=1e-6)
        error = (found.float() - expected.float()).abs().max() / scale
        self.add(name, error, self.tolerances.maps, 'relative')

    def outputs(
        self,
        model: Exportable,
        found: dict[str, Tensor],
        expected: dict[str, Tensor],
        image: Tensor,
    ) -> None:
        """The outputs for one image, of the graph and of the original model alone."""
        if 'boxes' in expected:
            return self.boxes(found, expected, noisy_results(model, image, self.tolerances.noise))
        for name, x in expected.items():
            own = found[name][tuple(slice(n) for n in x.shape)]
            if name == 'labels':
                share = (own != x).double().mean()
                self.add(name, share, self.tolerances.pixels, 'share of pixels')
            elif name == 'probabilities':
                error = (own.float() - x.float()).abs().max()
                self.add(name, error, self.tolerances.scores, 'probability')
            else:
                self.tensors(name, own, x)

    def boxes(
        self,
        found: dict[str, Tensor],
        expected: dict[str, Tensor],
        noisy: Iterable[dict[str, Tensor]],
    ) -> None:
        """Boxes, scores, labels and masks of the graph and of the original model, the latter also
        from images with noise.

        Rows of equal scores may be in another order. Each box must have a counterpart, unless it is
        a tie: one that the original model returns from some images with a little noise and not from
        others. Rounding decides then whether its score is among the best, or whether another box
        suppresses it.
        """
        used = found['labels'] >= 0
        found = {name: x[used] for name, x in found.items()}
        pairs = matched(found, expected, self.tolerances)
        extra = set(range(len(found['scores']))) - {row for row, _ in pairs}
        lost = set(range(len(expected['scores']))) - {row for _, row in pairs}
        alone, noisy = len(extra) + len(lost), iter(noisy)
        while (extra or lost) and (result := next(noisy, None)):
            extra -= {row for row, _ in matched(found, result, self.tolerances)}
            lost &= {row for row, _ in matched(expected, result, self.tolerances)}
        wrong = len(extra) + len(lost)
        ties = alone - wrong
        note = f'{len(expected["scores"])} boxes' + f', {ties} tie{"s" * (ties > 1)}' * (ties > 0)
        self.add('boxes', wrong, 0, 'without counterpart', note)
        if not pairs:
            return
        ours, theirs = map(list, zip(*pairs))
        for name, tolerance, unit in (
            ('boxes', self.tolerances.boxes, 'pixels'),
            ('scores', self.tolerances.scores, 'probability'),
        ):
            error = (found[name][ours] - expected[name][theirs]).abs().max()
            self.add(name, error, tolerance, unit, note)
        if 'masks' in expected:
            differ = (found['masks'][ours] >= 0.5) != (expected['masks'][theirs] >= 0.5)
            share = differ.double().mean()
            self.add('masks', share, self.tolerances.pixels, 'share of pixels', note)


def matched(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerances: Tolerances
) -> list[tuple[int, int]]:
    """Rows of detections that are the same: of one label, closest in box and score."""
    pairs, free = [], set(range(len(found['scores'])))
    for row in range(len(expected['scores'])):
        distance = (found['boxes'] - expected['boxes'][row]).abs().amax(-1)
        close = (distance <= tolerances.boxes) & (found['labels'] == expected['labels'][row])
        close &= (found['scores'] - expected['scores'][row]).abs() <= tolerances.scores
        candidates = [i for i in close.nonzero().flatten().tolist() if i in free]
        if candidates:
            best = min(candidates, key=lambda i: float(distance[i]))
            free.remove(best)
            pairs.append((best, row))
    return pairs


def noisy_results(model: Exportable, image: Tensor, noise: float) -> Iterator[dict[str, Tensor]]:
    """The outputs of the original model for an image (1, 3, H, W) with noise, always the same."""
    random = torch.Generator().manual_seed(0)
    for _ in range(NOISY_IMAGES):
        with torch.no_grad(), model.with_noise(noise / 255, random):
            result = model.reference(image + noise * torch.randn(image.shape, generator=random))
        yield {name: x[0] for name, x in result.items()}


def resized(image: np.ndarray, height: int, width: int) -> Tensor:
    """(1, 3, height, width) float32 from 0 to 255, of an image (H, W, 3) RGB."""
    small = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)[None].float()


def write_report(path: Path, about: dict[str, Any], checks: Sequence[Check]) -> list[Path]:
    """Write the report next to a model: NAME.report.json and NAME.report.md; returns both paths.

    Args:
        path: of the model.
        about: the metadata of the model.
        checks: all comparisons.
    """
    failed = [check for check in checks if not check.passed]
    result = {
        'model': path.name,
        'passed': not failed,
        'about': {k: v for k, v in about.items() if k not in ('classes', 'palette')},
        'checks': [check._asdict() | {'passed': check.passed} for check in checks],
    }
    data, table = path.with_suffix('.report.json'), path.with_suffix('.report.md')
    data.write_text(json.dumps(result, indent=1) + '\n')
    head = ['images', 'stage', 'difference', 'tolerance', 'unit', '', 'passed']
    rows = [
        [' '.join(check.sizes), check.stage, f'{check.error:.2g}', f'{check.tolerance:.2g}',
         check.unit, check.note, 'yes' if check.passed else '**no**']
        for check in checks
    ]  # fmt: skip
    lines = [
        f'# {path.name}\n',
        f'{len(checks) - len(failed)} of {len(checks)} comparisons with PyTorch passed. Maps and '
        'logits: with the same batch; outputs: with each image alone. Each row is the largest '
        'difference in the batch.\n',
        markdown_table(head, rows) + '\n',
    ]
    table.write_text('\n'.join(lines))
    return [data, table]
