"""A bar on a terminal, lines in a log."""

import io
import itertools
import re
import sys
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from cpvt_pyramid.app.tooling import progress as module
from cpvt_pyramid.app.tooling.progress import progress


def work(total: Optional[int], **options: Any) -> None:
    with progress(total, 'images', **options) as done:
        for _ in range(4):
            done(2)


def test_a_log_has_a_line_every_30_seconds(capsys, monkeypatch):
    for seconds in (7, 16):  # for two images
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=clock.__next__))
        work(8, name='a.tif')
    assert capsys.readouterr().err == (
        'a.tif: 4 of 8 images, 0.125 images/s\na.tif: 8 of 8 images, 0.125 images/s\n'
    )
    work(None)
    assert capsys.readouterr().err == '4 images, 0.125 images/s\n8 images, 0.125 images/s\n'
    monkeypatch.setenv('RANK', '1')
    work(8)
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('total, text', [(8, 'a: 100% |.*8 of 8 .*, .* images/s'), (None, 'a: 8 ')])
def test_a_terminal_has_a_bar(total, text, monkeypatch):
    """Also one whose size is unknown."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, 'stderr', terminal)
    work(total, name='a')
    assert re.search(text, terminal.getvalue())
