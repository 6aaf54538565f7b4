"""Prints the documentation's tables of what benchmarks.speed measured.

    python -m benchmarks.speed --models timm openmmlab plain accelerated openvino \\
        --steps inference training --record
    python -m benchmarks.speed_tables --write

The folder benchmarks/processors has a file for each processor, which --record writes. With --write
the tables of README.md and docs/performance.md become those of these files. They name the commit
and the machine of each.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.pages import README, with_section
from benchmarks.published import BACKBONES
from cpvt_pyramid.app.tooling.command import run_command
from cpvt_pyramid.app.tooling.report import markdown_table

MEASURED = ROOT / 'benchmarks' / 'processors'  # a file for each processor
PAGE = ROOT / 'docs' / 'performance.md'
BY = {
    'clock': 'medians of the clock, on an otherwise idle machine',
    'processor': 'least processor time of a thread, on a busy machine',
}
OTHERS = {'timm': 'timm', 'openmmlab': 'OpenMMLab', 'openvino': 'OpenVINO'}  # shown names
TRAINED_OTHERS = ('timm', 'openmmlab')
README_SIZE = (512, 512)
WITHOUT = 'without '  # and a part of acceleration: such a model

Row = Mapping[str, Any]  # what benchmarks.measuring.measure returns

HEAD = (
    'dtype',
    'threads',
    'model',
    'ms',
    'cpu ms',
    'x port',
    'x OpenVINO',
    'x whole',
    'x float32',
    'x 1 thread',
    'share',
    'MiB',
    'differs',
    'norms',
    '',
)


def lines_of(rows: Sequence[Row], by: str) -> list[list[str]]:
    """The cells of a table of benchmarks.speed."""
    return [line_of(row, rows, by) for row in rows]


def line_of(row: Row, rows: Sequence[Row], by: str) -> list[str]:
    """The cells of a row, which is compared with others of its table; see HEAD."""
    title = [row['dtype'], str(row['threads']), row['model']]
    differs = f'{row["difference"]:.0e}' if 'difference' in row else ''
    norms = f'{row["norm_difference"]:.0e}' if row.get('norm_difference') else ''
    if 'clock_seconds' not in row:
        return [*title, *[''] * (len(HEAD) - 6), differs, norms, row['failed']]
    port = find(rows, row, model='timm') or find(rows, row, model='openmmlab')
    runtime = 'float32' if row['dtype'] == 'float32' else 'bfloat16'
    others = [
        port,
        find(rows, row, model='openvino', dtype=runtime),
        find(rows, row, model='accelerated') if row['model'].startswith(WITHOUT) else None,
        find(rows, row, dtype='float32') if row['dtype'] != 'float32' else None,
        find(rows, row, threads=1) if row['threads'] > 1 else None,
    ]
    return [
        *title,
        f'{1e3 * seconds_of(row, "clock"):.1f}',
        f'{1e3 * seconds_of(row, "processor"):.1f}',
        *[ratio(other, row, by) for other in others],
        f'{share(row, by):.0%}',
        f'{row["peak_mib"]:.0f}' if 'peak_mib' in row else '',
        differs,
        norms,
        '',
    ]


def find(rows: Sequence[Row], row: Row, **changes: object) -> Row | None:
    """The row that differs from another by these keys, if it has been measured."""
    keys = ('arch', 'step', 'height', 'width', 'batch', 'dtype', 'threads', 'model')
    wanted = {key: row[key] for key in keys} | changes
    for other in rows:
        if 'clock_seconds' in other and all(other[key] == wanted[key] for key in keys):
            return other
    return None


def seconds_of(row: Row, by: str) -> float:
    """Median of the clock, or least processor time of a thread."""
    if by == 'clock':
        return statistics.median(row['clock_seconds'])
    return min(row['processor_seconds']) / row['threads']


def ratio(other: Row | None, row: Row, by: str) -> str:
    """How many times as fast as the other."""
    if other is None:
        return ''
    return f'{seconds_of(other, by) / seconds_of(row, by):.2f}'


def share(row: Row, by: str) -> float:
    """Of the best rate of a product."""
    return row['gflops'] / seconds_of(row, by) / row['product_gflops'][by]


# Of the documentation


class Measured(NamedTuple):
    """What benchmarks.speed wrote on a processor."""

    rows: list[Row]
    by: str  # what times are of: 'clock' or 'processor'
    processor: str  # its name
    about: str  # the commit, the versions and the machine

    def find(self, row: Row, **changes: object) -> Row | None:
        return find(self.rows, row, **changes)

    def ms(self, row: Row | None) -> str:
        return f'{1e3 * seconds_of(row, self.by):.0f}' if row else ''

    def share(self, row: Row | None) -> str:
        return f'{share(row, self.by):.0%}' if row else ''


def file_of(processor: str) -> Path:
    """The file of a processor's times."""
    return MEASURED / f'{re.sub("[^a-z0-9]+", "-", processor.lower()).strip("-")}.json'


