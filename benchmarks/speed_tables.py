"""Prints the documentation's tables of what benchmarks.speed measured.

    python -m benchmarks.speed --models timm openmmlab plain accelerated openvino \\
        --steps inference training --json new.json
    mv new.json benchmarks/speed.json
    python -m benchmarks.speed_tables --write

With --write it updates those of README.md and docs/performance.md. They are of
benchmarks/speed.json, and name its commit and its machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from json import loads
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.pages import README, with_section
from benchmarks.published import BACKBONES
from cpvt_pyramid.app.tooling.command import run_command
from cpvt_pyramid.app.tooling.report import markdown_table

MEASURED = ROOT / 'benchmarks' / 'speed.json'
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
    keys = ('arch', 'step', 'height', 'width', 'dtype', 'threads', 'model')
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
    """What benchmarks.speed wrote."""

    rows: list[Row]
    by: str  # what times are of: 'clock' or 'processor'
    about: str  # the commit, the versions and the machine

    def find(self, row: Row, **changes: object) -> Row | None:
        return find(self.rows, row, **changes)

    def ms(self, row: Row | None) -> str:
        return f'{1e3 * seconds_of(row, self.by):.0f}' if row else ''

    def share(self, row: Row | None) -> str:
        return f'{share(row, self.by):.0%}' if row else ''


def read() -> Measured:
    """What benchmarks/speed.json holds."""
    found = loads(MEASURED.read_text())
    machine = found['machine']
    about = (
        f'commit {found["commit"]}, {machine["processor"]}, {machine["cores"]} cores, '
        f'torch {machine["torch"]}, timm {found["timm"]}, OpenVINO {found["openvino"]}; '
        f'{BY[found["by"]]}'
    )
    return Measured(found['rows'], found['by'], about)


def readme_section(measured: Measured) -> str:
    """Our accelerated models in one thread, beside the others."""
    columns = []
    for row in measured.rows:
        size = (row['height'], row['width'])
        if size == README_SIZE and is_first(row, 'inference') and row['threads'] == 1:
            columns.append(row)
    lines = []
    for step, dtype in (
        ('inference', 'float32'),
        ('inference', 'bfloat16'),
        ('training', 'float32'),
    ):
        rows = [measured.find(column, step=step, dtype=dtype) for column in columns]
        title = 'inference' if step == 'inference' else 'training step'
        times = [f'{measured.ms(row)} ms' if row else '' for row in rows]
        lines.append([f'{title}, {dtype}', *times])
        others = OTHERS if step == 'inference' else TRAINED_OTHERS
        lines += multiples(measured, rows, others, time_ratio)
    steps = [measured.find(column, step='training') for column in columns]
    memory = [f'{row["peak_mib"]:.0f} MiB' if row else '' for row in steps]
    lines.append(['peak memory of the step', *memory])
    lines += multiples(measured, steps, TRAINED_OTHERS, memory_ratio)
    height, width = README_SIZE
    head = [f'one image of {height} x {width}, one CPU thread', *map(name_of, columns)]
    caption = (
        'Milliseconds and MiB are those of our accelerated models; "x 2" means twice as much.\n'
        'OpenVINO runs our exported models. In bfloat16, weights are bfloat16, and so is\n'
        f"OpenVINO's computation. Measured by `benchmarks.speed`: {measured.about}.\n"
    )
    return f'{markdown_table(head, lines)}\n{caption}'


def is_first(row: Row, step: str) -> bool:
    """Whether a row stands for its architecture and size in the documentation."""
    wanted = {'step': step, 'dtype': 'float32', 'model': 'accelerated'}
    return all(row[key] == value for key, value in wanted.items())


def name_of(row: Row) -> str:
    name, *_ = BACKBONES[row['arch']].name.split(', ')
    return name


def multiples(
    measured: Measured,
    rows: Sequence[Row | None],
    others: Iterable[str],
    ratio_of: Callable[[Measured, Row, Row], str],
) -> list[list[str]]:
    """A line for each of other models: their times or memory as multiples of the rows'."""
    lines = []
    for name in others:
        cells = []
        for row in rows:
            other = measured.find(row, model=name) if row else None
            cells.append(f'x {ratio_of(measured, other, row)}' if row and other else '')
        lines.append([f'in {OTHERS[name]}', *cells])
    return lines


def time_ratio(measured: Measured, other: Row, row: Row) -> str:
    return ratio(other, row, measured.by)


def memory_ratio(measured: Measured, other: Row, row: Row) -> str:
    return f'{other["peak_mib"] / row["peak_mib"]:.2f}'


def page_section(measured: Measured) -> str:
    """All that was measured, of inference and of training steps."""
    tables = [f'{measured.about[0].upper()}{measured.about[1:]}.\n']
    for step, title, table in (
        ('inference', 'Inference', inference_table),
        ('training', 'A training step', training_table),
    ):
        rows = [row for row in measured.rows if is_first(row, step)]
        if rows:
            tables.append(f'{title}:\n')
            tables.append(table(measured, rows))
    return '\n'.join(tables)


def inference_table(measured: Measured, rows: Sequence[Row]) -> str:
    """Milliseconds, and the share of the best product; a line for each row."""
    head = (
        *('model', 'size', 'threads'),
        *('float32: timm', 'OpenMMLab', 'plain', 'accelerated', 'OpenVINO', 'share'),
        *('bfloat16: timm', 'accelerated', 'autocast', 'OpenVINO', 'share'),
    )
    lines = []
    for row in rows:
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
        lines.append(
            [
                *start_of(row),
                *map(measured.ms, float32),
                measured.share(row),
                *map(measured.ms, bfloat16),
                measured.share(half),
            ]
        )
    return markdown_table(head, lines)


def training_table(measured: Measured, rows: Sequence[Row]) -> str:
    """Milliseconds, and MiB of peak memory; a line for each row."""
    head = (
        *('model', 'size', 'threads'),
        *('float32: timm', 'OpenMMLab', 'plain', 'accelerated', 'share'),
        *('bfloat16: accelerated', 'autocast'),
        *('MiB in float32: timm', 'OpenMMLab', 'plain', 'accelerated'),
    )
    lines = []
    for row in rows:
        float32 = [
            measured.find(row, model=model)
            for model in ('timm', 'openmmlab', 'plain', 'accelerated')
        ]
        others = [measured.find(row, dtype=dtype) for dtype in ('bfloat16', 'autocast')]
        lines.append(
            [
                *start_of(row),
                *map(measured.ms, float32),
                measured.share(row),
                *map(measured.ms, others),
                *[f'{other["peak_mib"]:.0f}' if other else '' for other in float32],
            ]
        )
    return markdown_table(head, lines)


def start_of(row: Row) -> list[str]:
    return [name_of(row), f'{row["height"]} x {row["width"]}', str(row['threads'])]


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
    for page, section in ((README, readme_section(measured)), (PAGE, page_section(measured))):
        page.write_text(with_section(page.read_text(), 'speed', section))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(speed_tables, argv)


if __name__ == '__main__':
    sys.exit(main())
