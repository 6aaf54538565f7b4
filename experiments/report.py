"""What a question was answered: tables, figures and the data behind them, in files."""

import html
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.tooling.files import write_text
from cpvt_pyramid.app.tooling.report import markdown_table, text_table

from .runs import versions

ROWS_OF_A_PAGE = 20  # of a table that a page shows unfolded
START, END = '<!-- findings -->', '<!-- /findings -->'  # lines of a page, around what is written


class Table(NamedTuple):
    """A table of text; the first column names the rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        return f'{self.title}\n{text_table(self.header, self.rows)}'

    def markdown(self) -> str:
        return f'**{self.title}**\n\n{markdown_table(self.header, self.rows, numbers=True)}'.strip()


class Answer(NamedTuple):
    """The answer to a question."""

    question: str
    title: str
    notes: Sequence[str]  # how it was measured; a paragraph each
    tables: Sequence[Table]
    figures: Sequence[str]  # names of PNG files in the folder
    data: Any  # of JSON: all figures behind the tables


def publish(answer: Answer, settings: dict, folder: Path, page: Optional[str]) -> None:
    """Print the tables of an answer and write FOLDER/QUESTION.json; and, if a page is given, write
    the answer into it, see `write_findings`, and the JSON file next to it.

    Args:
        answer: its figures are in the folder.
        settings: of all runs, with their `steps` and `seeds`.
        folder: of all files.
        page: Markdown file.
    """
    tables = [table._asdict() for table in answer.tables]
    content = {**answer._asdict(), 'tables': tables, 'settings': settings, 'versions': versions()}
    data = folder / f'{answer.question}.json'
    write_text(data, json.dumps(without_nan(content), indent=1))
    print(f'\n{answer.title}')
    for table in answer.tables:
        print(f'\n{table.text()}')
    print(f'\n{data}; figures: {", ".join(answer.figures)}', flush=True)
    if page:
        write_findings(answer, settings, folder, Path(page))
        shutil.copyfile(data, Path(page).with_suffix('.json'))


def check_page(page: Optional[str]) -> None:
    """Raise a `UserError` unless a page that is given has the lines for findings."""
    if not page:
        return
    if not Path(page).is_file():
        raise UserError(f'there is no page {page}')
    text = Path(page).read_text()
    if text.count(START) != 1 or text.count(END) != 1:
        raise UserError(f'{page} must have one line {START} and one line {END}')


def without_nan(value: Any) -> Any:
    """For JSON, which has no NaN: null instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def folded(table: Table) -> str:
    """Markdown of which only the title is shown until it is unfolded."""
    title = html.escape(table.title)
    return f'<details><summary>{title}</summary>\n\n{table.markdown()}\n\n</details>'


def write_findings(answer: Answer, settings: dict, folder: Path, page: Path) -> None:
    """Write an answer into a Markdown page, between the lines START and END, and its figures next
    to it. The figures and the first table are open; long tables and the others unfold."""
    seeds = ', '.join(map(str, settings['seeds']))
    torch = versions()['torch']
    parts = [f'### {answer.title}']
    parts.append(f'`{answer.question}`: {settings["steps"]} steps, seeds {seeds}, PyTorch {torch}.')
    for name in answer.figures:
        new = f'{page.stem}-{name}'
        shutil.copyfile(folder / name, page.with_name(new))
        parts.append(f'![{answer.title}]({new})')
    first, *others = answer.tables
    is_long = len(first.rows) > ROWS_OF_A_PAGE
    parts.append(folded(first) if is_long else first.markdown())
    parts += [folded(table) for table in others]
    text = page.read_text()
    before = text.split(START)[0]
    after = text.split(END)[1]
    write_text(page, f'{before}{START}\n\n' + '\n\n'.join(parts) + f'\n\n{END}{after}')
