"""Charts for `pages`, as SVG."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup

from .pages import scrolling

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = '#2f6fde'
GRAY = '#b9c0ca'
RED = '#d1343e'
LIGHT = '#e3e6ea'


@contextmanager
def chart(width: float, height: float) -> Iterator[tuple['Figure', 'Axes']]:
    """A figure of a size in inches, and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({'svg.fonttype': 'none', 'font.size': 9}):
        figure = Figure((width, height), layout='constrained')
        axes = figure.subplots()
        axes.spines[['top', 'right']].set_visible(False)
        yield figure, axes


def svg_of(figure: 'Figure') -> Markup:
    """The element of a chart, without the declarations of an SVG file."""
    file = io.StringIO()
    figure.savefig(file, format='svg', transparent=True)
    text = file.getvalue()
    return Markup(text[text.index('<svg') :])


def bar_chart(
    values: Mapping[str, float], title: str, show: Callable[[float], str] = '{:g}'.format
) -> Markup:
    """Horizontal bars."""
    with chart(4.8, 0.24 * len(values) + 0.4) as (figure, axes):
        names = [name if len(name) < 28 else f'{name[:26]}…' for name in values]
        bars = axes.barh(range(len(values)), list(values.values()), color=BLUE)
        axes.bar_label(bars, list(map(show, values.values())), padding=3)
        axes.set_yticks(range(len(values)), names)
        axes.set(title=title, xlim=(0, 1.15 * max([*values.values(), 1e-12])), xticks=[])
        axes.invert_yaxis()
        axes.margins(y=0.01)
        return svg_of(figure)


class Curve(NamedTuple):
    """A line in a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = GRAY
    width: float = 1


def line_chart(curves: Sequence[Curve], x_name: str, y_name: str) -> Markup:
    """Lines from 0 to 1; the names of colored ones are listed."""
    with chart(4.8, 2.8) as (figure, axes):
        for curve in curves:
            name = None if curve.color == GRAY else curve.name
            axes.plot(*zip(*curve.points), color=curve.color, lw=curve.width, label=name)
        axes.set(xlabel=x_name, ylabel=y_name, xlim=(0, 1), ylim=(0, 1.01))
        axes.grid(color=LIGHT)
        axes.legend(frameon=False)
        return svg_of(figure)


def heat_map(
    counts: np.ndarray, rows: Sequence[str], columns: Sequence[str], row_name: str, column_name: str
) -> Markup:
    """A matrix (R, C) whose cells are as dark as their share of the row; red off the diagonal."""
    from matplotlib.colors import to_rgb

    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    right = np.array([[row == column for column in columns] for row in rows])
    color = np.where(right[..., None], *(np.array(to_rgb(c)) for c in (BLUE, RED)))
    side = float(np.clip(6.5 / max(counts.shape), 0.13, 0.45))  # of a cell
    with chart(side * len(columns) + 1.5, side * len(rows) + 1.5) as (figure, axes):
        axes.imshow(1 - shares[..., None] * (1 - color))
        if side > 0.3:
            for i, j in zip(*np.nonzero(shares >= 0.005)):
                ink = 'white' if shares[i, j] > 0.5 else 'black'
                axes.text(j, i, f'{shares[i, j]:.0%}', color=ink, ha='center', va='center')
        axes.set(xticks=[], yticks=[])
        if side > 0.15:  # else names would overlap
            axes.set_yticks(range(len(rows)), [name[:24] for name in rows])
            axes.set_xticks(range(len(columns)), [name[:24] for name in columns], rotation=90)
        axes.set(ylabel=row_name, xlabel=column_name)
        return scrolling(svg_of(figure))
