"""Check the data sets of a config, or a folder with data: annotations, masks and every image.

Prints a line for each kind of problem and writes all file names to a report. An error stops a
training or teaches it something wrong; a warning is about what OpenMMLab silently leaves out. The
exit status is 1 if there are errors. cpvt train makes the same check for some seconds. For the
layouts of folders, see docs/own_data.md.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Optional

from ..tooling.command import UserError, run_command


def check_data(
    source: str,
    *,
    splits: Sequence[Literal['train', 'val', 'test']] = ('train', 'val', 'test'),
    out_dir: str = 'work_dirs/check_data',
    assign: Sequence[str] = (),
    cfg_options: Sequence[str] = (),
) -> int:
    """Check the data sets of a config or a folder.

    Args:
        source: config file, or folder with data.
        splits: which data to check.
        out_dir: folder for data_report.txt.
        assign: for a folder with data: what folders or files in it are for, train,
            val or test, where their names say something else; for example site_dev=train.
        cfg_options: override settings of the config.
    """
    from ..config.check import check_data
    from ..config.load import load_config
    from ..config.parts import data_of
    from ..data.checks import check_contents
    from ..data.folder import assigned_splits
    from ..data.new_config import config_of_folder
    from ..tooling.files import make_folder

    folder = Path(out_dir)
    with TemporaryDirectory() as temporary:
        if Path(source).is_dir():
            if cfg_options:
                raise UserError(f'--cfg-options needs a config, got the folder {source}')
            cfg, found = config_of_folder(Path(source), temporary, assigned_splits(assign))
        elif assign:
            raise UserError(f'--assign needs a folder with data, got {source}')
        else:
            cfg = load_config(source, cfg_options)
            found = []
            check_data(cfg, *splits)
        if not any(data_of(cfg, split) for split in splits):
            raise UserError(f'{source} has no data for {" or ".join(splits)}')
        make_folder(folder)
        errors = check_contents(cfg, *splits, folder=folder, found=found)
    print('no errors' if not errors else f'{errors} kinds of errors')
    return min(errors, 1)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(check_data, argv)
