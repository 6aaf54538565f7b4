"""The folder of a data set: complete or not there, and safe for what is in it."""

from pathlib import Path

import pytest

from cpvt_pyramid.app.commands import demo_data
from cpvt_pyramid.app.demo import pages

SMALL = '--train', '2', '--val', '1'


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob('*') if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def refusal(capsys, root: Path, *arguments: str) -> str:
    """The command's one-line error."""
    assert demo_data.main(['pages', '--root', str(root), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith('cpvt demo-data: ') and err.count('\n') == 1
    return err


def test_an_existing_set_is_kept(tmp_path, capsys):
    path = tmp_path / 'new' / 'folder'
    path.mkdir(parents=True)  # an empty folder is as good as none
    assert demo_data.main(['pages', '--root', str(path), *SMALL]) == 0
    assert 'created' in capsys.readouterr().out
    times = {file: file.stat().st_mtime_ns for file in path.rglob('*')}
    assert demo_data.main(['pages', '--root', str(path), *SMALL]) == 0
    assert 'already complete' in capsys.readouterr().out
    assert 'other arguments' in refusal(capsys, path, '--train', '3', '--val', '1')
    assert 'seed' in refusal(capsys, path / 'more', '--seed', '-1')
    assert {file: file.stat().st_mtime_ns for file in path.rglob('*')} == times
    assert [entry.name for entry in path.parent.iterdir()] == ['folder']


def test_a_folder_of_others_is_left_alone(tmp_path, capsys):
    file = tmp_path / 'sample.json'  # the name of our own
    file.write_bytes(b'{"mine": 1}\xff')
    for root in (tmp_path, file):
        assert 'has other files' in refusal(capsys, root, *SMALL)
    assert str(file) in refusal(capsys, file / 'pages', *SMALL)
    assert contents(tmp_path) == {'sample.json': b'{"mine": 1}\xff'}
    if Path('/proc/self').exists():
        assert 'cannot write to the folder /proc' in refusal(capsys, Path('/proc/x'), *SMALL)


@pytest.mark.parametrize('error, status', [(KeyboardInterrupt(), 130), (OSError(28, 'full'), 2)])
def test_an_interrupt_or_a_full_disk_leaves_nothing(error, status, tmp_path, capsys, monkeypatch):
    draws = [pages.draw_page]  # and then the error

    def draw_page(*args):
        if not draws:
            raise error
        return draws.pop()(*args)

    monkeypatch.setattr(pages, 'draw_page', draw_page)
    assert demo_data.main(['pages', '--root', str(tmp_path / 'pages'), *SMALL]) == status
    printed = capsys.readouterr().err
    assert 'cpvt demo-data: ' in printed and 'Traceback' not in printed
    assert list(tmp_path.iterdir()) == []
