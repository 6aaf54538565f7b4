"""The lab's figures, in one style."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import numpy as np
from torch import Tensor

from .statistics import estimate

GREY, ACCENT = '#8a8f98', '#c0392b'
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
            partial = path.with_name(f'{path.stem}.part.png')
            fig.savefig(partial)
            partial.replace(path)
        finally:
            plt.close(fig)


def colors(names: Sequence[str]) -> dict[str, Any]:
    """A color for each name: PEGs warm, no position grey, the others cool. With GAP: the same."""
    import matplotlib

    bases = list(dict.fromkeys(name.removesuffix(GAP_SUFFIX) for name in names))
    warm = [name for name in bases if 'peg' in name or 'block' in name]
    cool = [name for name in bases if name not in warm and not name.startswith('no')]
    found = {name: GREY for name in bases}
    for group, name_of_map, low, high in ((warm, 'YlOrRd', 0.5, 0.95), (cool, 'winter', 0.0, 0.9)):
        shades = matplotlib.colormaps[name_of_map](np.linspace(low, high, max(len(group), 1)))
        found |= dict(zip(group, map(tuple, shades)))
    return {name: found[name.removesuffix(GAP_SUFFIX)] for name in names}


def dots(axis: Any, values: Mapping[str, Sequence[float]], line: Optional[float] = None) -> None:
    """A row for each name: its seeds as dots, their mean and 95% interval, cut to 0 to 100; a line
    to compare."""
    shade = colors(list(values))
    for row, (name, of_seeds) in enumerate(values.items()):
        found = estimate(of_seeds)
        half = 0 if np.isnan(found.half) else found.half
        ends = np.clip([found.mean - half, found.mean + half], 0, 100)
        axis.plot(ends, [row, row], color=shade[name], lw=2.2)
        axis.plot(of_seeds, [row] * len(of_seeds), 'o', ms=4, color=shade[name], alpha=0.45, mew=0)
        axis.plot(found.mean, row, 'D', ms=5.5, color=shade[name], mec='white', mew=0.7)
    if line is not None:
        axis.axvline(line, color='black', ls='--', lw=1, zorder=0)
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.5)


def curves(
    axis: Any, x: Sequence[float], values: Mapping[str, np.ndarray], most: float = 100
) -> list:
    """A line for each name: the mean over the seeds of (seeds, len(x)) values, with its interval,
    cut to 0 to `most`, as a band. Returns the lines, for a legend."""
    shade, lines = colors(list(values)), []
    for name, of_seeds in values.items():
        found = [estimate(column) for column in np.asarray(of_seeds).T]
        mean = np.array([f.mean for f in found])
        half = np.nan_to_num([f.half for f in found])
        style = ':' if name.endswith(GAP_SUFFIX) else '--' if name.startswith('no') else '-'
        lines += axis.plot(x, mean, style, marker='o', ms=3.5, color=shade[name], label=name)
        if len(of_seeds) > 1:
            low, high = (mean - half).clip(0, most), (mean + half).clip(0, most)
            axis.fill_between(x, low, high, color=shade[name], alpha=0.08, lw=0)
    axis.set_xscale('log', base=2)
    axis.set_xticks(x, [f'{v:g}' for v in x])
    axis.minorticks_off()
    return lines


def legend_below(fig: Any, lines: Sequence, columns: int = 6) -> None:
    fig.legend(handles=list(lines), loc='outside lower center', ncols=columns)


def show_picture(axis: Any, image: Tensor, title: str = '') -> None:
    """An image (3, H, W) from -1 to 1."""
    axis.imshow((image.permute(1, 2, 0).numpy() + 1) / 2 if image.min() < 0 else image, aspect=1)
    without_axes(axis, title)


def without_axes(axis: Any, title: str = '') -> None:
    """No ticks, spines and grid."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    axis.set_title(title, fontsize=9, fontweight='normal')
    for spine in axis.spines.values():
        spine.set_visible(False)
