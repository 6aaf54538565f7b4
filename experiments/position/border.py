"""Is position in the zeros around the map, or in what is learned about them?

PEGs are trained with one border and tested, with the same weights, with each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid.position import PosCNN
from cpvt_pyramid.position.peg import repeat_border
from experiments import figures
from experiments.report import LabAnswer, Table, paired_table
from experiments.statistics import estimate
from experiments.training import one_thread

from .encodings import MEASURES, protocol, runs_data
from .laboratory import Lab, Variant, metric_of
from .models import LabModel
from .runs import Result, RunSettings, evaluate_answers

BORDERS = ('zeros', 'mean', 'replicated')
Found = dict[str, list[dict[str, dict[str, float]]]]  # by trained border, seed, border and metric


class Border:
    """What is around the map of every PEG of a model.

    Attributes:
        kind: 'zeros'; 'mean', of each channel of the image's map, as in arXiv 2206.01202;
            'replicated', the nearest tokens; or 'circular', the tokens at the other side.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def extend(self, x: Tensor, width: int) -> Tensor:
        """Tokens (B, H, W, C) and their border, (B, H + 2 width, W + 2 width, C)."""
        if self.kind == 'replicated':
            return repeat_border(x, None, width)
        if self.kind == 'circular':
            height, length = x.shape[1:3]
            rows = torch.arange(-width, height + width) % height
            columns = torch.arange(-width, length + width) % length
            return x[:, rows[:, None], columns]
        around = (0, 0, width, width, width, width)
        if self.kind == 'zeros':
            return F.pad(x, around)
        mean = x.mean((1, 2), keepdim=True)
        return F.pad(x - mean, around) + mean


class BorderedPEG(PosCNN):
    """A PEG of one convolution whose border can be exchanged."""

    def __init__(self, dim: int, around: Border) -> None:
        super().__init__(dim, zero_padding=False)  # its convolution pads nothing
        self.around = around

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return x + self.proj[0](self.around.extend(x, self.border))


def exchange_borders(pegs: nn.Module, around: Border) -> None:
    """Let all PEGs of an untrained model, the children of a module, have this border."""
    for name, peg in pegs.named_children():
        bordered = BorderedPEG(peg.proj[0].in_channels, around)
        bordered.load_state_dict(peg.state_dict())
        setattr(pegs, name, bordered)


@dataclass(frozen=True)
class BorderSettings(RunSettings):
    """The settings of a run whose PEG has another border.

    Args:
        border: of `BORDERS`.
    """

    border: str = 'zeros'

    def build(self) -> LabModel:
        """The untrained model; its `around` is the border of its PEG."""
        model = super().build()
        model.around = Border(self.border)
        exchange_borders(model.backbone.pos_block, model.around)
        return model


def compare_borders(lab: Lab) -> LabAnswer:
    """Whether a PEG's position survives another border."""
    variants = dict.fromkeys(BORDERS, Variant('peg'))
    common = vars(lab.settings(Variant('peg')))
    settings = [BorderSettings(**common, border=border) for border in BORDERS]
    trained = lab.train_with(variants, settings)
    found = lab.measure(trained, 'borders', with_all_borders)
    tables = [metrics_table(found)]
    if lab.seeds > 1:
        tables.append(changes_table(found))
    picture = 'border.png'
    panels = figures.Panels()
    for border, of_seeds in found.items():
        for metric, title in MEASURES.items():
            by_test = {f'tested: {test}': values_of(of_seeds, test, metric) for test in BORDERS}
            panels.add(title, f'trained: {border}', by_test)
    panels.draw(lab.folder / picture, 'One PEG with several borders')
    notes = [
        *protocol(lab),
        'A PEG after block 0, with zeros around the map, the mean of each channel, or the nearest '
        'tokens. The three are trained in the same way, and tested with each border and the same '
        'weights, at the size of the training.',
    ]
    title = 'Is position in the zeros, or in what is learned about them?'
    data = {'runs': runs_data(trained), 'tests': found}
    return LabAnswer('border', title, notes, tables, [picture], data)


def with_all_borders(result: Result) -> dict[str, dict[str, float]]:
    """The metrics of a trained model with each border."""
    settings = result.settings
    scenes = settings.draw('test', settings.pictures, stream=0)
    found = {}
    with one_thread():
        model = result.load()
        for border in BORDERS:
            model.around.kind = border
            found[border] = evaluate_answers(model, scenes)
    return found


def values_of(of_seeds: Sequence[dict], border: str, metric: str) -> list[float]:
    return [metric_of(of_seed[border], metric) for of_seed in of_seeds]


def metrics_table(found: Found) -> Table:
    rows = []
    for trained, of_seeds in found.items():
        for border in BORDERS:
            cells = [estimate(values_of(of_seeds, border, metric)).show() for metric in MEASURES]
            rows.append([f'trained: {trained}, tested: {border}', *cells, str(len(of_seeds))])
    return Table('Answers, in %', ['', *MEASURES.values(), 'seeds'], rows)


def changes_table(found: Found) -> Table:
    """What another border than that of the training changes."""
    pairs = {}
    for trained, of_seeds in found.items():
        for border in BORDERS:
            if border == trained:
                continue
            name = f'trained: {trained}, tested: {border}'
            pairs[name] = []
            for metric in MEASURES:
                values = values_of(of_seeds, border, metric)
                pairs[name].append((values, values_of(of_seeds, trained, metric)))
    title = 'Change from the border of the training'
    return paired_table(title, list(MEASURES.values()), pairs)
