"""`CPVT_RECORD=1 make test`, or another target, writes versions and result to docs/tested.md."""

import platform
from collections.abc import Mapping
from datetime import date

from support import ROOT

from cpvt_pyramid.doctor import installed
from cpvt_pyramid.tooling.report import markdown_table

PAGE = ROOT / 'docs/tested.md'
TEXT = """\
# Tested combinations

Written by the test runs themselves (`CPVT_RECORD=1 make test`, for example): the versions that they
found, and what they ended with. Skipped tests need a GPU or something that an environment lacks.

"""
PACKAGES = (
    ('torch',),
    ('mmcv', 'onedl-mmcv'),
    ('mmengine', 'onedl-mmengine'),
    ('mmdet', 'onedl-mmdetection'),
    ('mmsegmentation', 'onedl-mmsegmentation'),
    ('timm',),
)
HEAD = ['Python', 'torch', 'mmcv', 'mmengine', 'mmdet', 'mmseg', 'timm', 'tests', 'result', 'date']


def record(arguments: list[str], counts: Mapping[str, int]) -> None:
    """Write a row, in place of an earlier one of these versions and tests."""
    versions = [platform.python_version()]
    for names in PACKAGES:
        found = [f'{v} (fork)' if n[:5] == 'onedl' else v for n, v in installed(*names).items()]
        versions.append(' and '.join(found) or 'none')
    row = [*versions, ' '.join(arguments) or 'all']
    page = PAGE.read_text() if PAGE.is_file() else ''
    lines = [line.strip('| ').split(' | ') for line in page.splitlines() if line.startswith('| ')]
    rows = [cells for cells in lines[2:] if cells[: len(row)] != row]
    result = ', '.join(f'{count} {name}' for name, count in counts.items() if count)
    rows.append([*row, result, date.today().isoformat()])
    PAGE.write_text(TEXT + markdown_table(HEAD, sorted(rows)))