def read() -> list[Measured]:
    """What the files of all processors hold."""
    return [read_file(path) for path in sorted(MEASURED.glob('*.json'))]


def read_file(path: Path) -> Measured:
    found = loads(path.read_text())
    machine = found['machine']
    about = (
        f'{machine["processor"]}, {machine["cores"]} cores, commit {found["commit"]}, '
        f'torch {machine["torch"]}, timm {found["timm"]}, OpenVINO {found["openvino"]}; '
        f'{BY[found["by"]]}'
    )
    rows = [{'batch': 1, **row} for row in found['rows']]
    return Measured(rows, found['by'], machine['processor'], about)


def readme_section(measured: Sequence[Measured]) -> str:
    """Our accelerated models in one thread, and multiples of the others; from the least to the
    largest of all processors."""
    columns: dict[str, list[tuple[Measured, Row]]] = {}  # a row of each processor, by architecture
    for of_processor in measured:
        for row in of_processor.rows:
            size = (row['height'], row['width'], row['batch'])
            if size == (*README_SIZE, 1) and is_first(row, 'inference') and row['threads'] == 1:
                columns.setdefault(row['arch'], []).append((of_processor, row))
    lines = []
    for step, dtype in (
        ('inference', 'float32'),
        ('inference', 'bfloat16'),
        ('training', 'float32'),
    ):
        rows = [changed(column, step=step, dtype=dtype) for column in columns.values()]
        title = 'inference' if step == 'inference' else 'training step'
        times = [
            spread([1e3 * seconds_of(row, of.by) for of, row in column], '{:.0f}', '{} ms')
            for column in rows
        ]
        lines.append([f'{title}, {dtype}', *times])
        others = OTHERS if step == 'inference' else TRAINED_OTHERS
        lines += multiples(rows, others, time_ratio)
    steps = [changed(column, step='training') for column in columns.values()]
    memory = [
        spread([row['peak_mib'] for _, row in column], '{:.0f}', '{} MiB') for column in steps
    ]
    lines.append(['peak memory of the step', *memory])
    lines += multiples(steps, TRAINED_OTHERS, memory_ratio)
    in_timm = [
        time_ratio(of, other, row)
        for column in columns.values()
        for of, row in column
        if (other := of.find(row, model='timm'))
    ]
    height, width = README_SIZE
    names = [name_of(row) for ((_, row), *_) in columns.values()]
    head = [f'one image of {height} x {width}, one CPU thread', *names]
    abouts = '\n'.join(f'- {of_processor.about}' for of_processor in measured)
    caption = (
        'Milliseconds and MiB are those of our accelerated models; "x 2" means twice as much.\n'
        "In float32, inference with timm's models takes "
        f'{spread(in_timm, "{:.1f}", "{}")} times as long, depending on the\n'
        'processor. OpenVINO runs our exported models. In bfloat16, weights are bfloat16, and so\n'
        "is OpenVINO's computation. Measured by `benchmarks.speed`; where there are several\n"
        f'processors, from the least to the largest of them:\n\n{abouts}\n'
    )
    return f'{markdown_table(head, lines)}\n{caption}'


def changed(
    column: Sequence[tuple[Measured, Row]], **changes: object
) -> list[tuple[Measured, Row]]:
    """The rows that differ from others by these keys, where they have been measured."""
    found = []
    for of_processor, row in column:
        other = of_processor.find(row, **changes)
        if other is not None:
            found.append((of_processor, other))
    return found


def spread(values: Sequence[float], digits: str, cell: str) -> str:
    """A cell with a value, or with the least and the largest of several."""
    if not values:
        return ''
    texts = [digits.format(value) for value in (min(values), max(values))]
    return cell.format(texts[0] if texts[0] == texts[1] else ' to '.join(texts))


def is_first(row: Row, step: str) -> bool:
    """Whether a row stands for its architecture and size in the documentation."""
    wanted = {'step': step, 'dtype': 'float32', 'model': 'accelerated'}
    return all(row[key] == value for key, value in wanted.items())


def name_of(row: Row) -> str:
    if row['arch'] not in BACKBONES:  # a small one, for tests
        return row['arch']
    name, *_ = BACKBONES[row['arch']].name.split(', ')
    return name


def multiples(
    columns: Sequence[Sequence[tuple[Measured, Row]]],
    others: Iterable[str],
    ratio_of: Callable[[Measured, Row, Row], float],
) -> list[list[str]]:
    """A line for each of other models: their times or memory as multiples of the rows'."""
    lines = []
    for name in others:
        cells = []
        for column in columns:
            ratios = []
            for measured, row in column:
                other = measured.find(row, model=name)
                if other is not None:
                    ratios.append(ratio_of(measured, other, row))
            cells.append(spread(ratios, '{:.2f}', 'x {}'))
        lines.append([f'in {OTHERS[name]}', *cells])
    return lines


def time_ratio(measured: Measured, other: Row, row: Row) -> float:
    return seconds_of(other, measured.by) / seconds_of(row, measured.by)


