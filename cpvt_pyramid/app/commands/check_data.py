"""Check a data set: a folder, its description data.yaml, or the data sets of a config.

Of a folder, the layout is recognized, and what was taken for what is printed; --out writes it as a
data.yaml, which can be edited. What names do not decide must be written there: a template is
printed. Every image and annotation is read; there is a line for each kind of problem, and all file
names go to a report. An error stops a training or teaches it something wrong; a warning is about
what OpenMMLab silently leaves out. The exit status is 1 if there are errors. See docs/own_data.md.

    cpvt check-data photos --out data.yaml
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from ..tooling.command import UserError, run_command
from ..tooling.report import amount

GROUP = 'data'


def check_data(
    source: str,
    *,
    out: Optional[str] = None,
    format: Optional[str] = None,
    splits: Sequence[Literal['train', 'val', 'test']] = (),
    out_dir: str = 'work_dirs/check_data',
    cfg_options: Sequence[str] = (),
) -> int:
    """Check a folder, a data.yaml or a config.

    Args:
        source: folder with data, data.yaml or config.
        out: for a folder: write its data.yaml to this file.
        format: for a folder that has data in several formats: one of them.
        splits: for a config: which data to check, by default all.
        out_dir: folder for data_report.txt.
        cfg_options: override settings of the config.
    """
    from ..config.parts import SPLITS
    from ..data.report import check_config, check_source, is_config

    if is_config(Path(source)):
        if out or format:
            raise UserError(f'--out and --format need a folder or a data.yaml, got {source}')
        errors = check_config(source, splits or SPLITS, Path(out_dir), cfg_options)
    else:
        if cfg_options or splits:
            raise UserError(f'--splits and --cfg-options need a config, got {source}')
        errors = check_source(Path(source), format, Path(out_dir), Path(out) if out else None)
    kinds = amount(errors, 'kind of error', 'kinds of errors')
    print(kinds if errors else 'no errors')
    return min(errors, 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(check_data, argv)
