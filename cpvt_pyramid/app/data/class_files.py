"""Files in which other tools write the names of classes, or the colours of masks."""

import csv
import io
import posixpath
from pathlib import Path
from typing import Any, NamedTuple

from ..tooling.command import UserError
from .description import load_yaml, repeated_in
from .files import names_in, text_of

# A class name in each line, as tools for YOLO and masks write them
NAME_FILES = (
    'classes.txt',
    'obj.names',
    'labels.txt',
    'names.txt',
    '_darknet.labels',
    'codes.txt',
    'class_names.txt',
)
ROBOFLOW = '_classes.csv'
# Tables of colours, by the names that are used for them
TABLES = ('class_dict.csv', 'class_dict_seg.csv', 'classes.csv', 'label_colors.csv', 'colors.csv')
NAME_COLUMNS = ('name', 'class', 'class_name', 'label', 'label_name', 'category')
LONGEST_HEAD = 1000  # bytes of the first line of a table


class Classes(NamedTuple):
    """The classes that files name, as settings of a `data.yaml`."""

    settings: dict[str, Any] = {}
    notes: list[str] = []


def classes_from_files(root: Path, names: list[str], for_masks: bool = False) -> Classes:
    """The classes from the first file that lists them; of masks, with their colours or values."""
    if for_masks:
        for name in names:
            found = classes_of_masks(root, name)
            if found.settings:
                return found
    listed = [name for name in names if posixpath.basename(name).lower() in NAME_FILES]
    if not listed:
        return classes_of_yaml(root, names)
    classes = {name: distinct_names(root / name) for name in listed}
    longest = max(listed, key=lambda name: len(classes[name]))  # the first of them
    for name in listed:
        if classes[name] != classes[longest][: len(classes[name])]:
            raise UserError(
                f'{longest} and {name} in {root} number the classes differently; they must have '
                'the same names in one order'
            )
    return Classes({'names': classes[longest]}, [f'{longest} names the classes'])


def classes_of_yaml(root: Path, names: list[str]) -> Classes:
    """The names in a data.yaml that says nothing else."""
    for name in names:
        if posixpath.basename(name).lower() in ('data.yaml', 'dataset.yaml'):
            settings = load_yaml(root / name)
            if settings.get('names'):
                notes = [f'{name} names the classes']
                return Classes({'names': settings['names']}, notes)
    return Classes()


def classes_of_masks(root: Path, name: str) -> Classes:
    """The classes in a file that lists the values or colours of masks; nothing of others."""
    path = root / name
    base = posixpath.basename(name)
    notes = [f'{name} names the classes']
    if base == 'objectInfo150.txt':  # ADE20K: 0 is ignored
        head, *rows = rows_of_table(path, '\t') or [[]]
        labels = [dict(zip(head, row)).get('Name', '').split(',')[0].strip() for row in rows if row]
        if not labels or not all(labels):
            raise UserError(f'{path} must have a column Name')
        numbered = dict(enumerate(distinct(labels, path), 1))
        return Classes({'names': numbered, 'ignored': [0, 255]}, notes)
    if base == 'labelmap.txt':  # CVAT: name:r,g,b:parts:actions
        rows = [line.split(':') for line in text_of(path).splitlines() if line[:1] != '#']
        rows = [[row[0], *row[1].split(',')] for row in rows if len(row) > 1]
        return Classes({'colors': colors_in(path, rows)}, notes)
    if base != ROBOFLOW and base.lower() not in TABLES:
        return Classes()
    head = head_of_table(path)
    if head == ['pixel value', 'class']:
        rows = [row for row in rows_of_table(path)[1:] if len(row) > 1]
        values = {row[0].strip(): row[1].strip() for row in rows}
        return Classes({'names': values}, notes)
    if head[1:4] != ['r', 'g', 'b'] or head[0] not in NAME_COLUMNS:
        return Classes()
    return Classes({'colors': colors_in(path, rows_of_table(path)[1:])}, notes)


def head_of_table(path: Path) -> list[str]:
    """The first line of a table, in small letters. The table can be of anything, in any encoding,
    with cells of any length."""
    with path.open('rb') as file:
        lines = file.read(LONGEST_HEAD).decode('utf-8-sig', 'replace').splitlines() or ['']
    return [cell.strip(' "').lower() for cell in lines[0].split(',')]


def rows_of_table(path: Path, delimiter: str = ',') -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text_of(path)), delimiter=delimiter))
    except csv.Error as error:
        raise UserError(f'{path} must be a table of classes: {error}') from error


def colors_in(path: Path, rows: list[list[str]]) -> dict[str, list[int]]:
    """The colours by name in the rows of a table."""
    rows = [row for row in rows if row]
    try:
        colors = [[int(value) for value in row[1:4]] for row in rows]
    except ValueError:
        colors = []
    is_whole = bool(colors) and all(len(color) == 3 for color in colors)
    if not is_whole or not all(0 <= value <= 255 for color in colors for value in color):
        raise UserError(f'{path} must list a name and three numbers, 0 to 255, for each class')
    names = distinct([row[0].strip() for row in rows], path)
    return dict(zip(names, colors))


def distinct_names(path: Path) -> list[str]:
    return distinct(names_in(path), path)


def distinct(names: list[str], path: Path) -> list[str]:
    repeated = repeated_in(names)
    if repeated is not None:
        raise UserError(f'{path}: two classes have the same name {repeated!r}')
    return names
