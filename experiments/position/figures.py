"""The lab's figures, in one style."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Optional

import numpy as np
from torch import Tensor

from cpvt_pyramid.tooling.files import atomic_write

from .statistics import estimate

GREY, ACCENT, BLUE = '#8a8f98', '#c0392b', '#2c6fbb'
# Of lines: without position, with a PEG, and others
WARM = ('#c0392b', '#f39c12', '#6e1f14', '#e573a5')
COOL = (
    '#1f4e9c', '#29a3d6', '#2e8b57', '#7d5ba6', '#c39bd3', '#8bc34a', '#00695c', '#111111',
)  # fmt: skip
MARKERS = 'osD^vP*X<>'
GAP_SUFFIX = ', GAP'  # of variants whose classifiers read the mean of the map
STYLE_OF_FIGURES = {
    'figure.dpi': 110, 'savefig.dpi': 130, 'font.size': 9.5, 'axes.spines.top': False,
    'axes.spines.right': False, 'axes.grid': True, 'grid.alpha': 0.25, 'axes.axisbelow': True,
    'axes.titlesize': 10.5, 'axes.titleweight': 'bold', 'legend.frameon': False,
}  # fmt: skip


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


def styles(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Color, marker and line style for each name: PEGs warm, no position grey and dashed, the
    others cool. With GAP: the same, dotted."""
    bases = list(dict.fromkeys(name.removesuffix(GAP_SUFFIX) for name in names))
    plain = [name for name in bases if name.startswith('no')]
    warm = [name for name in bases if 'peg' in name]
    cool = [name for name in bases if name not in (*plain, *warm)]
    color = dict.fromkeys(plain, GREY)
    for group, palette in ((warm, WARM), (cool, COOL)):
        color |= dict(zip(group, cycle(palette)))
    marker = dict(zip(bases, cycle(MARKERS)))
    found = {}
    for name in names:
        base = name.removesuffix(GAP_SUFFIX)
        line = ':' if name != base else '--' if base in plain else '-'
        found[name] = {'color': color[base], 'marker': marker[base], 'ls': line}
    return found


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
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_xlim(-2, 102)


def curves(
    axis: Any, x: Sequence[float], values: Mapping[str, np.ndarray], most: float = 100
) -> list:
    """A line for each name: the mean over the seeds of (seeds, len(x)) values, with its interval,
    cut to 0 to `most`, as a band. Returns the lines, for a legend."""
    lines = [
        line
        for name, style in styles(list(values)).items()
        for line in curve(axis, x, values[name], most, label=name, **style)
    ]
    of_sizes(axis, x)
    return lines


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
    rows = -(-len(lines) // columns)
    fig.legend(handles=lines, loc='outside lower center', ncols=-(-len(lines) // rows))


def show_picture(axis: Any, image: Tensor, title: str = '') -> None:
    """An image (3, H, W), from its least to its largest value."""
    low, high = image.min(), image.max()
    axis.imshow(((image - low) / (high - low)).permute(1, 2, 0), aspect=1)
    without_axes(axis, title)


def name_row(axis: Any, name: str) -> None:
    """The name of a row of axes, to the left of its first one."""
    text = name.replace(', ', ',\n')
    axis.set_ylabel(text, fontsize=8.5, rotation=0, ha='right', va='center')


def without_axes(axis: Any, title: str = '') -> None:
    """No ticks, spines and grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    axis.set_title(title, fontsize=9, fontweight='normal')
    for spine in axis.spines.values():
        spine.set_visible(False)
