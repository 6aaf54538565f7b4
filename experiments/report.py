"""What a question was answered: tables, figures and the data behind them, in files and a report."""

import base64
import html
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpvt_pyramid.tooling.files import write_text
from cpvt_pyramid.tooling.pages import html_page, html_section, html_table
from cpvt_pyramid.tooling.report import markdown_table, text_table

from .training import versions

ROWS_OF_A_PAGE = 20  # of a table that a page shows unfolded


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

    def html(self) -> str:
        return f'<h3>{html.escape(self.title)}</h3>{html_table(self.header, self.rows)}'


def make_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose short rows, of models with fewer stages, end in empty cells."""
    width = max(len(header), *map(len, rows))
    header, *rows = ([*cells, *[''] * (width - len(cells))] for cells in (header, *rows))
    return Table(title, header, rows)


class LabAnswer(NamedTuple):
    """The answer to a question of the lab."""

    question: str
    title: str
    notes: Sequence[str]  # how it was measured; a paragraph each
    tables: Sequence[Table]
    figures: Sequence[str]  # names of PNG files in the folder
    data: Any  # of JSON: all figures behind the tables


def save(finding: LabAnswer, settings: dict, folder: Path) -> None:
    """Write FOLDER/QUESTION.json."""
    tables = [table._asdict() for table in finding.tables]
    content = {**finding._asdict(), 'tables': tables, 'settings': settings, **versions()}
    write_text(folder / f'{finding.question}.json', json.dumps(without_nan(content), indent=1))


def without_nan(value: Any) -> Any:
    """For JSON, which has no NaN: null instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_lab_report(folder: Path, questions: Sequence[str]) -> Path:
    """Write FOLDER/report.html, self-contained, from the findings in a folder.

    Args:
        folder: with the files of `save`.
        questions: all questions, in the order of the report.
    """
    sections = []
    for path in (folder / f'{question}.json' for question in questions):
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        made_with = ', '.join(f'{name} {version}' for name, version in found['versions'].items())
        last = f'Settings: {json.dumps(found["settings"])}. Made with {made_with}.'
        parts = [f'<p>{html.escape(note)}</p>' for note in found['notes']]
        parts += [Table(**table).html() for table in found['tables']]
        for name in found['figures']:
            data = base64.b64encode((folder / name).read_bytes()).decode()
            picture = f'<img src="data:image/png;base64,{data}" style="max-width: 100%"'
            parts.append(f'{picture} alt="{html.escape(found["title"])}">')
        parts.append(f'<p><small>{html.escape(last)}</small></p>')
        sections.append(html_section(found['title'], '', *parts))
    write_text(folder / 'report.html', html_page('The position laboratory', '', sections))
    return folder / 'report.html'


def folded(table: Table, fold: bool) -> str:
    """Markdown of a table; with its title only, until it is unfolded, if it is long or `fold`."""
    if not fold and len(table.rows) <= ROWS_OF_A_PAGE:
        return table.markdown()
    title = html.escape(table.title)
    return f'<details><summary>{title}</summary>\n\n{table.markdown()}\n\n</details>'


def write_findings(folder: Path, questions: Sequence[str], page: Path) -> None:
    """Write the answers to questions, found in a folder, into a Markdown page, between the lines
    `<!-- findings -->` and `<!-- /findings -->`, and their figures next to it. Of each answer the
    figures and the first table are open; long tables and the others unfold."""
    start, end = '<!-- findings -->', '<!-- /findings -->'
    text = page.read_text()
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f'{page} must have one line {start} and one line {end}')
    parts = []
    for question in questions:
        found = json.loads((folder / f'{question}.json').read_text())
        settings, torch = found['settings'], found['versions']['torch']
        seeds = ', '.join(map(str, settings['seeds']))
        names = [f'{page.stem}-{name}' for name in found['figures']]
        for name, new in zip(found['figures'], names):
            shutil.copyfile(folder / name, page.with_name(new))
        parts += [
            f'### {found["title"]}',
            f'`{question}`: {settings["steps"]} steps, seeds {seeds}, PyTorch {torch}.',
            *(f'![{found["title"]}]({name})' for name in names),
            *(folded(Table(**table), i > 0) for i, table in enumerate(found['tables'])),
        ]
    before, after = text.split(start)[0], text.split(end)[1]
    write_text(page, f'{before}{start}\n\n' + '\n\n'.join(parts) + f'\n\n{end}{after}')
