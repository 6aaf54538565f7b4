"""`cpvt check-data`: what a source has, what is wrong with it, and its description."""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..config.check import check_data
from ..config.load import load_config
from ..config.parts import data_of
from ..config.schedules import schedule_problems
from ..config.shipped import is_config_name
from ..tooling.command import UserError
from ..tooling.files import check_file, check_folder, check_new, make_folder
from .about import lines_about_data
from .config_data import check_contents, write_data_report
from .defects import Defects, Problem
from .description import load_yaml, write_description
from .images import ALL
from .layouts import layout_named
from .read import checked_source, write_described
from .recognize import ENDINGS, NotDeclared


def check_config(path: str, splits: Sequence[str], folder: Path, options: Sequence[str]) -> int:
    """Check the data sets of a config; returns the number of kinds of errors."""
    check_folder(folder)
    cfg = load_config(path, options)
    check_data(cfg, *splits)
    for problem in schedule_problems(cfg):
        print(problem)
    if not any(data_of(cfg, split) for split in splits):
        raise UserError(f'{path} has no data for {" or ".join(splits)}')
    return check_contents(cfg, *splits, folder=make_folder(folder))


def check_source(source: Path, format: Optional[str], folder: Path, out: Optional[Path]) -> int:
    """Check a folder or a `data.yaml`, and print what was taken for what; returns the number of
    kinds of errors.

    Args:
        source: the folder or file.
        format: that is asked for, of a folder with several. None: any.
        folder: gets a report.
        out: gets the description.
    """
    if out is not None:
        if out.suffix not in ENDINGS:
            raise UserError(f'--out must end in .yaml or .yml, got {out}')
        check_file(out)
        check_new(out)
    check_folder(folder)
    if format is not None:
        layout_named(format, '--format')
    found = Defects()
    try:
        checked = checked_source(source, [format] if format else None, ALL, found)
    except NotDeclared as error:
        if out is None:
            raise
        write_description(error.settings, error.root, out, error.comments)
        raise UserError(
            f'{error.reason}; complete {out}, a template, and give it instead of the folder'
        ) from error
    for line in lines_about_data(checked.data):
        print(line)
    problems: list[tuple[str, Problem]] = [('', problem) for problem in found.problems()]
    write_data_report(problems, folder)
    if out is not None:
        write_described(checked, out)
        print(f'wrote {out}')
    return sum(problem.is_error for _, problem in problems)


def is_config(path: Path) -> bool:
    """Whether a file is a config, and no `data.yaml`: it sets a model."""
    if not is_config_name(path) or not path.is_file():
        return False
    return path.suffix.lower() not in ENDINGS or 'model' in load_yaml(path)
