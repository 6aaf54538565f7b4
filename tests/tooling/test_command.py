"""Command lines from functions, and how they end."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal, Optional, Union
from unittest import mock

import pytest
from support import ROOT, run

from cpvt_pyramid.tooling import command, files
from cpvt_pyramid.tooling.command import UserError, parser_of, run_command, run_tool


@pytest.mark.parametrize('signum, said, status', [(2, 'interrupted', 130), (15, 'terminated', 143)])
def test_signals_unwind_and_give_the_status(signum, said, status, tmp_path, capsys):
    def write() -> None:
        with files.atomic_write(tmp_path / 'file') as partial:
            partial.write_text('ha')
            try:
                signal.raise_signal(signum)
            except:  # noqa: E722 as mmengine does while it formats a config
                raise SyntaxError from None

    assert run_tool('tool', write, {}, 'try again') == status
    assert capsys.readouterr().err == f'tool: {said}; try again\n'
    assert not list(tmp_path.iterdir())


def test_an_interrupt_during_imports_is_no_traceback(tmp_path):
    for module in ('argparse', 'mmengine'):
        folder = tmp_path / module
        folder.mkdir()
        (folder / f'{module}.py').write_text('raise KeyboardInterrupt')
        paths = f'{folder}:{ROOT}'
        ended = run(sys.executable, ROOT / 'tools/test.py', 'x.py', 'x.pth', PYTHONPATH=paths)
        assert ended.returncode == 130 and ended.stderr.count('\n') <= 1, module


def test_an_interrupt_while_options_are_read_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(command, 'parser_of', mock.Mock(side_effect=KeyboardInterrupt))
    assert run_command(measure, []) == 130
    assert capsys.readouterr().err == 'test_command: interrupted; nothing was written\n'


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, capsys):
    (tmp_path / 'file').write_text('before')

    def build() -> None:
        try:
            with files.atomic_write(tmp_path / 'file'), open('/dev/full', 'w') as full:
                full.write('ha')
        except OSError as error:  # as registries of mm do with what a constructor raises
            raise type(error)(f'in Hook: {error}') from None

    assert run_tool('tool', build, {}, 'try again') == 2
    said = f'tool: no space left on the disk for {tmp_path}/file; try again\n'
    assert capsys.readouterr().err == said
    assert [path.read_text() for path in tmp_path.iterdir()] == ['before']


def test_status_and_error(capsys, monkeypatch):
    def raises(error: Exception) -> None:
        raise error

    for function, status, said in (
        (lambda: raises(UserError('no image at x')), 2, 'no image at x'),
        (lambda: raises(PermissionError(13, '', 'photos')), 2, 'permission denied for photos'),
        (lambda: 1, 1, ''),
        (lambda: None, 0, ''),
    ):
        for rank, name in (('0', 'tool'), ('3', 'tool: rank 3')):
            monkeypatch.setenv('RANK', rank)
            assert run_tool('tool', function, {}, 'try again') == status
            assert capsys.readouterr().err == (said and f'{name}: {said}\n')


def measure(
    image: str,
    kinds: Sequence[Literal['a', 'b']],
    *,
    size: tuple[int, int] = (512, 640),
    resume: Union[bool, str] = False,
    amp: bool = False,
    scale: Optional[float] = None,
    to_file: str,
) -> None:
    """Measure an image.

    Args:
        image: an image, 100%
            of it.
        kinds: what to measure.
        size: height and width.
        resume: resume: from this file, if given.
        amp: mixed precision.
        scale: factor.
        to_file: where to write to.

    Returns:
        Nothing: really.
    """


def test_options_come_from_the_signature(capsys):
    given = {
        'image': 'x',
        'kinds': ['b'],
        'to_file': 'y',
        'resume': False,
        'amp': False,
        'scale': None,
        'size': (512, 640),
    }
    for line, options in (
        ('x a b --to-file y', {'kinds': ['a', 'b']}),
        ('x b --to-file y --size 3 4 --amp --scale -2', {'size': [3, 4], 'amp': True, 'scale': -2}),
        ('x b --to-file y --resume', {'resume': True}),
        ('x b --resume --to-file y', {'resume': True}),
        ('x b --to-file=y --resume=p', {'resume': 'p'}),
        ('--to-file=y --resume x b', {'resume': True}),
        ('- b --to-file -', {'image': '-', 'to_file': '-'}),
    ):
        assert vars(parser_of(measure).parse_args(line.split())) == given | options
    for line, said in (
        ('x.png a', '--to-file'),
        ('x a c --to-file y', "'c'"),
        ('x a --to-file y --siez 3 4', '--siez'),
        ('x a --to-file y --scal 3', '--scal'),
        ('x a b --to-file y --resume p', 'p (--resume takes a value after =)'),
        ('x a --to-file y --size 3', '--size: expected 2'),
        ('x a --to-file y --size 3.5 4', "'3.5'"),
        ('x a --to-file y --scale much', "'much'"),
    ):
        with pytest.raises(SystemExit, match='2'):
            run_command(measure, line.split())
        error = capsys.readouterr().err
        assert error.startswith('test_command: ') and error.endswith('; see --help\n')
        assert said in error and error.count('\n') == 1, line


def test_help_comes_from_the_docstrings(capsys):
    with pytest.raises(SystemExit, match='0'):
        run_command(measure, ['--help'])
    said = ' '.join(capsys.readouterr().out.split())
    assert said.startswith('usage: test_command [-h] [--size SIZE SIZE] [--resume [=RESUME]]')
    assert 'Command lines from functions, and how they end.' in said
    for text in (
        'IMAGE an image, 100% of it',
        'height and width (default: 512 640)',
        '--resume [=RESUME] resume: from this file, if given --amp mixed precision --scale SCALE',
    ):
        assert text in said
    assert 'really' not in said


def test_help_without_docstrings():
    """As `python -OO`, or PYTHONOPTIMIZE=2, leaves them out."""
    ended = run(
        sys.executable, '-OO', '-m', 'cpvt_pyramid', 'train', '--help', PYTHONPATH=str(ROOT)
    )
    assert ended.returncode == 0 and '--work-dir' in ended.stdout, ended.stderr


def test_failing_imports(capsys):
    for code, line in (
        ('import no_such.part', "No module named 'no_such': no_such is not installed for "),
        (
            'try: import no_such\nexcept ImportError: raise ImportError from None',
            "No module named 'no_such': no_such is not installed for ",
        ),
        ('import torch.no_such', "No module named 'torch.no_such': torch is not installed for "),
        ('from torch import no_such', "cannot import name 'no_such' from 'torch'"),
    ):
        assert run_tool('tool', lambda code=code: exec(code), {}, '') == 2
        error = capsys.readouterr().err
        assert error.startswith(f'tool: {line}') and error.count('\n') == 1
    for code in ('import cpvt_pyramid.no_such', 'raise ImportError("no name")'):
        with pytest.raises(ImportError):
            run_tool('tool', lambda code=code: exec(code), {}, '')


@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_nothing_reads_the_output(unbuffered):
    """As in `cpvt infer ... | head`."""
    code = 'from cpvt_pyramid.tooling.command import run_tool; import sys; '
    code += "sys.exit(run_tool('tool', lambda: print('done'), {}, ''))"
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': unbuffered}
    with os.fdopen(writer, 'wb') as closed:
        done = subprocess.run(
            [sys.executable, '-c', code], env=environment, stdout=closed, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (141, b'')


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EFBIG])
def test_no_space(number, capsys):
    def write() -> None:
        raise OSError(number, 'no space', 'a.jpg')

    assert run_tool('tool', write, {}, 'others are written') == 2
    told = 'tool: no space left on the disk for a.jpg; others are written\n'
    assert capsys.readouterr().err == told


@pytest.mark.parametrize('arguments', [[''], ['a.png', '--crops', '']])
def test_an_empty_argument_is_an_unset_variable(arguments, capsys):
    """And not the current folder, or all addresses of this machine."""

    def measure(image: str, *, crops: Sequence[str] = ()) -> None:
        raise AssertionError('it is called')

    with pytest.raises(SystemExit, match='2'):
        run_command(measure, arguments)
    assert capsys.readouterr().err.endswith(': it is empty; see --help\n')
