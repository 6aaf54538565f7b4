"""Self-contained HTML pages with tables, charts and pictures.

Charts are SVG and pictures are data URLs, so that a page is one file that opens anywhere. Values
appear when the mouse rests on them.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

BLUE, GRAY, RED = '#2f6fde', '#b9c0ca', '#d1343e'
WIDTH, HEIGHT = 460, 260  # of a chart
LEFT, TOP, RIGHT, BOTTOM = 52, 26, 22, 38  # margins for the axes
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
svg { display: block; max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif;
  fill: #5a6370 }
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
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>'
        f'<h1>{escape(title)}</h1><p>{escape(about)}</p>{"".join(parts)}</main>'
        f'<script>{SCRIPT}</script></body></html>\n'
    )


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
    cells = ''.join(f'<th>{escape(name)}</th>' for name in head)
    body = ''.join(
        f'<tr>{"".join(f"<td>{escape(in_print(value))}</td>" for value in row)}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
        '</div>'
    )


def in_print(value: Any) -> str:
    """A cell of a table: a dash for what does not exist."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return '–'
    return f'{value:.3f}' if isinstance(value, float) else str(value)


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
    inner = ''.join(
        f'<figure><img src="{embedded(picture)}" alt=""><figcaption>{escape(caption)}'
        '</figcaption></figure>'
        for picture, caption in pictures
    )
    return f'<div class="sheet">{inner}</div>'


def reduced(image: np.ndarray, longest: int = THUMBNAIL) -> tuple[np.ndarray, float]:
    """An image (H, W, 3) whose longer side has at most some pixels, and the factor."""
    factor = min(1.0, longest / max(image.shape[:2]))
    size = [max(round(side * factor), 1) for side in image.shape[1::-1]]
    small = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, reducing_gap=2)
    return np.array(small), factor


# Charts


