"""`CPVT_RECORD=1 make test`, or another target, writes versions and result to docs/install.md."""

import platform
from collections.abc import Mapping
from datetime import date

from support import ROOT

from cpvt_pyramid.app.doctor import installed
from cpvt_pyramid.app.tooling.report import markdown_table

PAGE = ROOT / 'docs/install.md'
BEGIN = '<!-- tested: tests/tested.py -->\n'
END = '\n<!-- end of tested -->'
TEXT = """\
Recorded runs. A row is written by the run itself (`CPVT_RECORD=1 make test`, for example): the
versions that it found, and what it ended with. Where folders or files are named, only they were
tested. Skipped tests need a GPU or something that an environment lacks.

"""
PACKAGES = (
    ('torch',),
    ('mmcv', 'mmcv-lite', 'onedl-mmcv'),
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
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = [line.strip('| ').split(' | ') for line in table.splitlines() if line.startswith('| ')]
    rows = [cells for cells in lines[2:] if cells[: len(row)] != row]
    result = ', '.join(f'{count} {name}' for name, count in counts.items() if count)
    rows.append([*row, result, date.today().isoformat()])
    table = TEXT + markdown_table(HEAD, sorted(rows)).rstrip()
    PAGE.write_text(f'{before}{BEGIN}{table}{END}{after}')
