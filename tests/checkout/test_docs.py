"""The pages work in the repository and on the site that `make docs` builds."""

import doctest
import pkgutil
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from support import ROOT

import cpvt_pyramid
from cpvt_pyramid import ARCHS

TESTS = ''.join(path.read_text() for path in (ROOT / 'tests').rglob('test_*.py'))
FOLDERS = (
    '.',
    'benchmarks',
    'configs',
    'docs',
    'examples',
    'experiments/position/findings',
    'experiments/unpadded/findings',
)
PAGES = [page for folder in FOLDERS for page in (ROOT / folder).glob('*.md')]


def build_site(folder: Path, **options: object) -> list[Path]:
    build(load_config(str(ROOT / 'mkdocs.yml'), strict=True, site_dir=str(folder), **options))
    return list(folder.rglob('*.html'))


def test_site(tmp_path):
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in build_site(tmp_path)}
    assert {'index.html', 'api.html', 'recipes.html', 'source/NOTICE.html'} <= pages.keys()
    assert 'drop_path_rate' in pages['api.html'] and 'href="predict.html"' in pages['index.html']
    assert 'href="source/configs/dino_cpvt_s.py.html"' in pages['models.html']
    assert '<h2 id="predict">' in pages['source/notebooks/cpvt_pyramid.ipynb.html']
    findings = pages['source/experiments/position/findings/encodings.html']
    assert '<table>' in findings and 'src="encodings-encodings.png"' in findings
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="([^"]+)"', text)
        loaded += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="([^"]+)"', text)
        assert not [url for url in loaded if '//' in url], name


def test_broken_links_fail(tmp_path):
    """As mkdocs is set up, `build_site` fails if a page links to nothing."""
    (tmp_path / 'index.md').write_text('[a page](nowhere.md)')
    with pytest.raises(Abort):
        build_site(tmp_path / 'site', docs_dir=str(tmp_path), nav=None, hooks=[])


@pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_work_on_both(page):
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
    for link in re.findall(r'\]\((?!\w+:)([^)#\s]+)', text):
        assert (page.parent / link).is_file(), link
    for test in re.findall(r'`(test_\w+)`', text):
        assert f'def {test}(' in TESTS, test
    # The site's Markdown needs an empty line before a list or a table, GitHub's does not.
    for before, line in pairwise(text.splitlines()):
        for start in (r'\s*(- |\d+\. )', r'\|'):
            if re.match(start, line) and before.strip():
                inside = re.match(start, before) or before.startswith((' ', '<!--'))
                assert inside, f'an empty line must precede {line!r}'


API_PAGE = (ROOT / 'docs/api.md').read_text()
API = re.findall(r'^::: (\S+)', API_PAGE, re.M)


def test_public_names_are_on_the_page():
    assert [name for name in cpvt_pyramid.__all__ if f'cpvt_pyramid.{name}' not in API_PAGE] == []


@pytest.mark.parametrize('name', API)
def test_examples(name, tmp_path, monkeypatch):
    """Every name of the API page has an example that runs in a checkout."""
    for folder in ('configs', 'examples'):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    known = {'torch': torch, 'ARCHS': ARCHS}
    known |= {path.rpartition('.')[2]: pkgutil.resolve_name(path) for path in API}
    (test,) = doctest.DocTestFinder(recurse=False).find(pkgutil.resolve_name(name), globs=known)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
