"""What fails on larger pictures, rotation or counting?

Every model is trained once, and tested twice with the same weights: with coordinates that count
tokens, as in the training, and with coordinates that are scaled to the length of the training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid.columnar import Column
from cpvt_pyramid.position import FIRE, ALiBi, AttentionPosition, Grid, LearnedPosition, RoPE
from cpvt_pyramid.pyramid import CPVTPyramid
from experiments import figures
from experiments.report import LabAnswer, Table, paired_table
from experiments.statistics import estimate

from .encodings import MEASURES, protocol, runs_data
from .laboratory import RESCALE, Lab, Preset, Variant
from .models import CELLS, LabModel
from .runs import RunSettings
from .sizes import Found, bag_percents, canvases, percents_by_scale, tested, values_of, zooms

COUNTED = 'counted'
NORMALIZED = 'normalized'
LEAST_WIDTH = 8.5  # of the figure, for its title
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
        rescale: in training, coordinates are multiplied by a random number from 1 / rescale to
            rescale, one each time that an encoding is used, as in DINOv3.

    Attributes:
        normalized: whether every picture is taken to be as long as those of the training. If not,
            coordinates count its tokens.
    """

    def __init__(self, rescale: float) -> None:
        self.rescale = rescale
        self.normalized = False

    def draw(self, is_training: bool) -> float:
        """A factor of the coordinates."""
        if not is_training:
            return 1.0
        return self.rescale ** float(torch.empty(()).uniform_(-1, 1))

    def scale(self, length: int, trained: int, factor: float) -> float:
        """Coordinates per token, along a side of `length` tokens, of a map that has `trained` of
        them in the training."""
        return factor * trained / length if self.normalized else factor


