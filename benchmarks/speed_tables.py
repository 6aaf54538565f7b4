"""The tables of what benchmarks.speed measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # what benchmarks.measuring.measure returns

HEAD = (
    'dtype',
    'threads',
    'model',
    'ms',
    'cpu ms',
    'x port',
    'x OpenVINO',
    'x float32',
    'x 1 thread',
    'share',
    'MiB',
    'differs',
    '',
)


def lines_of(rows: Sequence[Row], by: str) -> list[list[str]]:
    """The cells of a table of benchmarks.speed."""
    return [line_of(row, rows, by) for row in rows]


def line_of(row: Row, rows: Sequence[Row], by: str) -> list[str]:
    title = [row['dtype'], str(row['threads']), row['model']]
    differs = f'{row["difference"]:.0e}' if 'difference' in row else ''
    if 'clock_seconds' not in row:
        return [*title, *[''] * (len(HEAD) - 5), differs, row['failed']]
    port = find(rows, row, model='timm') or find(rows, row, model='openmmlab')
    runtime = 'float32' if row['dtype'] == 'float32' else 'bfloat16'
    others = [
        port,
        find(rows, row, model='openvino', dtype=runtime),
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
