"""A bar on a terminal, lines in a log."""

import io
import re
import sys
import threading
import time
from typing import Any, Optional

import pytest
from support import ROOT

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.export import files, quantization
from cpvt_pyramid.app.export.onnx_file import ExportError
from cpvt_pyramid.app.tooling import progress as module
from cpvt_pyramid.app.tooling.progress import progress, working


def work(total: Optional[int], **options: Any) -> None:
    with progress(total, 'images', **options) as done:
        for _ in range(4):
            done(2)


def test_a_log_has_a_line_after_each_interval(capsys, monkeypatch):
    """Also while an item takes longer than that; and none of a run that is shorter."""
    work(8, name='a.tif')
    assert capsys.readouterr().err == ''
    monkeypatch.setattr(module, 'INTERVAL', 0.1)
    for total, of_total in ((8, ' of 8'), (None, '')):
        with progress(total, 'images', 'a.tif') as done:
            time.sleep(0.35)
            done(2)
            time.sleep(0.25)
        lines = capsys.readouterr().err.splitlines()
        assert lines.count(f'a.tif: 0{of_total} images, 0 s') >= 2
        assert re.fullmatch(rf'a.tif: 2{of_total} images, [0-9.]+ images/s', lines[-1])
    monkeypatch.setenv('RANK', '1')
    with progress(8, 'images'):
        time.sleep(0.3)
    assert capsys.readouterr().err == ''


def test_what_has_no_steps_says_that_it_goes_on(capsys, monkeypatch):
    with working('capturing'):
        pass
    assert capsys.readouterr().err == ''
    monkeypatch.setattr(module, 'INTERVAL', 0.1)
    with working('capturing'):
        time.sleep(0.35)
    assert capsys.readouterr().err.count('capturing, 0 s\n') >= 2
    monkeypatch.setenv('RANK', '1')
    with working('capturing'):
        time.sleep(0.3)
    assert capsys.readouterr().err == ''


def test_commands_that_take_long_say_so(monkeypatch, capsys, tmp_path):
    """What takes half a minute ends where it begins."""

    def stop(*_: Any) -> None:
        time.sleep(0.1)
        raise ExportError('enough')

    monkeypatch.setattr(module, 'INTERVAL', 0.02)
    monkeypatch.setattr(files, 'with_all_stages', stop)
    monkeypatch.setattr(quantization, 'quantize_file', stop)
    model = str(ROOT / 'examples/trees.onnx')
    backbone = ['pcpvt_nano', 'cpvt://pcpvt_nano']
    for arguments, said, status in (
        (['export', *backbone, '--out', str(tmp_path / 'a.onnx')], 'capturing the model, ', 2),
        (['verify', model, '--size', '32', '--batch-size', '2'], 'comparing with PyTorch, ', 0),
        (['quantize', model, str(ROOT / 'examples/trees')], 'quantizing, comparing and meas', 2),
    ):
        assert main(arguments) == status
        assert said in capsys.readouterr().err


def test_no_thread_outlives_an_error(monkeypatch):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), progress(8, 'images'):
        raise KeyboardInterrupt
    assert threading.active_count() == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_inside_another_does_not_stay(monkeypatch):
    """A folder of photographs in tiles ends with one bar."""
    terminal = Terminal()
    monkeypatch.setattr(sys, 'stderr', terminal)
    with progress(2, 'images') as done:
        for name in 'ab':
            work(8, name=name)
            done(1)
    rows = {0: '', 1: ''}  # what a terminal shows at the end
    row = 0
    for part in re.split(r'(\n|\r|\x1b\[A)', terminal.getvalue()):
        row += {'\n': 1, '\x1b[A': -1}.get(part, 0)
        if part not in ('', '\n', '\r', '\x1b[A'):
            rows[row] = part.strip()
    assert rows[0].startswith('100% ') and rows[1] == ''


@pytest.mark.parametrize('total, text', [(8, 'a: 100% |.*8 of 8 .*, .* images/s'), (None, 'a: 8 ')])
def test_a_terminal_has_a_bar(total, text, monkeypatch):
    """Also one whose size is unknown."""

    terminal = Terminal()
    monkeypatch.setattr(sys, 'stderr', terminal)
    monkeypatch.setattr(module, 'REFRESH', 0.05)
    work(total, name='a')
    assert re.search(text, terminal.getvalue())
    terminal.truncate(0)
    with progress(total, 'images', 'b'):
        terminal.truncate(0)
        time.sleep(0.3)  # an image takes long; the bar shows how long
        assert 'b: ' in terminal.getvalue()
