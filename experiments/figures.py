"""The figures of the experiments, in one style."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import numpy as np
from torch import Tensor

from cpvt_pyramid.app.tooling.files import atomic_write

from .statistics import estimate

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


def name_rows(axis: Any, names: Sequence[str]) -> None:
    """From the top to the bottom."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def curve(axis: Any, x: Sequence[float], of_seeds: np.ndarray, **style: Any) -> list:
    """The mean over the seeds of (seeds, len(x)) values, with its interval as a band."""
    found = [estimate(column) for column in np.asarray(of_seeds).T]
    mean = np.array([f.mean for f in found])
    half = np.nan_to_num([f.half for f in found])
    if len(of_seeds) > 1:
        low, high = (mean - half).clip(0, 100), (mean + half).clip(0, 100)
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


def without_axes(axis: Any, title: str = '') -> None:
    """No ticks, spines and grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    axis.set_title(title, fontsize=9, fontweight='normal')
    for spine in axis.spines.values():
        spine.set_visible(False)
