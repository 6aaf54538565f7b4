"""The table and the picture of speed.py."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contestants import VARIANTS
from benchmarks.measuring import Case, ratio_text, shown
from cpvt_pyramid.tooling.report import text_table

COLUMNS = {
    'model': lambda row: row['model'],
    'ms': lambda row: f'{row["ms"]:.1f}',
    'cpu ms': lambda row: f'{row["cpu_ms"]:.1f}',
    'images/s': lambda row: f'{1e3 * row["batch"] / row["ms"]:.1f}' if row['batch'] > 1 else '',
    'ratio': ratio_text,
    'MiB': lambda row: f'{row["peak_mib"]:.0f}',
    'GFLOPs': lambda row: f'{row["gflops"]:.1f}',
    'x floor': lambda row: f'{row["ms"] / row["floor_ms"]:.2f}',
    'differs': lambda row: shown(row['difference']),
    'graphs, breaks': lambda row: f'{row["graphs"]}, {row["graph_breaks"]}',
    '': lambda row: row['failed'],
}


def table(case: Case, rows: Sequence[dict]) -> str:
    """The rows of a case in aligned columns, without empty columns."""
    columns = []
    for name, text_of in COLUMNS.items():
        cells = [cell(text_of, row) for row in rows]
        if any(cells):
            columns.append([name, *cells])
    head, *lines = zip(*columns)
    return f'\n{case}\n{text_table(head, lines)}'


def cell(text_of: Callable[[dict], str], row: dict) -> str:
    try:
        return text_of(row)
    except KeyError:  # not measured
        return ''


def draw(results: dict, path: str) -> None:
    """Time and memory over image size; one column per step and dtype."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    rows = results['rows']
    columns = list(dict.fromkeys((row['step'], row['dtype']) for row in rows))
    names = list(dict.fromkeys(row['model'] for row in rows))
    sides = sorted({round(math.sqrt(row['height'] * row['width'])) for row in rows})
    quantities = [('ms', 'time in ms'), ('peak_mib', 'peak memory in MiB, beyond the model')]
    quantities = [pair for pair in quantities if any(pair[0] in row for row in rows)]
    eager = dict.fromkeys(VARIANTS.sub('', name) for name in names)
    colors = dict(zip(eager, itertools.cycle(['#1f4e9c', *plt.get_cmap('Dark2').colors])))
    figure, axes = plt.subplots(
        len(quantities),
        len(columns),
        squeeze=False,
        sharex=True,
        layout='constrained',
        figsize=(1.5 + 5.5 * len(columns), 0.8 + 4.2 * len(quantities)),
    )
    options = results['options']
    what = Path(options['config']).stem if options['config'] else options['arch']
    where = f'{results["machine"]["processor"]}, {options["threads"]} threads'
    figure.suptitle(f'{what}, batch {rows[0]["batch"]}, {where}')
    panels = itertools.product(quantities, columns)
    for ax, ((key, text), (step, dtype)) in zip(axes.flat, panels):
        for name in names:
            points = sorted(
                (math.sqrt(row['height'] * row['width']), row[key])
                for row in rows
                if (row['model'], row['step'], row['dtype']) == (name, step, dtype) and key in row
            )
            if points:
                model = VARIANTS.sub('', name)
                look = dict(color=colors[model], linestyle='-' if name == model else '--')
                ax.plot(*zip(*points), marker='o', markersize=4, label=name, **look)
        ax.set(xscale='log', yscale='log', title=f'{text}: {step}, {dtype}')
        ax.set_xlabel('image side in pixels (square root of the area)')
        ax.set_xticks(sides, sides)
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_formatter('{x:,.0f}')
        ax.grid(color='#e6e6e6', which='both')
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
