"""`cpvt check-data`: what a source has, what is wrong with it, and its description."""

import os
from collections import Counter
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
from ..tooling.report import amount
from .check import checked_data
from .config_data import check_contents, write_data_report
from .data import Data, Masks
from .defects import Defects, Problem
from .describe import ENDINGS, Described, describe, print_questions, write_described
from .description import load_yaml
from .images import ALL
from .new_config import line_about_pixels, lines_about
from .read import read_data


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


def check_source(
    source: Path, formats: Optional[Sequence[str]], folder: Path, out: Optional[Path]
) -> int:
    """Check a folder or a `data.yaml`, and print what was taken for what; returns the number of
    kinds of errors, and of questions.

    Args:
        source: the folder or file.
        formats: that the folder may have. None: any.
        folder: gets a report.
        out: gets the description.
    """
    if out is not None:
        if out.suffix not in ENDINGS:
            raise UserError(f'--out must end in .yaml or .yml, got {out}')
        check_file(out)
        check_new(out)
    check_folder(folder)
    described = describe(source, formats)
    print_description(described)
    if described.questions:
        print_questions(described.questions)
        if out is not None:
            write_described(described, None, out)
            print(
                f'wrote {out}, without the answers: write one to each question to it, in place '
                'of what it has of these keys'
            )
        return len(described.questions)
    found = Defects()
    data = None
    try:
        data = read_data(described.description, found)
        checked = checked_data(data, ALL, found)
    finally:
        for problem in found.problems():
            print(problem)
    for line in lines_about_data(checked.data, checked.counts):
        print(line)
    problems: list[tuple[str, Problem]] = [('', problem) for problem in found.problems()]
    write_data_report(problems, folder)
    if out is not None:
        write_described(described, data, out)
        print(f'wrote {out}')
    return sum(problem.is_error for _, problem in problems)


def print_description(described: Described) -> None:
    """Print what was taken for what."""
    settings = described.settings
    print(f'{described.source}: {settings.get("format") or "yolo"}')
    annotations = settings.get('annotations')
    lists = settings.get('lists')
    for split in ('train', 'val', 'test'):
        if split not in settings:
            continue
        line = f'{split}: images in {shown(settings[split])}'
        for what, value in (('annotations in', annotations), ('listed in', lists)):
            of_split = value.get(split) if isinstance(value, dict) else value
            if of_split:
                line += f', {what} {shown(of_split)}'
        print(line)
    for note in described.notes:
        print(f'note: {note}')


def shown(value: object) -> str:
    """The first paths of a setting, which are relative to the folder."""
    values = list(map(str, value)) if isinstance(value, list) else [str(value)]
    values = ['the folder itself' if path == os.curdir else path for path in values]
    more = f' and {len(values) - 4} more' if len(values) > 4 else ''
    return ', '.join(values[:4]) + more


def lines_about_data(data: Data, counts: Counter) -> list[str]:
    """Lines about the classes, images and objects of a data set."""
    names = ', '.join(data.classes[:12]) + (' ...' if len(data.classes) > 12 else '')
    lines = [f'{amount(len(data.classes), "class", "classes")}: {names}']
    if isinstance(data, Masks):
        lines += [f'{split}: {amount(len(pairs), "image")}' for split, pairs in data.splits.items()]
        lines.append(line_about_pixels(data, counts))
    else:
        for split, objects in data.splits.items():
            lines += lines_about(split, objects.content)
    return [*lines, *(f'note: {note}' for note in data.notes)]


def is_config(path: Path) -> bool:
    """Whether a file is a config, and no `data.yaml`: it sets a model."""
    if not is_config_name(path) or not path.is_file():
        return False
    return path.suffix.lower() not in ENDINGS or 'model' in load_yaml(path)
