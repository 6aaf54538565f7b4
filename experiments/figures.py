"""The lab's figures, in one style."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Optional

import numpy as np
from torch import Tensor

from cpvt_pyramid.tooling.files import atomic_write

from .statistics import Estimate, estimate

GREY, ACCENT, BLUE = '#8a8f98', '#c0392b', '#2c6fbb'
STYLE_OF_FIGURES = {
    'figure.dpi': 110,
    'savefig.dpi': 130,
    'font.size': 9.5,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.alpha': 0.25,
    'axes.axisbelow': True,
    'axes.titlesize': 10.5,
    'axes.titleweight': 'bold',
    'legend.frameon': False,
}


@contextmanager
def figure(
    path: Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    layout: str = 'constrained',
    **grid: Any,
) -> Iterator:
    """A figure with rows x columns axes, saved to `path` when the block ends.

    The constrained layout takes seconds for a grid of many pictures, which need no 'constrained'.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE_OF_FIGURES):
        fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout=layout, **grid)
        try:
            yield fig, axes
            with atomic_write(path, path.suffix) as partial:
                fig.savefig(partial)
        finally:
            plt.close(fig)


def dots(
    axis: Any,
    values: Mapping[str, Sequence[float]],
    shades: Sequence[str],
    line: Optional[float] = None,
) -> None:
    """A row for each name: its seeds as dots, their mean and 95% interval, cut to 0 to 100; a line
    to compare."""
    for row, (of_seeds, shade) in enumerate(zip(values.values(), shades)):
        found = estimate(of_seeds)
        half = 0 if np.isnan(found.half) else found.half
        ends = np.clip([found.mean - half, found.mean + half], 0, 100)
        axis.plot(ends, [row, row], color=shade, lw=5, alpha=0.22, solid_capstyle='butt')
        axis.plot(of_seeds, [row] * len(of_seeds), 'o', ms=4, color=shade, alpha=0.6, mew=0)
        axis.plot(found.mean, row, '|', ms=11, mew=2.2, color=shade)
    if line is not None:
        axis.axvline(line, color='black', ls='--', lw=1, zorder=0)
    name_rows(axis, list(values))
    axis.set_xlim(-2, 102)


class Panels:
    """A panel for each measure, with a row for each name and its estimates in several colors."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, dict[str, Estimate]]] = {}  # by measure, mark and name

    def add(self, measure: str, name: str, values: Mapping[str, Sequence[float]]) -> None:
        """Add the shares that the seeds have, for each mark; they are drawn in %."""
        marks = self.found.setdefault(measure, {})
        for mark, of_seeds in values.items():
            if np.isfinite(of_seeds).all():
                marks.setdefault(mark, {})[name] = estimate(100 * np.asarray(of_seeds))

    def draw(self, path: Path, title: str) -> None:
        marks = dict.fromkeys(mark for marks in self.found.values() for mark in marks)
        shades = dict(zip(marks, cycle((BLUE, ACCENT, 'black'))))
        of_marks = [found for marks in self.found.values() for found in marks.values()]
        names = list(dict.fromkeys(name for found in of_marks for name in found))
        size = (3.1 * len(self.found) + 1, 0.24 * len(names) + 1.6)
        with figure(path, 1, len(self.found), size, sharey=True) as (fig, axes):
            for axis, (measure, marks) in zip(axes.flat, self.found.items()):
                for mark, found in marks.items():
                    means = [one.mean for one in found.values()]
                    halves = np.nan_to_num([one.half for one in found.values()])
                    rows = [names.index(name) for name in found]
                    look = dict(fmt='o', ms=5, elinewidth=3, alpha=0.75, mew=0)
                    axis.errorbar(means, rows, xerr=halves, color=shades[mark], label=mark, **look)
                name_rows(axis, names)
                axis.set_title(measure)
            legend_below(fig, axes.flat[0].get_legend_handles_labels()[0])
            fig.suptitle(f'{title}: mean and 95% interval')


def name_rows(axis: Any, names: Sequence[str]) -> None:
    """From the top to the bottom."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def curve(
    axis: Any, x: Sequence[float], of_seeds: np.ndarray, most: float = 100, **style: Any
) -> list:
    """The mean over the seeds of (seeds, len(x)) values, with its interval as a band."""
    found = [estimate(column) for column in np.asarray(of_seeds).T]
    mean = np.array([f.mean for f in found])
    half = np.nan_to_num([f.half for f in found])
    if len(of_seeds) > 1:
        low, high = (mean - half).clip(0, most), (mean + half).clip(0, most)
        axis.fill_between(x, low, high, color=style['color'], alpha=0.1, lw=0)
    return axis.plot(x, mean, **{'ms': 4, 'lw': 1.4, **style})


def of_sizes(axis: Any, x: Sequence[float]) -> None:
    """A logarithmic axis with these ticks."""
    axis.set_xscale('log', base=2)
    axis.set_xticks(x, [f'{v:g}' for v in x])
    axis.minorticks_off()


def legend_below(fig: Any, lines: Sequence, columns: int = 7) -> None:
    """In rows of about the same length, of at most `columns` lines."""
    lines = list(lines)
    rows = math.ceil(len(lines) / columns)
    fig.legend(handles=lines, loc='outside lower center', ncols=math.ceil(len(lines) / rows))


def show_picture(axis: Any, image: Tensor, title: str = '') -> None:
    """An image (3, H, W), from its least to its largest value."""
    low, high = image.min(), image.max()
    axis.imshow(((image - low) / (high - low)).permute(1, 2, 0), aspect=1)
    without_axes(axis, title)


def name_row(axis: Any, name: str) -> None:
    """The name of a row of axes, to the left of its first one."""
    text = name.replace(', ', ',\n')
    axis.set_ylabel(text, fontsize=8.5, rotation=0, ha='right', va='center')


def name_columns(axes: Sequence, names: Sequence[str]) -> None:
    for axis, name in zip(axes, names):
        axis.set_title(name, fontsize=9)


def scale_beside(axes: Any, drawn: Any, left: float, label: str) -> None:
    """The color scale of a picture that was drawn, to the right of axes that end at `left`."""
    low, high = axes[-1, 0].get_position().y0, axes[0, 0].get_position().y1
    fig = drawn.figure
    place = (left + 0.1 / fig.get_figwidth(), low, 0.12 / fig.get_figwidth(), high - low)
    fig.colorbar(drawn, cax=fig.add_axes(place), label=label)


def without_axes(axis: Any, title: str = '') -> None:
    """No ticks, spines and grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    axis.set_title(title, fontsize=9, fontweight='normal')
    for spine in axis.spines.values():
        spine.set_visible(False)
