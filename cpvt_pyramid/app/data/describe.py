"""The description of a source: a `data.yaml`, or a folder, whose layout is recognized."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..config.shipped import is_config_name, shipped_configs, where_configs_are
from ..tooling.command import UserError
from ..tooling.files import full_if_current
from ..tooling.names import did_you_mean
from .data import Data
from .defects import Defects
from .description import (
    Description,
    Question,
    description_of,
    write_description,
)
from .masks import colors_of_masks, read_masks, values_of_masks
from .recognize import recognize
from .recognize.declared import declared_by_file

ENDINGS = '.yaml', '.yml'


class Described(NamedTuple):
    """What a source declares, or is recognized as.

    Attributes:
        settings: those of its `data.yaml`, without `path`.
        root: the folder that paths are relative to.
        notes: what a person should know, one line each.
        questions: what is not decided; then there is no description yet.
        source: the folder or file.
    """

    settings: dict[str, Any]
    root: Path
    notes: list[str]
    questions: list[Question]
    source: str

    @property
    def description(self) -> Description:
        return description_of(self.settings, self.root, self.source)

    def ask(self) -> None:
        """Raise a UserError if there are questions, which are printed with the lines to write."""
        if not self.questions:
            return
        print_questions(self.questions)
        raise UserError(
            f'{self.source}: {self.questions[0].text} Write one of the answers above to a '
            f'data.yaml; cpvt check-data {self.source} --out data.yaml begins one'
        )


def print_questions(questions: Sequence[Question]) -> None:
    """Print questions, each with the lines to choose from."""
    for question in questions:
        print(f'question: {question.text}')
        for line in question.lines:
            print(line)


def describe(source: Path, formats: Optional[Sequence[str]] = None) -> Described:
    """Describe a data.yaml or a folder; `formats` are those that are asked for."""
    if source.is_dir():
        recognized = recognize(source, formats)
        root = source
    elif not source.exists():
        raise UserError(f'no folder or file {source}{hint_about(source)}')
    elif source.suffix.lower() not in ENDINGS:
        raise UserError(f'the data must be a folder or a data.yaml, got the file {source}')
    else:
        recognized, root = declared_by_file(source, formats)
    settings = dict(recognized.settings)
    if 'path' in settings:  # of a data.yaml
        root = description_of(settings, root, str(source)).root
        del settings['path']
    questions = list(recognized.questions)
    described = Described(settings, root, recognized.notes, questions, full_if_current(source))
    return with_question_about_values(described)


def hint_about(source: Path) -> str:
    """What may be meant by a path at which there is nothing."""
    is_config = is_config_name(source) and source.suffix.lower() not in ENDINGS
    if is_config or source.name in shipped_configs():
        return f'; {where_configs_are(source)}'
    neighbours = [
        p.name for p in source.parent.glob('*') if p.is_dir() or p.suffix.lower() in ENDINGS
    ]
    return did_you_mean(source.name, neighbours)


def with_question_about_values(described: Described) -> Described:
    """A description of masks with a question, if no file names their values; with the values that
    occur as the lines to write."""
    settings = described.settings
    if settings.get('format') != 'masks' or described.questions:
        return described
    if 'names' in settings or 'colors' in settings:
        return described
    unnamed = {**settings, 'names': {0: 'unknown'}}
    data = read_masks(description_of(unnamed, described.root, described.source), Defects())
    masks = [str(p.mask) for pairs in data.splits.values() for p in pairs if p.mask]
    values = [value for value in values_of_masks(described.root, masks) if value != 255]
    if values and len(values) < 255 and not any(mask.lower().endswith('.gif') for mask in masks):
        names = {value: f'class_{value}' for value in values}
        text = 'no file names the values of the masks: what are they? 255 is ignored unless named'
        if values == [0]:
            names[255] = 'class_255'
        question = Question(text, [{'names': names}])
    else:
        colors = {f'class_{n}': [*c] for n, c in enumerate(colors_of_masks(described.root, masks))}
        if not colors:
            raise UserError(f'{described.source}: no segmentation mask can be read')
        text = 'the masks are in colours, and no file says of which classes: what are they?'
        question = Question(text, [{'colors': colors}])
    return described._replace(questions=[question])


def write_described(described: Described, data: Optional[Data], path: Path) -> None:
    """Write a `data.yaml`: with the names of the classes that were read or, if there are questions,
    with these as comments."""
    settings = dict(described.settings)
    comments = ['Written by cpvt check-data; see docs/own_data.md.']
    for question in described.questions:
        comments += [f'question: {question.text}', *question.lines]
    if data is not None and 'colors' not in settings:
        names = data.description.names or dict(enumerate(data.classes))
        settings['names'] = names
    write_description(settings, described.root, path, comments)
