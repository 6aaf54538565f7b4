"""Self-contained HTML pages with tables, charts and pictures.

Charts are SVG and pictures are data URLs, so that a page is one file that opens anywhere.
"""

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GRAY, RED, LIGHT = '#2f6fde', '#b9c0ca', '#d1343e', '#e3e6ea'
THUMBNAIL = 480  # pixels, longer side of a picture in a sheet

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #f4f5f7; margin: 0 }
main { max-width: 1080px; margin: 0 auto; padding: 24px }
h1 { font-size: 26px; margin: 8px 0 } h2 { font-size: 19px; margin: 0 0 4px }
section { background: #fff; border: 1px solid #e3e6ea; border-radius: 10px; padding: 18px 22px;
  margin: 16px 0 }
p { margin: 2px 0 10px; color: #5a6370; max-width: 80ch }
.row { display: flex; flex-wrap: wrap; gap: 20px; align-items: flex-start }
.scroll { overflow-x: auto; max-height: 620px; overflow-y: auto }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 12px 0 }
.cards div { background: #eef2fb; border-radius: 8px; padding: 8px 16px }
.cards b { display: block; font-size: 22px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #edeff2 }
th { position: sticky; top: 0; background: #fff; cursor: pointer; color: #5a6370 }
th:first-child, td:first-child { text-align: left }
tr:hover td { background: #f2f6fe }
figure { margin: 0 } figcaption { font-size: 13px; color: #5a6370; overflow-wrap: anywhere }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px }
.sheet img { max-width: 100%; max-height: 340px; border-radius: 6px; display: block }
svg { display: block; max-width: 100%; height: auto }
"""
# A click on the head of a column sorts its table.
SCRIPT = """
for (const th of document.querySelectorAll('th')) th.onclick = () => {
  const body = th.closest('table').tBodies[0], i = th.cellIndex, down = th.dataset.down !== '1';
  const key = r => { const v = parseFloat(r.cells[i].textContent);
    return isNaN(v) ? r.cells[i].textContent : v };
  const rows = [...body.rows].sort((a, b) => { const x = key(a), y = key(b);
    return (x > y ? 1 : x < y ? -1 : 0) * (down ? -1 : 1) });
  th.dataset.down = down ? '1' : '0'; body.append(...rows) };
"""


def html_page(title: str, about: str, parts: Sequence[str]) -> str:
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>'
        f'<h1>{escape(title)}</h1><p>{escape(about)}</p>{"".join(parts)}</main>'
        f'<script>{SCRIPT}</script></body></html>\n'
    )
    return page.encode(errors='replace').decode()  # names of files need not be UTF-8


def html_section(title: str, note: str, *parts: str) -> str:
    note = f'<p>{escape(note)}</p>' if note else ''
    return f'<section><h2>{escape(title)}</h2>{note}{"".join(parts)}</section>\n'


def side_by_side(*parts: str) -> str:
    return f'<div class="row">{"".join(parts)}</div>'


def cards(values: Mapping[str, str]) -> str:
    """Large numbers with their names."""
    inner = ''.join(f'<div><b>{escape(v)}</b>{escape(name)}</div>' for name, v in values.items())
    return f'<div class="cards">{inner}</div>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table that can be sorted by its columns; floats are shown with three digits."""

    def cell(value: Any) -> str:
        if value is None or isinstance(value, float) and math.isnan(value):
            value = '–'
        return f'<td>{escape(f"{value:.3f}" if isinstance(value, float) else str(value))}</td>'

    cells = ''.join(f'<th>{escape(name)}</th>' for name in head)
    body = ''.join(f'<tr>{"".join(map(cell, row))}</tr>' for row in rows)
    table = f'<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


# Pictures


def embedded(picture: Image.Image) -> str:
    """The data URL of a picture."""
    file = io.BytesIO()
    picture.convert('RGB').save(file, 'JPEG', quality=85)
    return f'data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}'


def wide_picture(picture: Image.Image) -> str:
    """A picture in the width of the page."""
    return f'<img src="{embedded(picture)}" alt="" style="max-width: 100%">'


def contact_sheet(pictures: Sequence[tuple[Image.Image, str]]) -> str:
    """Pictures with captions."""
    figure = '<figure><img src="{}" alt=""><figcaption>{}</figcaption></figure>'.format
    inner = ''.join(figure(embedded(picture), escape(caption)) for picture, caption in pictures)
    return f'<div class="sheet">{inner}</div>'


def reduced(image: np.ndarray, longest: int = THUMBNAIL) -> tuple[np.ndarray, float]:
    """An image (H, W, 3) whose longer side has at most some pixels, and the factor."""
    factor = min(1.0, longest / max(image.shape[:2]))
    size = [max(round(side * factor), 1) for side in image.shape[1::-1]]
    small = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, reducing_gap=2)
    return np.array(small), factor


# Charts


@contextmanager
def chart(width: float, height: float) -> Iterator['Axes']:
    """Axes in inches, to draw on and to pass to `svg_of`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({'svg.fonttype': 'none', 'font.size': 9}):
        axes = Figure((width, height), layout='constrained').subplots()
        axes.spines[['top', 'right']].set_visible(False)
        yield axes


def svg_of(axes: 'Axes') -> str:
    file = io.StringIO()
    axes.figure.savefig(file, format='svg', transparent=True)
    return file.getvalue()[file.getvalue().index('<svg') :]


def bar_chart(
    values: Mapping[str, float], title: str, show: Callable[[float], str] = '{:g}'.format
) -> str:
    """Horizontal bars."""
    with chart(4.8, 0.24 * len(values) + 0.4) as axes:
        names = [name if len(name) < 28 else f'{name[:26]}…' for name in values]
        bars = axes.barh(range(len(values)), list(values.values()), color=BLUE)
        axes.bar_label(bars, list(map(show, values.values())), padding=3)
        axes.set_yticks(range(len(values)), names)
        axes.set(title=title, xlim=(0, 1.15 * max([*values.values(), 1e-12])), xticks=[])
        axes.invert_yaxis()
        axes.margins(y=0.01)
        return svg_of(axes)


class Curve(NamedTuple):
    """A line in a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = GRAY
    width: float = 1


def line_chart(curves: Sequence[Curve], x_name: str, y_name: str) -> str:
    """Lines from 0 to 1; the names of colored ones are listed."""
    with chart(4.8, 2.8) as axes:
        for curve in curves:
            name = None if curve.color == GRAY else curve.name
            axes.plot(*zip(*curve.points), color=curve.color, lw=curve.width, label=name)
        axes.set(xlabel=x_name, ylabel=y_name, xlim=(0, 1), ylim=(0, 1.01))
        axes.grid(color=LIGHT)
        axes.legend(frameon=False)
        return svg_of(axes)


def histogram(values: np.ndarray, name: str, bins: int = 24) -> str:
    """The distribution of positive values, on a logarithmic axis."""
    values = np.asarray(values, float)
    if not len(values):
        return ''
    low, high = values.min(), values.max()
    edges = np.geomspace(low, high, bins + 1) if high > low * 1.01 else [low / 1.4, low * 1.4]
    with chart(4.8, 2.8) as axes:
        axes.hist(values.clip(edges[0], edges[-1]), edges, color=BLUE, rwidth=0.95)
        axes.set_xscale('log', base=2)
        axes.xaxis.set_major_formatter('{x:.3g}')
        if len(edges) == 2:
            axes.set_xticks([low])
        axes.set(xlabel=name, ylabel='number')
        return svg_of(axes)


def heat_map(
    counts: np.ndarray, rows: Sequence[str], columns: Sequence[str], row_name: str, column_name: str
) -> str:
    """A matrix (R, C) whose cells are as dark as their share of the row; red off the diagonal."""
    from matplotlib.colors import to_rgb

    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    right = np.array([[row == column for column in columns] for row in rows])
    color = np.where(right[..., None], *(np.array(to_rgb(c)) for c in (BLUE, RED)))
    side = float(np.clip(6.5 / max(counts.shape), 0.13, 0.45))  # of a cell
    with chart(side * len(columns) + 1.5, side * len(rows) + 1.5) as axes:
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
        return f'<div class="scroll">{svg_of(axes)}</div>'
