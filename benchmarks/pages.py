"""Sections of pages that a program writes."""

from __future__ import annotations

from benchmarks import ROOT

README = ROOT / 'README.md'


def with_section(text: str, name: str, section: str) -> str:
    """A page's text with another section between two comments, `<!-- NAME: PROGRAM -->`, which
    names the program that writes it, and `<!-- end of NAME -->`."""
    begin = f'<!-- {name}: '
    end = f'<!-- end of {name} -->'
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f'a page must have the comments {begin}PROGRAM --> and {end}, each once')
    first_line = text.index('\n', text.index(begin)) + 1
    return text[:first_line] + section + text[text.index(end) :]
