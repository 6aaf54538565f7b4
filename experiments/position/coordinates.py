"""What fails on larger pictures, rotation or counting?

Every model is trained once, and tested twice with the same weights: with coordinates that count
tokens, as in the training, and with coordinates that are scaled to the length of the training.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid.columnar import Column
from cpvt_pyramid.position import FIRE, ALiBi, AttentionPosition, Grid, LearnedPosition, RoPE
from cpvt_pyramid.tooling.files import write_text
from experiments import figures
from experiments.parallel import in_parallel
from experiments.report import LabAnswer, Table
from experiments.statistics import estimate, holm, paired_difference, with_p
from experiments.training import one_thread

from .encodings import MEASURES, protocol, runs_data
from .laboratory import Lab, Trained, Variant, metric_of
from .models import LabModel
from .runs import Result, RunSettings, evaluate_answers, run_all, tuned
from .sizes import SizeTest, bag_percents, canvases, zooms

RESCALE = 2.0  # as in DINOv3 (arXiv 2508.10104)
COUNTED = 'counted'
NORMALIZED = 'normalized'
KINDS = (COUNTED, NORMALIZED)  # of coordinates in a test
ENCODINGS = {
    'learned table': Variant('learned'),
    'RoPE': Variant('rope'),
    'RoPE and PEG': Variant('rope+peg'),
    'FIRE': Variant('fire'),
    'ALiBi': Variant('alibi'),
}


# The encodings, with coordinates that can be scaled


class Coordinates:
    """Rows or columns, in tokens of the training pictures; the first token begins at 0.

    Args:
        side: of the training pictures, in tokens.
        rescale: in training, coordinates are multiplied by a random number from 1 / rescale to
            rescale, one each time that an encoding is used, as in DINOv3.

    Attributes:
        normalized: whether every picture is taken to be as long as those of the training. If not,
            coordinates count its tokens.
    """

    def __init__(self, side: int, rescale: float) -> None:
        self.side = side
        self.rescale = rescale
        self.normalized = False

    def draw(self, is_training: bool) -> float:
        """A factor of the coordinates."""
        if not is_training:
            return 1.0
        return self.rescale ** float(torch.empty(()).uniform_(-1, 1))

    def scale(self, length: int, factor: float) -> float:
        """Coordinates per token, along a side of this length."""
        return factor * self.side / length if self.normalized else factor


class ScaledGrid(Grid):
    """A map whose tokens have scaled coordinates."""

    row_scale: float = 1.0
    column_scale: float = 1.0

    def centers(self, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = super().centers(step, like)
        return (rows + 0.5) * self.row_scale - 0.5, (columns + 0.5) * self.column_scale - 0.5


class ScaledPosition(AttentionPosition):
    """RoPE or ALiBi with scaled coordinates."""

    def __init__(self, encoding: AttentionPosition, coordinates: Coordinates) -> None:
        super().__init__()
        self.encoding = encoding
        self.coordinates = coordinates

    def forward(self, q: Tensor, k: Tensor, grid: Grid, step: int = 1):
        factor = self.coordinates.draw(self.training)
        scaled = ScaledGrid(*grid)
        scaled.row_scale = self.coordinates.scale(grid.height, factor)
        scaled.column_scale = self.coordinates.scale(grid.width, factor)
        return self.encoding(q, k, scaled, step)


class ScaledFIRE(FIRE):
    """FIRE with scaled coordinates, relative to the length of the training pictures. FIRE's own are
    relative to the length of each picture."""

    def __init__(self, heads: int, coordinates: Coordinates) -> None:
        super().__init__(heads)
        self.coordinates = coordinates
        self.factor = 1.0

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        self.factor = self.coordinates.draw(self.training)
        return super().bias(q, grid, step)

    def relative_offsets(self, side: int, lengths: Tensor) -> Tensor:
        offsets = torch.arange(1 - side, side, device=lengths.device)
        scale = self.coordinates.scale(side, self.factor)
        longest = torch.tensor([self.coordinates.side], device=lengths.device)
        return self.psi(offsets * scale)[None] / self.psi(longest)


class ScaledTable(nn.Module):
    """A learned table, read at scaled coordinates. Beyond its border it is that of the border."""

    def __init__(self, table: LearnedPosition, coordinates: Coordinates) -> None:
        super().__init__()
        self.table = table.table  # (1, H, W, C)
        self.mode = table.mode
        self.coordinates = coordinates

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        factor = self.coordinates.draw(self.training)
        height, width = x.shape[1:3]
        places = torch.meshgrid(
            self.places(height, factor, x), self.places(width, factor, x), indexing='ij'
        )
        # `grid_sample` takes x before y, from -1 to 1 across the table.
        sampled = F.grid_sample(
            self.table.permute(0, 3, 1, 2),
            torch.stack(places[::-1], dim=-1)[None],
            self.mode,
            padding_mode='border',
            align_corners=False,
        )
        return x + sampled.permute(0, 2, 3, 1)

    def places(self, length: int, factor: float, like: Tensor) -> Tensor:
        """Where the tokens of a side are, -1 at the beginning of the table and 1 at its end."""
        ahead = torch.arange(length, device=like.device, dtype=like.dtype) + 0.5
        return ahead * self.coordinates.scale(length, factor) * 2 / self.coordinates.side - 1


def scale_coordinates(column: Column, coordinates: Coordinates) -> None:
    """Let the encodings of an untrained model use these coordinates."""
    if isinstance(column.pos_embed, LearnedPosition):
        column.pos_embed = ScaledTable(column.pos_embed, coordinates)
    for block in column.blocks:
        encoding = block.attn.position
        if isinstance(encoding, FIRE):
            scaled = ScaledFIRE(column.arch.heads, coordinates)
            scaled.load_state_dict(encoding.state_dict())
            block.attn.position = scaled
        elif isinstance(encoding, (RoPE, ALiBi)):
            block.attn.position = ScaledPosition(encoding, coordinates)


@dataclass(frozen=True)
class CoordinateSettings(RunSettings):
    """The settings of a run whose coordinates are scaled.

    Args:
        rescale: as in `Coordinates`.
    """

    rescale: float = 1.0

    def build(self) -> LabModel:
        """The untrained model; its `coordinates` are those of all its encodings."""
        model = super().build()
        model.coordinates = Coordinates(self.grids[0], self.rescale)
        scale_coordinates(model.backbone, model.coordinates)
        return model


# The question


class Row(NamedTuple):
    """A trained variant and how it is tested."""

    encoding: str
    is_rescaled: bool
    kind: str

    @property
    def name(self) -> str:
        return f'{training_name(self.encoding, self.is_rescaled)}: {self.kind}'


def training_name(name: str, is_rescaled: bool) -> str:
    return f'{name}, rescaled in training' if is_rescaled else name


Measured = dict[Row, list[dict[str, dict[str, float]]]]  # for each seed, by test and metric


def compare_coordinates(lab: Lab) -> LabAnswer:
    """Rotation or counting: encodings with counted and with normalized coordinates."""
    trained = train_variants(lab)
    cell = trained[0].runs[0].settings.build().cell
    scales = lab.preset.scales
    tests = {**canvases(scales), **zooms(scales, cell)}
    jobs = []
    for one in trained:
        jobs += [(at_both_kinds, (run, tests, lab.preset.scaled_pictures)) for run in one.runs]
    results = iter(in_parallel(jobs, lab.workers, 'coordinates'))
    found: Measured = {}
    for one, (encoding, is_rescaled) in zip(trained, variants_of(lab)):
        of_seeds = [next(results) for _ in one.runs]
        for kind in KINDS:
            found[Row(encoding, is_rescaled, kind)] = [of_seed[kind] for of_seed in of_seeds]
    tables = [accuracy_table(found, tests, metric) for metric in ('position', 'control')]
    if lab.seeds > 1:
        tables.append(kinds_table(found, tests))
        tables.append(rescaling_table(found, tests))
    picture = 'coordinates.png'
    draw(lab.folder / picture, found, scales)
    notes = [
        *protocol(lab),
        'Every model is trained at 6x6 cells and tested twice with the same weights. Counted: '
        'coordinates are in tokens, as in the training. Normalized: they are scaled so that the '
        'picture is as long as those of the training, 6 tokens. At the size of the training the '
        'two are the same. RoPE, FIRE and ALiBi use the coordinates in every attention. The '
        'learned table is read at them, bicubic, and continued beyond its border by its last '
        'entries: normalized, it is the interpolated table of ViT. FIRE is relative to the length '
        'of the training pictures. A PEG has no coordinates.',
        f'"Rescaled in training": coordinates are multiplied by a random number from '
        f'{1 / RESCALE:g} to {RESCALE:g}, uniform in octaves, one for each encoding and step.',
        'Canvas: more or fewer cells of the same size. Zoom: the same picture, resized; the '
        'control task says how much of a loss is that a digit looks different to a token.',
    ]
    title = 'What fails on larger pictures, rotation or counting?'
    data = {'runs': runs_data(trained), 'tests': {row.name: found[row] for row in found}}
    return LabAnswer('coordinates', title, notes, tables, [picture], data)


def variants_of(lab: Lab) -> list[tuple[str, bool]]:
    """Names of encodings, each with and without rescaling."""
    names = lab.preset.coordinates or ENCODINGS
    return [(name, is_rescaled) for name in names for is_rescaled in (False, True)]


def train_variants(lab: Lab) -> list[Trained]:
    """Tune and train all variants, seed by seed."""
    settings = []
    for name, is_rescaled in variants_of(lab):
        common = lab.settings(ENCODINGS[name])
        rescale = RESCALE if is_rescaled else 1.0
        settings.append(CoordinateSettings(**vars(common), rescale=rescale))
    rates = tuned(settings, lab.preset.rates, lab.runs_folder, lab.workers, lab.device)
    todo = []
    for seed in range(lab.seed, lab.seed + lab.seeds):
        todo += [replace(one, lr=lr, seed=seed) for one, lr in zip(settings, rates)]
    done = run_all(todo, lab.runs_folder, lab.workers, lab.device)
    trained = []
    for i, (name, is_rescaled) in enumerate(variants_of(lab)):
        of_seeds = done[i :: len(settings)]
        trained.append(Trained(training_name(name, is_rescaled), ENCODINGS[name], of_seeds))
    return trained


def at_both_kinds(
    result: Result, tests: dict[str, SizeTest], pictures: int
) -> dict[str, dict[str, dict[str, float]]]:
    """The metrics of a trained model, by kind of coordinates and test; kept in a file next to the
    run's."""
    path = result.path.with_name(f'{result.path.stem}-coordinates-{pictures}.json')
    known = json.loads(path.read_text()) if path.exists() else {kind: {} for kind in KINDS}
    todo = {name: test for name, test in tests.items() if name not in known[COUNTED]}
    if todo:
        with one_thread():
            model = result.load()
            for name, test in todo.items():
                scenes = result.settings.draw('test', pictures, 0, test.grid)
                for kind in KINDS:
                    model.coordinates.normalized = kind == NORMALIZED
                    known[kind][name] = evaluate_answers(model, scenes, test.size)
        write_text(path, json.dumps(known))
    return {kind: {name: known[kind][name] for name in tests} for kind in KINDS}


