"""Files and locks."""

import errno

import pytest

from cpvt_pyramid.app.tooling.files import locked


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