def memory_ratio(measured: Measured, other: Row, row: Row) -> float:
    return other['peak_mib'] / row['peak_mib']


def page_section(measured: Sequence[Measured]) -> str:
    """All that was measured, of inference and of training steps."""
    tables = [''.join(f'- {of_processor.about}\n' for of_processor in measured)]
    for title, head, lines_of_processor in (
        ('Inference:', INFERENCE_HEAD, inference_lines),
        ('A training step:', TRAINING_HEAD, training_lines),
        (PARTS_TITLE, PARTS_HEAD, parts_lines),
    ):
        lines = []
        for of_processor in measured:
            for line in lines_of_processor(of_processor):
                lines.append([of_processor.processor, *line])
        if lines:
            tables.append(f'{title}\n')
            tables.append(markdown_table(head, lines))
    return '\n'.join(tables)


START = ('processor', 'model', 'size', 'threads')
INFERENCE_HEAD = (
    *START,
    *('float32: timm', 'OpenMMLab', 'plain', 'accelerated', 'OpenVINO', 'share'),
    *('bfloat16: timm', 'accelerated', 'autocast', 'OpenVINO', 'share'),
)
TRAINING_HEAD = (
    *START,
    *('float32: timm', 'OpenMMLab', 'plain', 'accelerated', 'share'),
    *('bfloat16: accelerated', 'autocast'),
    *('MiB in float32: timm', 'OpenMMLab', 'plain', 'accelerated'),
)
PARTS = ('products', 'kernels', 'attention')  # of acceleration, see benchmarks.parts
PARTS_TITLE = 'What each part of acceleration buys: time without it, as a multiple of the whole:'
PARTS_HEAD = (
    *START,
    'step',
    *(f'float32: {PARTS[0]}', *PARTS[1:], 'all'),
    *(f'bfloat16: {PARTS[0]}', *PARTS[1:], 'all'),
)


def inference_lines(measured: Measured) -> Iterator[list[str]]:
    """Milliseconds, and the share of the best product; a line for each row."""
    for row in measured.rows:
        if not is_first(row, 'inference'):
            continue
        half = measured.find(row, dtype='bfloat16')
        float32 = [
            measured.find(row, model=model)
            for model in ('timm', 'openmmlab', 'plain', 'accelerated', 'openvino')
        ]
        bfloat16 = [
            measured.find(row, dtype='bfloat16', model='timm'),
            half,
            measured.find(row, dtype='autocast'),
            measured.find(row, dtype='bfloat16', model='openvino'),
        ]
        yield [
            *start_of(row),
            *map(measured.ms, float32),
            measured.share(row),
            *map(measured.ms, bfloat16),
            measured.share(half),
        ]


def training_lines(measured: Measured) -> Iterator[list[str]]:
    """Milliseconds, and MiB of peak memory; a line for each row."""
    for row in measured.rows:
        if not is_first(row, 'training'):
            continue
        float32 = [
            measured.find(row, model=model)
            for model in ('timm', 'openmmlab', 'plain', 'accelerated')
        ]
        others = [measured.find(row, dtype=dtype) for dtype in ('bfloat16', 'autocast')]
        yield [
            *start_of(row),
            *map(measured.ms, float32),
            measured.share(row),
            *map(measured.ms, others),
            *[f'{other["peak_mib"]:.0f}' if other else '' for other in float32],
        ]


def parts_lines(measured: Measured) -> Iterator[list[str]]:
    """The time without each part and without all, as a multiple of the accelerated model's; a line
    for each row of which a part was left out."""
    models = [*(WITHOUT + part for part in PARTS), 'plain']
    for row in measured.rows:
        if not is_first(row, row['step']):
            continue
        cells = []
        for dtype in ('float32', 'bfloat16'):
            whole = measured.find(row, dtype=dtype)
            for model in models:
                other = measured.find(row, dtype=dtype, model=model)
                cells.append(ratio(other, whole, measured.by) if whole and other else '')
        has_parts = any(measured.find(row, model=model) for model in models[:-1])
        if has_parts:
            yield [*start_of(row), row['step'], *cells]


def start_of(row: Row) -> list[str]:
    size = f'{row["height"]} x {row["width"]}'
    if row['batch'] > 1:
        size = f'{row["batch"]} x {size}'
    return [name_of(row), size, str(row['threads'])]


def speed_tables(*, write: bool = False) -> None:
    """Print the tables.

    Args:
        write: write README.md and docs/performance.md instead
    """
    measured = read()
    if not write:
        print(readme_section(measured))
        print(page_section(measured), end='')
        return
    write_tables(measured)


def write_tables(measured: Sequence[Measured]) -> None:
    """Write the tables of README.md and docs/performance.md."""
    for page, section in ((README, readme_section(measured)), (PAGE, page_section(measured))):
        page.write_text(with_section(page.read_text(), 'speed', section))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(speed_tables, argv)


if __name__ == '__main__':
    sys.exit(main())