class Curve(NamedTuple):
    """A line in a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = GRAY
    width: float = 1


def bar_chart(
    values: Mapping[str, float],
    title: str,
    show: Callable[[float], str] = '{:g}'.format,
) -> str:
    """Horizontal bars."""
    row, text = 22, max([len(name) for name in values] + [4]) * 7 + 8
    text = min(text, 200)
    highest = max([*values.values(), 1e-12])
    room = WIDTH - text - 70
    height = row * len(values) + 30
    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    for i, (name, value) in enumerate(values.items()):
        y = 24 + i * row
        tip = f'{name}: {show(value)}'
        parts.append(rectangle(text, y, room * value / highest, 14, BLUE, tip))
        shown = name if len(name) < 28 else name[:26] + '…'
        parts.append(f'<text x="{text - 6}" y="{y + 12}" text-anchor="end">{escape(shown)}</text>')
        x = text + room * value / highest + 5
        parts.append(f'<text x="{x:.1f}" y="{y + 12}">{escape(show(value))}</text>')
    return drawing_of(parts, WIDTH, height)


def line_chart(
    curves: Sequence[Curve],
    x_name: str,
    y_name: str,
    x_range: tuple[float, float] = (0, 1),
    y_range: tuple[float, float] = (0, 1),
) -> str:
    """Lines; the names of colored ones are listed."""
    x_of, y_of, parts = axes(x_name, y_name, x_range, y_range)
    for curve in curves:
        points = ' '.join(f'{x_of(x):.1f},{y_of(y):.1f}' for x, y in curve.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{curve.color}" '
            f'stroke-width="{curve.width}"><title>{escape(curve.name)}</title></polyline>'
        )
    for i, curve in enumerate(curve for curve in curves if curve.color != GRAY):
        x = LEFT + 100 * i
        parts.append(rectangle(x, 8, 14, 3, curve.color))
        parts.append(f'<text x="{x + 20}" y="14">{escape(curve.name)}</text>')
    return drawing_of(parts, WIDTH, HEIGHT)


def round_step(highest: float) -> float:
    """The smallest round number of which five reach a value."""
    unit = 10 ** math.floor(math.log10(max(highest / 5, 1)))
    return unit * next(k for k in (1, 2, 5, 10) if 5 * k * unit >= highest)


def histogram(values: np.ndarray, name: str, bins: int = 24) -> str:
    """The distribution of positive values, on a logarithmic axis."""
    values = np.asarray(values, float)
    if not len(values):
        return ''
    scale, back = np.log2, np.exp2
    low, high = float(scale(values).min()), float(scale(values).max())
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(scale(values).clip(low, high), bins, (low, high))
    x_of, y_of, parts = axes(name, 'number', (low, high), (0, 5 * round_step(counts.max())), back)
    for count, start, stop in zip(counts, edges[:-1], edges[1:]):
        tip = f'{back(start):.3g} to {back(stop):.3g}: {count}'
        width = x_of(stop) - x_of(start) - 1
        parts.append(rectangle(x_of(start), y_of(count), width, y_of(0) - y_of(count), BLUE, tip))
    return drawing_of(parts, WIDTH, HEIGHT)


def axes(
    x_name: str,
    y_name: str,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    back: Callable[[float], float] = lambda value: value,
) -> tuple[Callable[[float], float], Callable[[float], float], list[str]]:
    """Two axes: functions from values to places, and their drawing.

    back: from the scale of the first axis to the numbers at its ticks.
    """
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(x: float) -> float:
        return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * plot_width

    def y_of(y: float) -> float:
        return TOP + plot_height - (y - y_range[0]) / (y_range[1] - y_range[0]) * plot_height

    parts = []
    for i in range(6):
        x = x_range[0] + (x_range[1] - x_range[0]) * i / 5
        y = y_range[0] + (y_range[1] - y_range[0]) * i / 5
        line = f'y1="{y_of(y):.1f}" y2="{y_of(y):.1f}" x1="{LEFT}" x2="{WIDTH - RIGHT}"'
        parts.append(f'<line {line} stroke="#e3e6ea"/>')
        at = f'x="{LEFT - 6}" y="{y_of(y) + 4:.1f}"'
        parts.append(f'<text {at} text-anchor="end">{y:.3g}</text>')
        at = f'x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 15}"'
        parts.append(f'<text {at} text-anchor="middle">{float(back(x)):.3g}</text>')
    middle = f'x="{LEFT + plot_width / 2}" y="{HEIGHT - 5}"'
    parts.append(f'<text {middle} text-anchor="middle">{escape(x_name)}</text>')
    at = f'transform="rotate(-90)" x="{-TOP - plot_height / 2}" y="11"'
    parts.append(f'<text {at} text-anchor="middle">{escape(y_name)}</text>')
    return x_of, y_of, parts


def heat_map(
    counts: np.ndarray, rows: Sequence[str], columns: Sequence[str], row_name: str, column_name: str
) -> str:
    """A matrix whose cells are as dark as their share of the row; red off the diagonal.

    counts: (R, C). Cells below half a percent of their row are left white.
    """
    cell = int(np.clip(640 / max(counts.shape), 6, 44))
    text = min(max(len(name) for name in [*rows, *columns]), 24) * 7 + 10 if cell >= 11 else 20
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    frame = f'x="{text}" y="{text}" width="{cell * len(columns)}" height="{cell * len(rows)}"'
    parts = [f'<rect {frame} fill="none" stroke="#e3e6ea"/>']
    for i, j in zip(*np.nonzero(shares >= 0.005)):
        share = float(shares[i, j])
        x, y = text + j * cell, text + i * cell
        tip = f'{rows[i]} → {columns[j]}: {counts[i, j]:g} ({share:.1%})'
        color = BLUE if rows[i] == columns[j] else RED
        opacity = 0.08 + 0.92 * share
        parts.append(rectangle(x, y, cell - 1, cell - 1, color, tip, opacity))
        if cell >= 30:
            fill = '#fff' if share > 0.5 else '#212529'
            at = f'x="{x + cell / 2 - 0.5}" y="{y + cell / 2 + 4}"'
            parts.append(
                f'<text {at} text-anchor="middle" style="fill:{fill};pointer-events:none">'
                f'{share:.0%}</text>'
            )
    if cell >= 11:
        for i, name in enumerate(rows):
            at = f'x="{text - 6}" y="{text + (i + 0.5) * cell + 4}"'
            parts.append(f'<text {at} text-anchor="end">{escape(name[:24])}</text>')
        for j, name in enumerate(columns):
            at = f'transform="translate({text + (j + 0.5) * cell + 4},{text - 6}) rotate(-90)"'
            parts.append(f'<text {at}>{escape(name[:24])}</text>')
    width, height = text + cell * len(columns), text + cell * len(rows)
    parts.append(f'<text x="4" y="{height + 16}">rows: {escape(row_name)}, columns: ')
    parts[-1] += f'{escape(column_name)}</text>'
    return f'<div class="scroll">{drawing_of(parts, max(width, 300), height + 22)}</div>'


def rectangle(
    x: float, y: float, width: float, height: float, color: str, tip: str = '', opacity: float = 1
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ''
    title = f'<title>{escape(tip)}</title>' if tip else ''
    return f'<rect {place} fill="{color}"{faint}>{title}</rect>'


def drawing_of(parts: Sequence[str], width: float, height: float) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {size}>{"".join(parts)}</svg>'
