"""Do the answers of Twins-SVT survive a shift? And with polyphase anchoring (arXiv 2306.07470)?

Patches and windows begin at a corner of the image, so that a shift by a pixel changes what is in
them. Anchored ones begin where the content says, and move with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn

from cpvt_pyramid.archs import Arch
from cpvt_pyramid.layers import WindowAttention
from cpvt_pyramid.position import Grid
from cpvt_pyramid.pyramid import CPVTPyramid
from experiments import figures
from experiments.report import LabAnswer, Table, paired_table
from experiments.statistics import estimate
from experiments.training import one_thread

from .border import Border, exchange_borders
from .classifiers import ClassifierSettings, normalized, resized
from .encodings import runs_data
from .fashion import CLASSES, Photos
from .laboratory import Lab, Variant
from .runs import Result

SVT = Arch((32, 64), (1, 2), (2, 2), (2, 2), sr_ratios=(4, 2), window=4, stage_norm=True)
FRAME = 64  # side of the images in pixels, a multiple of all patches and windows
PHOTO = 48  # side of the photograph in them; the rest is black, as its background
SHIFT = (FRAME - PHOTO) // 2  # pixels from the middle, at most
TIMES = 30  # shifts of each test photograph, as many as in the paper's worst case
BATCH = 256  # images of the evaluation
PLAIN, ANCHORED = 'as published', 'anchored'
TESTS = (PLAIN, ANCHORED)
TRAININGS = {
    PLAIN: {},
    'shifted in training': dict(shifted=True),
    ANCHORED: dict(anchored=True),
}
MEASURES = {
    'accuracy': 'in the middle',
    'shifted': 'shifted, mean',
    'worst': f'right at all of {TIMES} shifts',
    'same': 'answers that a shift keeps',
}
Found = dict[str, list[dict[str, dict[str, float]]]]  # by training, seed, test and measure


# Polyphase anchoring


@dataclass
class Anchoring:
    """Whether a model is anchored; all its parts have the same one.

    Attributes:
        is_on: patches and windows begin at the anchor of each image, and maps are continued
            around PEGs by their other side. Else, the model is that of the package.
        around: what is around the maps of PEGs.
    """

    is_on: bool = False
    around: Border = field(default_factory=lambda: Border('zeros'))

    def turn(self, is_on: bool) -> None:
        """Switch anchoring on or off."""
        self.is_on = is_on
        self.around.kind = 'circular' if is_on else 'zeros'


def anchors(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where the cells of each image begin: the row and the column, (B,), below `size`.

    Of the size * size grids of tokens (B, H, W, C) that are `size` apart, it is that with the
    largest norm.
    """
    energy = x.detach().double().square().sum(-1)
    by_phase = energy.unflatten(2, (-1, size)).unflatten(1, (-1, size)).sum((1, 3))
    largest = by_phase.flatten(1).argmax(1)
    return largest // size, largest % size


