"""Files and locks."""

import errno

import pytest

from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.tooling.files import (
    atomic_write,
    check_file,
    folder_to_fill,
    locked,
    new_folder,
    write_text,
)


def test_a_file_in_a_new_folder(tmp_path):
    path = tmp_path / 'a/b/c.txt'
    check_file(path)
    assert not list(tmp_path.iterdir())
    write_text(path, 'text')
    assert path.read_text() == 'text'


@pytest.mark.parametrize('write', [atomic_write, folder_to_fill, new_folder])
def test_a_failure_leaves_the_folders_that_there_were(write, tmp_path):
    (tmp_path / 'old').mkdir()
    with pytest.raises(KeyboardInterrupt), write(tmp_path / 'old/a/b/c'):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob('*')] == ['old']


def test_a_failure_leaves_folders_that_are_used(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / 'a/b/c'):
        (tmp_path / 'a/other').touch()
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['a', 'other']


def test_a_new_folder_in_one_that_cannot_be_written():
    with pytest.raises(UserError, match='^cannot write to the folder /proc: '):
        check_file('/proc/new/a.txt')


def test_a_lock_is_held_by_one(tmp_path):
    lock = locked(tmp_path / 'lock')
    with pytest.raises(BlockingIOError, match='locked by another process'):
        locked(tmp_path / 'lock')
    lock.release()
    locked(tmp_path / 'lock').release()


@pytest.mark.parametrize('code', ['ENOLCK', 'EOPNOTSUPP', 'ENOTSUP', 'EIO'])
def test_a_file_system_without_locks(code, tmp_path, monkeypatch):
    """Other errors of locks are raised."""

    def flock(*_: object) -> None:
        raise OSError(getattr(errno, code), 'not supported')

    monkeypatch.setattr('fcntl.flock', flock)
    if code == 'EIO':
        with pytest.raises(OSError, match='not supported'):
            locked(tmp_path / 'lock')
    else:
        assert locked(tmp_path / 'lock') is None
