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

from .runs import versions

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
.wide { overflow-x: auto }
"""
ROWS_OF_A_PAGE = 20  # of a table that a page shows unfolded


class Table(NamedTuple):
    """A table of text; the first column names the rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        lines = [list(self.header), *map(list, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        shown = [
            '  '.join(
                cell.ljust(w) if i == 0 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        ]
        return '\n'.join([self.title, shown[0], '-' * len(shown[0]), *shown[1:]])

    def markdown(self) -> str:
        lines = [self.header, ['---', *('---:' for _ in self.header[1:])], *self.rows]
        table = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
        return f'**{self.title}**\n\n{table}'

    def html(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return f'<tr>{"".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)}</tr>'

        body = '\n'.join(row(cells, 'td') for cells in self.rows)
        return (
            f'<h3>{html.escape(self.title)}</h3>\n<div class="wide"><table>'
            f'{row(self.header, "th")}\n{body}</table></div>'
        )


class LabAnswer(NamedTuple):
    """The answer to a question of the lab."""

    question: str
    title: str
    notes: Sequence[str]  # how it was measured; a paragraph each
    tables: Sequence[Table]
    figures: Sequence[str]  # names of PNG files in the folder
    data: Any  # of JSON: all figures behind the tables
    settings: Any  # of JSON


def save(finding: LabAnswer, folder: Path) -> Path:
    """Write FOLDER/QUESTION.json."""
    path = folder / f'{finding.question}.json'
    content = {**finding._asdict(), 'tables': [t._asdict() for t in finding.tables], **versions()}
    text = json.dumps(without_nan(content), indent=1)
    write_text(path, text)
    return path


def without_nan(value: Any) -> Any:
    """For JSON, which has no NaN: null instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_lab_report(folder: Path, questions: Sequence[str]) -> list[Path]:
    """Write FOLDER/report.html and report.md, self-contained, from the findings in a folder.

    Args:
        folder: with the files of `save`.
        questions: all questions, in the order of the report.
    """
    markdown, page = ['# The position laboratory'], ['<h1>The position laboratory</h1>']
    for question in questions:
        path = folder / f'{question}.json'
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        tables = [Table(**table) for table in found['tables']]
        pictures = [base64.b64encode((folder / name).read_bytes()).decode()
                    for name in found['figures']]  # fmt: skip
        pictures = [f'data:image/png;base64,{data}' for data in pictures]
        made_with = ', '.join(f'{name} {version}' for name, version in found['versions'].items())
        settings = json.dumps(found['settings'])
        markdown += [
            f'## {found["title"]}', *found['notes'], *(t.markdown() for t in tables),
            *(f'![{found["title"]}]({data})' for data in pictures),
            f'Settings: `{settings}`. Made with {made_with}.',
        ]  # fmt: skip
        page += [
            f'<h2>{html.escape(found["title"])}</h2>',
            *(f'<p>{html.escape(note)}</p>' for note in found['notes']),
            *(t.html() for t in tables),
            *(f'<img src="{data}" alt="{html.escape(found["title"])}">' for data in pictures),
            f'<p><small>Settings: {html.escape(settings)}. Made with {made_with}.</small></p>',
        ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    document = (
        f'<!doctype html><html lang="en"><head>{head}<title>The position laboratory</title>'
        f'<style>{STYLE}</style></head><body>\n' + '\n'.join(page) + '\n</body></html>\n'
    )
    paths = [folder / 'report.html', folder / 'report.md']
    for path, text in zip(paths, (document, '\n\n'.join(markdown) + '\n')):
        write_text(path, text)
    return paths


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