def roll(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Tokens (B, H, W, C) of which each image begins at its row and column (B,), cyclically."""
    b, h, w, _ = x.shape
    rows = (torch.arange(h, device=x.device) + rows[:, None]) % h
    columns = (torch.arange(w, device=x.device) + columns[:, None]) % w
    image = torch.arange(b, device=x.device)[:, None, None]
    return x[image, rows[:, :, None], columns[:, None]]


class Anchored(nn.Module):
    """A part of a model whose cells can begin at the anchor of each image.

    Args:
        part: the part.
        size: side of its cells, which divides the map.
        anchoring: whether it is on.
    """

    def __init__(self, part: nn.Module, size: int, anchoring: Anchoring) -> None:
        super().__init__()
        self.part = part
        self.size = size
        self.anchoring = anchoring


class AnchoredPatches(Anchored):
    """A patch embedding. The map that it makes begins at the anchor."""

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> tuple[Tensor, Optional[Tensor]]:
        if self.anchoring.is_on:
            x = roll(x, *anchors(x, self.size))
        return self.part(x, mask)


class AnchoredBlock(Anchored):
    """A block, whose windows, or sub-sampled keys, begin at the anchor."""

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if not self.anchoring.is_on:
            return self.part(x, grid)
        rows, columns = anchors(x, self.size)
        x = self.part(roll(x, rows, columns), grid)
        return roll(x, -rows, -columns)


def make_anchorable(backbone: CPVTPyramid) -> Anchoring:
    """Prepare an untrained pyramid, for images without padding.

    Returns:
        The switch of its anchoring.
    """
    anchoring = Anchoring()
    for i, (patches, blocks) in enumerate(zip(backbone.patch_embeds, backbone.blocks)):
        backbone.patch_embeds[i] = AnchoredPatches(patches, patches.size, anchoring)
        for j, block in enumerate(blocks):
            attention = block.attn
            is_window = isinstance(attention, WindowAttention)
            size = attention.window if is_window else attention.sr_ratio
            blocks[j] = AnchoredBlock(block, size, anchoring)
    exchange_borders(backbone.pos_block, anchoring.around)
    return anchoring


# The classifiers


class ShiftedClassifier(nn.Module):
    """Twins-SVT that classifies photographs by the mean of its last map.

    Attributes:
        anchoring: the switch of its anchoring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = CPVTPyramid(SVT, in_channels=1, out_indices=range(len(SVT.dims)))
        self.anchoring = make_anchorable(self.backbone)
        self.head = nn.Linear(self.backbone.channels[-1], CLASSES)

    @property
    def blocks(self) -> nn.ModuleList:
        """All transformer blocks, by stage."""
        return self.backbone.blocks

    def forward(self, image: Tensor) -> Tensor:
        """The logits (B, CLASSES) of images (B, 1, H, W)."""
        return self.head(self.backbone(image)[-1].mean((2, 3)))


@dataclass(frozen=True)
class AnchoringSettings(ClassifierSettings):
    """All that determines the training of a classifier of photographs in a black frame.

    Args:
        anchored: train with anchoring.
        shifted: shift each training photograph at random, as those of the test are; else all are
            in the middle.
    """

    model: str = 'svt'
    class_token: bool = False
    anchored: bool = False
    shifted: bool = False

    def build(self) -> ShiftedClassifier:
        """The untrained model, anchored or not."""
        torch.manual_seed(self.seed)
        model = ShiftedClassifier()
        model.anchoring.turn(self.anchored)
        return model

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """The images (B, 1, FRAME, FRAME) of a training step and their classes."""
        photos, labels = super().draw(step)
        shifts = None
        if self.shifted:
            shifts = draw_shifts(len(photos), np.random.default_rng((self.seed, step)))
        return framed(photos, shifts), labels

    def evaluate(self, model: ShiftedClassifier) -> dict[str, float]:
        """The accuracy of a model in evaluation mode, without shifts."""
        photos = self.test_photos(self.pictures)
        right = answers(model, framed(photos.images)) == photos.labels
        return {'accuracy': float(right.double().mean())}


def draw_shifts(count: int, generator: np.random.Generator) -> np.ndarray:
    """Shifts (count, 2) down and right, in pixels."""
    return generator.integers(-SHIFT, SHIFT, size=(count, 2), endpoint=True)


def framed(photos: Tensor, shifts: Optional[np.ndarray] = None) -> Tensor:
    """Photographs (N, 1, h, w) of bytes, enlarged, in a black frame: (N, 1, FRAME, FRAME).

    Args:
        photos: the photographs.
        shifts: (N, 2), pixels from the middle, down and right; none by default.
    """
    enlarged = resized(photos, PHOTO)
    images = photos.new_zeros(len(photos), 1, FRAME, FRAME)
    images[..., SHIFT:-SHIFT, SHIFT:-SHIFT] = enlarged
    if shifts is None:
        return images
    return torch.stack([image.roll(tuple(by), (1, 2)) for image, by in zip(images, shifts)])


@torch.no_grad()
def answers(model: ShiftedClassifier, images: Tensor) -> Tensor:
    """The classes (N,) that a model finds in images of bytes."""
    return torch.cat([model(normalized(part)).argmax(1) for part in images.split(BATCH)])


# The question


def compare_anchoring(lab: Lab) -> LabAnswer:
    """Twins-SVT under shifts, as published, trained with shifts, and anchored."""
    preset = lab.preset
    settings = []
    for options in TRAININGS.values():
        settings.append(
            AnchoringSettings(
                steps=preset.steps,
                batch=preset.batch,
                pictures=preset.pictures,
                resized=preset.scaled_pictures,
                data=lab.data,
                seed=lab.seed,
                **options,
            )
        )
    variants = dict.fromkeys(TRAININGS, Variant('peg', class_token=False))
    trained = lab.train_with(variants, settings, lambda metrics: metrics['accuracy'])
    found = lab.measure(trained, 'shifts', under_shifts)
    tables = [metrics_table(found)]
    if lab.seeds > 1:
        tables.append(changes_table(found))
    picture = 'anchoring.png'
    panels = figures.Panels()
    for name, of_seeds in found.items():
        for measure, title in MEASURES.items():
            by_test = {f'tested {test}': values_of(of_seeds, test, measure) for test in TESTS}
            panels.add(f'{title}, %', f'trained: {name}', by_test)
    panels.draw(lab.folder / picture, 'Twins-SVT under shifts')
    notes = [
        f'Fashion-MNIST, enlarged to {PHOTO} pixels, in black frames of {FRAME}. Twins-SVT with '
        f'two stages of two blocks, windows of {SVT.window} tokens, {SVT.dims[0]} and '
        f'{SVT.dims[1]} channels, and GAP. {preset.steps} steps of {preset.batch} photographs, '
        f'Muon and AdamW; of {len(preset.rates)} learning rates, each training has its best, with '
        'a seed and photographs that no table has.',
        'Anchored: of the grids in which patches, windows and sub-sampled keys can lie, each image '
        'takes that with the largest norm, and a map goes on at its other side (PEGs). Shifted in '
        f'training: by up to {SHIFT} pixels, as in the test. "As published" is the model of the '
        'package. Every model is tested in both ways with the same weights.',
        f'Each of {preset.scaled_pictures} test photographs for each seed is shifted {TIMES} times '
        f'at random, by up to {SHIFT} pixels down or up, and right or left: the object stays '
        'whole. "Answers that a shift keeps" are those of the photograph in the middle.',
        'Published: Twins falls from 80.6 to 62.4 % in the worst of some shifts, and keeps all its '
        'answers anchored (arXiv 2306.07470).',
    ]
    title = 'Do the answers of Twins-SVT survive a shift?'
    data = {'runs': runs_data(trained), 'tests': found}
    return LabAnswer('anchoring', title, notes, tables, [picture], data)


def under_shifts(result: Result) -> dict[str, dict[str, float]]:
    """The measures of a trained model, as published and anchored."""
    settings: Any = result.settings  # of this question
    photos = settings.test_photos(settings.resized)
    found = {}
    with one_thread():
        model = result.load()
        for test in TESTS:
            model.anchoring.turn(test == ANCHORED)
            found[test] = measure(model, photos, settings.seed)
    return found


def measure(model: ShiftedClassifier, photos: Photos, seed: int) -> dict[str, float]:
    """The `MEASURES` of a model in evaluation mode."""
    in_the_middle = answers(model, framed(photos.images))
    shifted = torch.stack(list(answers_to_shifted(model, photos.images, seed)))  # (TIMES, N)
    right = shifted == photos.labels
    shares = {
        'accuracy': in_the_middle == photos.labels,
        'shifted': right,
        'worst': right.all(0),
        'same': shifted == in_the_middle,
    }
    return {name: float(share.double().mean()) for name, share in shares.items()}


def answers_to_shifted(model: ShiftedClassifier, photos: Tensor, seed: int) -> Iterator[Tensor]:
    """The answers (N,) to photographs, each of which is shifted at random, `TIMES` times."""
    generator = np.random.default_rng(seed)
    for _ in range(TIMES):
        yield answers(model, framed(photos, draw_shifts(len(photos), generator)))


# Tables


def values_of(of_seeds: Sequence[dict], test: str, name: str) -> list[float]:
    return [of_seed[test][name] for of_seed in of_seeds]


def metrics_table(found: Found) -> Table:
    rows = []
    for training, of_seeds in found.items():
        for test in TESTS:
            cells = [estimate(values_of(of_seeds, test, name)).show() for name in MEASURES]
            rows.append([f'trained: {training}, tested: {test}', *cells, str(len(of_seeds))])
    return Table('Photographs, in %', ['', *MEASURES.values(), 'seeds'], rows)


def changes_table(found: Found) -> Table:
    """What differs from a model that is trained and tested as published."""
    pairs = {}
    for training, of_seeds in found.items():
        for test in TESTS:
            if (training, test) == (PLAIN, PLAIN):
                continue
            row = f'trained: {training}, tested: {test}'
            pairs[row] = []
            for name in MEASURES:
                values = values_of(of_seeds, test, name)
                pairs[row].append((values, values_of(found[PLAIN], PLAIN, name)))
    title = f'Change from a model trained and tested {PLAIN}'
    return paired_table(title, list(MEASURES.values()), pairs)
