"""A training of a folder with data, without a config: it is written first."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Optional

from ...data.folder import Files, assigned_splits
from ...data.new_config import new_config
from ...data.readers import layout_of
from ...tooling.command import PACKAGE, ROOT, UserError
from ...tooling.files import make_folder

DETECTOR = 'retinanet_cpvt_s.py'
SEGMENTOR = 'semantic_fpn_cpvt_s.py'


def config_of_data(
    data: Path,
    base: Optional[str],
    work_dir: Optional[str],
    assign: Sequence[str] = (),
    resume: bool = False,
    skip_bad: bool = False,
) -> str:
    """Write the config of a training of the data in a folder, next to its work dir, and print what
    was found and chosen.

    Args:
        data: folder with images and annotations.
        base: config with the model and the recipe; by default a small one for the kind of data.
        work_dir: of the training; by default work_dirs/NAME, with the name of the folder.
        assign: the splits of folders or files, as FOLDER=SPLIT.
        resume: use the config that the first call wrote.
        skip_bad: leave out images and annotations that have errors.

    Returns:
        The path of the config, WORK_DIR.py.
    """
    name = Path(os.path.abspath(data)).name
    name = re.sub(r'[^\w .-]', '_', name)  # quotes and braces mean something in configs
    folder = Path(work_dir or Path('work_dirs', name))
    out = folder.with_name(f'{folder.name}.py')
    if resume and out.is_file():
        return str(out)
    if out.exists():
        train = f'cpvt train {quote(str(out))}'
        raise UserError(
            f'{out} exists; continue its training with --resume, train with it ({train}), or '
            'choose another --work-dir'
        )
    make_folder(out.parent)
    assigned = assigned_splits(assign)
    if base:
        chosen = Path(base)
    elif has_objects(data, assigned):
        chosen = shipped_config(DETECTOR)
    else:
        chosen = shipped_config(SEGMENTOR)
    for line in new_config(data, chosen, out, skip_bad, assigned=assigned):
        print(line)
    if not base:
        print(f'the base is {chosen.name}; --base takes another')
    return str(out)


def has_objects(data: Path, assigned: Mapping[str, str]) -> bool:
    return layout_of(Files(data, assigned)) is not None


def shipped_config(name: str) -> Path:
    """The path of a config of this package, in a checkout or an installed wheel."""
    installed = ROOT / PACKAGE / '.mim/configs'
    folder = installed if installed.is_dir() else ROOT / 'configs'
    return folder / name