class ScaledGrid(Grid):
    """A map whose tokens have scaled coordinates."""

    row_scale: float = 1.0
    column_scale: float = 1.0

    def centers(self, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = super().centers(step, like)
        return (rows + 0.5) * self.row_scale - 0.5, (columns + 0.5) * self.column_scale - 0.5


class ScaledPosition(AttentionPosition):
    """RoPE or ALiBi with scaled coordinates.

    Args:
        encoding: with coordinates of its own.
        coordinates: those to use.
        side: of the map in the training, in tokens.
    """

    def __init__(self, encoding: AttentionPosition, coordinates: Coordinates, side: int) -> None:
        super().__init__()
        self.encoding = encoding
        self.coordinates = coordinates
        self.side = side

    def forward(self, q: Tensor, k: Tensor, grid: Grid, step: int = 1):
        factor = self.coordinates.draw(self.training)
        scaled = ScaledGrid(*grid)
        scaled.row_scale = self.coordinates.scale(grid.height, self.side, factor)
        scaled.column_scale = self.coordinates.scale(grid.width, self.side, factor)
        return self.encoding(q, k, scaled, step)


class ScaledFIRE(FIRE):
    """FIRE with scaled coordinates, relative to the length of the training pictures. FIRE's own are
    relative to the length of each picture."""

    def __init__(self, heads: int, coordinates: Coordinates, side: int) -> None:
        super().__init__(heads)
        self.coordinates = coordinates
        self.side = side
        self.factor = 1.0

    def bias(self, q: Tensor, grid: Grid, step: int) -> Tensor:
        self.factor = self.coordinates.draw(self.training)
        return super().bias(q, grid, step)

    def relative_offsets(self, side: int, lengths: Tensor) -> Tensor:
        offsets = torch.arange(1 - side, side, device=lengths.device)
        scale = self.coordinates.scale(side, self.side, self.factor)
        longest = torch.tensor([self.side], device=lengths.device)
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
        side = self.table.shape[1]  # an entry for each token of the training
        return ahead * self.coordinates.scale(length, side, factor) * 2 / side - 1


def scale_coordinates(
    backbone: Union[Column, CPVTPyramid], coordinates: Coordinates, side: int
) -> None:
    """Let the encodings of an untrained model use these coordinates.

    Args:
        backbone: the model.
        coordinates: of all its maps.
        side: of the training pictures, in pixels.
    """
    if isinstance(backbone, Column):
        backbone.pos_embed = scaled_added(backbone.pos_embed, coordinates)
        scale_blocks(backbone.blocks, coordinates, side // backbone.arch.patch_size)
        return
    stride = 1
    for i, patches in enumerate(backbone.patch_embeds):
        stride *= patches.size
        backbone.pos_embeds[i] = scaled_added(backbone.pos_embeds[i], coordinates)
        scale_blocks(backbone.blocks[i], coordinates, side // stride)


def scaled_added(encoding: nn.Module, coordinates: Coordinates) -> nn.Module:
    """An encoding that is added to tokens; a table with scaled coordinates."""
    if isinstance(encoding, LearnedPosition):
        return ScaledTable(encoding, coordinates)
    return encoding


def scale_blocks(blocks: nn.ModuleList, coordinates: Coordinates, side: int) -> None:
    """Scale the coordinates in all attentions, for a training side in tokens."""
    for block in blocks:
        encoding = block.attn.position
        if isinstance(encoding, FIRE):
            scaled = ScaledFIRE(block.attn.heads, coordinates, side)
            scaled.load_state_dict(encoding.state_dict())
            block.attn.position = scaled
        elif isinstance(encoding, (RoPE, ALiBi)):
            block.attn.position = ScaledPosition(encoding, coordinates, side)


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
        model.coordinates = Coordinates(self.rescale)
        scale_coordinates(model.backbone, model.coordinates, self.grids[0] * model.cell)
        return model


# The question


def compare_coordinates(lab: Lab) -> LabAnswer:
    """Rotation or counting: encodings with counted and with normalized coordinates."""
    (model,) = lab.preset.models
    names = list(lab.preset.coordinates or ENCODINGS)
    variants = {}
    settings = []
    for name in names:
        for rescale in lab.preset.rescales:
            variants[training_name(name, rescale)] = ENCODINGS[name]
            common = lab.settings(ENCODINGS[name], model)
            settings.append(CoordinateSettings(**vars(common), rescale=rescale))
    trained = lab.train_with(variants, settings)
    scales = lab.preset.scales
    cell = CELLS[model]
    sizes = {**canvases(scales), **zooms(scales, cell)}
    tests = {}
    for kind in KINDS:
        for size, test in sizes.items():
            tests[f'{kind} {size}'] = test._replace(normalized=kind == NORMALIZED)
    found = tested(lab, trained, tests, 'coordinates')
    # At the size of the training, zooms are canvases, and normalized coordinates are counted ones.
    other_scales = [scale for scale in scales if scale != 1]
    others = [*canvases(other_scales), *zooms(other_scales, cell)]
    shown = [*canvases(scales), *zooms(other_scales, cell)]
    tables = [accuracy_table(found, shown, metric) for metric in ('position', 'control')]
    if lab.seeds > 1:
        tables.append(kinds_table(found, others))
        if RESCALE in lab.preset.rescales:
            tables.append(rescaling_table(found, names, shown))
    picture = 'coordinates.png'
    draw(lab.folder / picture, found, names, lab.preset)
    notes = [
        *protocol(lab),
        'Every model is trained at 6x6 cells and tested twice with the same weights. Counted: '
        'coordinates are in tokens, as in the training. Normalized: they are scaled so that the '
        'picture is as long as those of the training, 6 tokens. At the size of the training the '
        'two are the same. RoPE, FIRE and ALiBi use the coordinates in every attention. The '
        'learned table is read at them, bicubic, and continued beyond its border by its last '
        'entries: normalized, it is the interpolated table of ViT. FIRE is relative to the length '
        'of the training pictures. A PEG has no coordinates.',
        'Canvas: more or fewer cells of the same size. Zoom: the same picture, resized; the '
        'control task says how much of a loss is that a digit looks different to a token.',
    ]
    if RESCALE in lab.preset.rescales:
        notes.append(
            f'"Rescaled in training": coordinates are multiplied by a random number from '
            f'{1 / RESCALE:g} to {RESCALE:g}, uniform in octaves, one for each encoding and step.'
        )
    title = 'What fails on larger pictures, rotation or counting?'
    data = {'runs': runs_data(trained), 'tests': found}
    return LabAnswer('coordinates', title, notes, tables, [picture], data)


def training_name(name: str, rescale: float) -> str:
    """The name of an encoding that is trained with this rescaling; 1: without."""
    return name if rescale == 1 else f'{name}, rescaled in training'


# Tables and figure


def accuracy_table(found: Found, sizes: Sequence[str], metric: str) -> Table:
    rows = []
    for name, of_seeds in found.items():
        for kind in KINDS:
            cells = []
            for size in sizes:
                cells.append(estimate(values_of(of_seeds, f'{kind} {size}', metric)).show())
            rows.append([f'{name}: {kind}', *cells, str(len(of_seeds))])
    return Table(f'{MEASURES[metric]} in %', ['', *sizes, 'seeds'], rows)


class Compared(NamedTuple):
    """A trained variant and its coordinates in the tests."""

    name: str
    kind: str


def kinds_table(found: Found, sizes: Sequence[str]) -> Table:
    """What normalized coordinates change."""
    pairs = {name: (Compared(name, NORMALIZED), Compared(name, COUNTED)) for name in found}
    return pairs_table('Normalized less counted coordinates', found, pairs, sizes)


def rescaling_table(found: Found, names: Sequence[str], sizes: Sequence[str]) -> Table:
    """What rescaling in training changes."""
    pairs = {}
    for name in names:
        for kind in KINDS:
            rescaled = Compared(training_name(name, RESCALE), kind)
            pairs[f'{name}: {kind}'] = rescaled, Compared(name, kind)
    return pairs_table('With less without rescaling in training', found, pairs, sizes)


def pairs_table(
    title: str,
    found: Found,
    pairs: dict[str, tuple[Compared, Compared]],
    sizes: Sequence[str],
) -> Table:
    """The differences of pairs in the tasks that need position."""

    def values(one: Compared, size: str) -> list[float]:
        return values_of(found[one.name], f'{one.kind} {size}', 'position')

    compared = {}
    for row, (one, base) in pairs.items():
        compared[row] = [(values(one, size), values(base, size)) for size in sizes]
    return paired_table(title, sizes, compared)


def draw(path: Path, found: Found, names: Sequence[str], preset: Preset) -> None:
    """A column for each encoding: canvases above, zoomed pictures below."""
    scales = preset.scales
    colors = {COUNTED: figures.GREY, NORMALIZED: figures.BLUE}
    dashes = {1.0: dict(marker='o'), RESCALE: dict(marker='s', ls='--')}
    looks = {rescale: dashes[rescale] for rescale in preset.rescales}
    size = (max(2.6 * len(names), LEAST_WIDTH), 5.6)
    grid = dict(sharex=True, sharey=True)
    with figures.figure(path, 2, len(names), size, **grid) as (fig, axes):
        for tested_on, of_row in zip(('canvas', 'zoom'), axes):
            for name, axis in zip(names, of_row):
                lines = []
                for kind, color in colors.items():
                    for rescale, look in looks.items():
                        of_seeds = found[training_name(name, rescale)]
                        test = f'{kind} {tested_on}'
                        values = percents_by_scale(of_seeds, test, 'position', scales)
                        label = training_name(kind, rescale)
                        lines += figures.curve(
                            axis, scales, values, color=color, label=label, **look
                        )
                if tested_on == 'canvas':
                    axis.set_title(name)
                    label = 'ceiling of a bag of patches'
                    bag = bag_percents(scales)
                    lines += axis.plot(scales, bag, ':', color='black', lw=1, label=label)
                    legend = lines
                figures.of_sizes(axis, scales)
                axis.set_ylim(0, 100)
            of_row[0].set_ylabel(f'{tested_on}: position tasks, %')
        figures.legend_below(fig, legend, 3)
        fig.suptitle(
            'Trained at 6x6 cells, tested at other sizes (1 = 6x6) with the same weights: mean '
            'and 95% interval'
        )