# Tables and figure


def values_of(found: Measured, row: Row, test: str, metric: str = 'position') -> list[float]:
    return [metric_of(of_seed[test], metric) for of_seed in found[row]]


def accuracy_table(found: Measured, tests: dict[str, SizeTest], metric: str) -> Table:
    rows = []
    for row in found:
        cells = [estimate(values_of(found, row, test, metric)).show() for test in tests]
        rows.append([row.name, *cells, str(len(found[row]))])
    return Table(f'{MEASURES[metric]} in %', ['', *tests, 'seeds'], rows)


def kinds_table(found: Measured, tests: dict[str, SizeTest]) -> Table:
    """What normalized coordinates change."""
    pairs = {}
    for row in found:
        if row.kind == NORMALIZED:
            name = training_name(row.encoding, row.is_rescaled)
            pairs[name] = row, row._replace(kind=COUNTED)
    return pairs_table('Normalized less counted coordinates', found, pairs, list(tests))


def rescaling_table(found: Measured, tests: dict[str, SizeTest]) -> Table:
    """What rescaling in training changes."""
    pairs = {}
    for row in found:
        if row.is_rescaled:
            pairs[f'{row.encoding}: {row.kind}'] = row, row._replace(is_rescaled=False)
    return pairs_table('With less without rescaling in training', found, pairs, list(tests))


