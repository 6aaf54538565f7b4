"""The pages of the site that are not in docs/, and the targets of links to other files.

mkdocs calls these functions. Links in the files are those that work in the repository. Here they
become links to the pages that the site has for their targets; a file that a page links to gets a
page of its own, which is neither in the navigation nor in the search.
"""

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # by page of the site, the file
    'index.md': 'README.md',
    'recipes.md': 'configs/README.md',
    'examples.md': 'examples/README.md',
    'changelog.md': 'CHANGELOG.md',
    'contributing.md': 'CONTRIBUTING.md',
    'security.md': 'SECURITY.md',
}
LINK = re.compile(r'(?<=\]\()(?!\w+:)([^)#\s]+)')
PICTURES = ('.png', '.jpg', '.svg')
HIDDEN = '---\nsearch:\n  exclude: true\n---\n'
LANGUAGES = {'.py': 'python', '.sh': 'bash', '.yml': 'yaml', '.yaml': 'yaml'}


def source_of(page: str) -> str:
    """The file of a page, relative to the repository."""
    if page.startswith('source/'):
        return page.removeprefix('source/')
    return PAGES.get(page, f'docs/{page}')


def page_of(source: str) -> str:
    """The page, or picture, of a file that a page links to; both relative."""
    for page, path in PAGES.items():
        if path == source:
            return page
    if source.startswith('docs/'):
        return source.removeprefix('docs/')
    if Path(source).suffix in (*PICTURES, '.md'):
        return f'source/{source}'
    return f'source/{source}.md'


def targets(text: str, source: str) -> Iterator[str]:
    """The files of the repository that a text links to; the text is that of `source`."""
    for link in LINK.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if (ROOT / path).is_file():
            yield path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    unread = list(files.documentation_pages())
    while unread:
        file = unread.pop()
        for path in targets(file.content_string, source_of(file.src_uri)):
            page = page_of(path)
            if not page.startswith('source/') or page in files.src_uris:
                continue
            if Path(path).suffix in PICTURES:
                files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
                continue
            linked = File.generated(config, page, content=HIDDEN + text_of(path))
            files.append(linked)
            if Path(path).suffix == '.md':
                unread.append(linked)
    return files


def text_of(path: str) -> str:
    """The Markdown of a page for a file of the repository."""
    text = (ROOT / path).read_text()
    if path.endswith('.md'):
        return text
    if path.endswith('.ipynb'):
        return text_of_notebook(json.loads(text))
    language = LANGUAGES.get(Path(path).suffix, 'text')
    return f'# {path}\n\n````{language}\n{text}\n````\n'


def text_of_notebook(notebook: dict) -> str:
    """Its text and code, as Markdown."""
    parts = []
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code':
            source = f'```python\n{source}\n```'
        parts.append(source)
    return '\n\n'.join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = source_of(here)
    if not (ROOT / source).is_file():
        return markdown  # of a source file, which links to nothing

    def moved(match: re.Match) -> str:
        path = next(targets(f']({match[1]})', source), None)
        if path is None:
            return match[1]
        return posixpath.relpath(page_of(path), posixpath.dirname(here) or os.curdir)

    return LINK.sub(moved, markdown)
