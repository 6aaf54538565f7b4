#!/usr/bin/env python
"""Check the data sets of a config, or a folder with data: annotations, label maps and every image.

Prints a line for each kind of problem and writes all file names to a report. An error stops a
training or teaches it something wrong; a warning is about what mm silently leaves out. The exit
status is 1 if there are errors. train.py makes the same check for some seconds; with --skip-bad it
trains without what has errors. For the layouts of folders, see docs/own_data.md.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
from cpvt_pyramid.runner.command import run_command


def check_data(
    source: str,
    *,
    splits: Sequence[Literal['train', 'val', 'test']] = ('train', 'val', 'test'),
    out_dir: str = 'work_dirs/check_data',
    cfg_options: Sequence[str] = (),
) -> int:
    """Check the data sets of a config or a folder.

    Args:
        source (CONFIG|DATA): config file, or folder with data.
        splits: which data to check.
        out_dir (DIR): folder for data_report.txt.
        cfg_options (KEY=VALUE): override settings of the config.
    """
    from cpvt_pyramid.runner.checks import check_data
    from cpvt_pyramid.runner.configs import load_config
    from cpvt_pyramid.runner.data_checks import check_contents
    from cpvt_pyramid.runner.new_config import check_folder

    if Path(source).is_dir():
        errors = check_folder(Path(source), splits, Path(out_dir))
    else:
        cfg = load_config(source, cfg_options)
        check_data(cfg, *splits)
        errors = check_contents(cfg, *splits, folder=Path(out_dir)).errors
    print('no errors' if not errors else f'{errors} kinds of errors')
    return min(errors, 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(check_data, argv)


if __name__ == '__main__':
    sys.exit(main())