def pairs_table(
    title: str, found: Measured, pairs: dict[str, tuple[Row, Row]], tests: Sequence[str]
) -> Table:
    """The differences of pairs of rows in the tasks that need position."""
    differences = {}
    for name, (row, base) in pairs.items():
        for test in tests:
            values, of_base = values_of(found, row, test), values_of(found, base, test)
            differences[name, test] = paired_difference(values, of_base)
    adjusted = holm([one.p for one in differences.values()])
    shown = {key: with_p(one, p) for (key, one), p in zip(differences.items(), adjusted)}
    rows = [[name, *(shown[name, test] for test in tests)] for name in pairs]
    count = sum(not math.isnan(p) for p in adjusted)
    title = f'{title}, in points, paired by seed (p, adjusted for {count} comparisons, Holm)'
    return Table(title, ['', *tests], rows)


def draw(path: Path, found: Measured, scales: Sequence[float]) -> None:
    """A column for each encoding: canvases above, zoomed pictures below."""
    names = list(dict.fromkeys(row.encoding for row in found))
    looks = {
        (False, COUNTED): dict(color=figures.GREY, marker='o'),
        (True, COUNTED): dict(color=figures.GREY, marker='s', ls='--'),
        (False, NORMALIZED): dict(color=figures.BLUE, marker='o'),
        (True, NORMALIZED): dict(color=figures.BLUE, marker='s', ls='--'),
    }
    size = (2.6 * len(names), 5.6)
    grid = dict(sharex=True, sharey=True)
    with figures.figure(path, 2, len(names), size, **grid) as (fig, axes):
        for kind, of_kind in zip(('canvas', 'zoom'), axes):
            for name, axis in zip(names, of_kind):
                lines = []
                for (is_rescaled, coordinates), look in looks.items():
                    row = Row(name, is_rescaled, coordinates)
                    columns = [values_of(found, row, f'{kind} {s:g}') for s in scales]
                    label = training_name(coordinates, is_rescaled)
                    values = 100 * np.transpose(columns)
                    lines += figures.curve(axis, scales, values, label=label, **look)
                if kind == 'canvas':
                    axis.set_title(name)
                    label = 'ceiling of a bag of patches'
                    bag = bag_percents(scales)
                    lines += axis.plot(scales, bag, ':', color='black', lw=1, label=label)
                    legend = lines
                figures.of_sizes(axis, scales)
                axis.set_ylim(0, 100)
            of_kind[0].set_ylabel(f'{kind}: position tasks, %')
        figures.legend_below(fig, legend, 3)
        fig.suptitle(
            'Trained at 6x6 cells, tested at other sizes (1 = 6x6) with the same weights: mean '
            'and 95% interval'
        )
