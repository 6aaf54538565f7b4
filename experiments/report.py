"""What a question was answered: tables, figures and the data behind them, in files and a report."""

import html
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from cpvt_pyramid.tooling import pages
from cpvt_pyramid.tooling.command import UserError
from cpvt_pyramid.tooling.files import write_text
from cpvt_pyramid.tooling.report import markdown_table, text_table

from .statistics import holm, paired_difference, with_p
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


def make_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose short rows, of models with fewer stages, end in empty cells."""
    width = max(len(header), *map(len, rows))

    def filled(cells: Sequence[str]) -> list[str]:
        return [*cells, *[''] * (width - len(cells))]

    return Table(title, filled(header), [filled(cells) for cells in rows])


Pair = tuple[Sequence[float], Sequence[float]]  # values by seed, and those that are subtracted


def paired_table(title: str, columns: Sequence[str], pairs: Mapping[str, Sequence[Pair]]) -> Table:
    """Mean differences of runs that are paired by seed, with p values that are adjusted for their
    number (Holm).

    Args:
        title: what is subtracted from what.
        columns: their names.
        pairs: by name of the row, one for each column.
    """
    differences = []
    for of_row in pairs.values():
        differences += [paired_difference(values, base) for values, base in of_row]
    adjusted = holm([one.p for one in differences])
    cells = iter([with_p(one, p) for one, p in zip(differences, adjusted)])
    rows = [[name, *(next(cells) for _ in of_row)] for name, of_row in pairs.items()]
    count = sum(not math.isnan(p) for p in adjusted)
    title = f'{title}, in points, paired by seed (p, adjusted for {count} comparisons, Holm)'
    return Table(title, ['', *columns], rows)


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
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def write_lab_report(folder: Path, questions: Sequence[str]) -> Path:
    """Write FOLDER/report.html, self-contained, from the findings in a folder.

    Args:
        folder: with the files of `save`.
        questions: all questions, in the order of the report.
    """
    sections = []
    for question in questions:
        path = folder / f'{question}.json'
        if path.exists():
            sections.append(answer_section(json.loads(path.read_text()), folder))
    report = folder / 'report.html'
    write_text(report, pages.html_page('The position laboratory', '', sections))
    return report


def answer_section(found: dict, folder: Path) -> Markup:
    """The section of an answer, from its JSON file and the figures in the same folder."""
    parts = [pages.paragraph(note) for note in found['notes']]
    for table in found['tables']:
        parts.append(pages.heading(table['title']))
        parts.append(pages.html_table(table['header'], table['rows']))
    for name in found['figures']:
        parts.append(pages.wide_png((folder / name).read_bytes(), found['title']))
    made_with = ', '.join(f'{name} {version}' for name, version in found['versions'].items())
    settings = json.dumps(found['settings'])
    parts.append(pages.paragraph(f'Settings: {settings}. Made with {made_with}.'))
    return pages.html_section(found['title'], '', *parts)


def folded(table: Table) -> str:
    """Markdown of which only the title is shown until it is unfolded."""
    title = html.escape(table.title)
    return f'<details><summary>{title}</summary>\n\n{table.markdown()}\n\n</details>'


def write_findings(folder: Path, questions: Sequence[str], page: Path) -> None:
    """Write the answers to questions, found in a folder, into a Markdown page, between the lines
    `<!-- findings -->` and `<!-- /findings -->`, and their figures next to it. Of each answer the
    figures and the first table are open; long tables and the others unfold.

    Raises:
        UserError: the page does not have these lines.
    """
    start = '<!-- findings -->'
    end = '<!-- /findings -->'
    text = page.read_text()
    if text.count(start) != 1 or text.count(end) != 1:
        raise UserError(f'{page} must have one line {start} and one line {end}')
    parts = []
    for question in questions:
        found = json.loads((folder / f'{question}.json').read_text())
        settings = found['settings']
        seeds = ', '.join(map(str, settings['seeds']))
        torch = found['versions']['torch']
        parts.append(f'### {found["title"]}')
        parts.append(f'`{question}`: {settings["steps"]} steps, seeds {seeds}, PyTorch {torch}.')
        for name in found['figures']:
            new = f'{page.stem}-{name}'
            shutil.copyfile(folder / name, page.with_name(new))
            parts.append(f'![{found["title"]}]({new})')
        first, *others = (Table(**table) for table in found['tables'])
        is_long = len(first.rows) > ROWS_OF_A_PAGE
        parts.append(folded(first) if is_long else first.markdown())
        parts += [folded(table) for table in others]
    before = text.split(start)[0]
    after = text.split(end)[1]
    write_text(page, f'{before}{start}\n\n' + '\n\n'.join(parts) + f'\n\n{end}{after}')
