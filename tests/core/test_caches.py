"""The folder for what can be compiled or downloaded again."""

import os
import sys
import tempfile

import pytest
from support import run

from cpvt_pyramid.app.demo.wheels import wheels_folder
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.caches import cache_folder

FOLDERS = {
    'none': (None, 'home/.cache/cpvt_pyramid'),
    'empty': ('', 'home/.cache/cpvt_pyramid'),
    'relative': ('caches', 'home/.cache/cpvt_pyramid'),
    'absolute': ('{}/caches', 'caches/cpvt_pyramid'),
}


@pytest.mark.parametrize('given', FOLDERS)
def test_one_folder_for_all(monkeypatch, tmp_path, given):
    value, expected = FOLDERS[given]
    monkeypatch.delenv('CPVT_WHEEL_CACHE', raising=False)
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    if value is not None:
        monkeypatch.setenv('XDG_CACHE_HOME', value.format(tmp_path))
    assert cache_folder() == wheels_folder() == tmp_path / expected
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_folder(monkeypatch):
    for name in ('CPVT_WHEEL_CACHE', 'XDG_CACHE_HOME', 'HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, 'getuid', lambda: 2**31 - 9)  # whom the system does not know
    with pytest.raises(FileNotFoundError, match='set XDG_CACHE_HOME'):
        cache_folder()
    with pytest.raises(UserError, match='set XDG_CACHE_HOME'):
        wheels_folder()


def test_it_needs_no_torch():
    program = (
        'import sys\n'
        'sys.modules.update(torch=None, numpy=None)\n'
        'from cpvt_pyramid.app.demo.wheels import wheels_folder\n'
        'print(wheels_folder().name)'
    )
    done = run(
        sys.executable, '-c', program, CPVT_WHEEL_CACHE='', XDG_CACHE_HOME=tempfile.gettempdir()
    )
    assert done.stdout == 'cpvt_pyramid\n', done.stderr
