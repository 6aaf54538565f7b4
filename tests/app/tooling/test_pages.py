"""Pages show texts as they are, whatever is in them, and are one file."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from cpvt_pyramid.app.tooling import charts, pages

ATTACK = '<script>alert("&amp;")</script>'


class Found(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.urls: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ('src', 'href')]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope='module')
def page() -> str:
    picture = Image.new('RGB', (8, 6), 'red')
    parts = [
        pages.html_section(
            ATTACK,
            ATTACK,
            pages.cards({ATTACK: ATTACK}),
            pages.html_table([ATTACK, 'b'], [[ATTACK, 0.12345], [None, float('nan')]]),
            pages.contact_sheet([(picture, ATTACK)]),
            pages.side_by_side(pages.wide_picture(picture)),
            charts.bar_chart({ATTACK[:20]: 1.0}, ATTACK),
            charts.heat_map(np.eye(2), ['<b>', 'b'], ['<b>', 'b'], ATTACK, ATTACK),
        )
    ]
    return pages.html_page(ATTACK, ATTACK, parts)


def test_texts_are_escaped(page):
    found = Found(page)
    assert found.tags.count('script') == 1 and 'b' in found.tags  # the page's own; of the cards
    assert found.tags.count('title') == found.tags.count('h1') == found.tags.count('h2') == 1
    texts = [text.strip() for text in found.texts]
    assert texts.count(ATTACK) >= 8
    assert '0.123' in texts and texts.count('–') == 2


def test_a_page_is_one_file(page):
    urls = Found(page).urls
    assert len(urls) == 2 and all(url.startswith('data:image/') for url in urls)
    assert page.startswith('<!DOCTYPE html>') and page.count('<svg') == 2


def test_plain_text_among_the_parts_is_text():
    """Only what the functions return is HTML."""
    assert '&lt;b&gt;' in pages.html_section('', '', '<b>')


def test_names_of_files_that_are_not_utf8():
    page = pages.html_page('a\udcff.jpg', '', [])
    assert 'a?.jpg' in page and page.encode()


def test_the_style_and_the_script_are_not_escaped(page):
    (style,) = re.findall(r'<style>(.*?)</style>', page, re.S)
    (script,) = re.findall(r'<script>(.*?)</script>', page, re.S)
    assert '&' not in style and '=>' in script and "'th'" in script
