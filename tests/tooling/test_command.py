"""Command lines from functions, and how they end."""

import signal
import sys
from collections.abc import Sequence
from typing import Literal, Optional, Union
from unittest import mock

import pytest
from support import ROOT, load_tool, run

from cpvt_pyramid.tooling import command, files
from cpvt_pyramid.tooling.command import UserError, parser_of, run_command, run_tool


@pytest.mark.parametrize('signum, said, status', [(2, 'interrupted', 130), (15, 'terminated', 143)])
def test_signals_unwind_and_give_the_status(signum, said, status, tmp_path, capsys, request):
    # Background processes of a shell ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

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


TOOLS = {
    'train': 'argparse',
    'test': 'argparse',
    'infer': 'argparse',
}


@pytest.mark.parametrize('tool, module', TOOLS.items())
def test_an_interrupt_during_imports_is_no_traceback(tool, module, tmp_path):
    (tmp_path / f'{module}.py').write_text('raise KeyboardInterrupt')
    ended = run(sys.executable, ROOT / f'tools/{tool}.py', '1', 'x', PYTHONPATH=str(tmp_path))
    assert ended.returncode == 130
    assert ended.stderr in ('', f'{tool}: interrupted; the processes have ended\n')


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
    size: tuple[int, int] = (512, 640),
    resume: Union[bool, str] = False,
    amp: bool = False,
    scale: Optional[float] = None,
    launcher: Literal['none', 'mpi'] = 'none',
    *,
    to_file: str,
) -> None:
    """Measure an image.

    Args:
        image: an image, 100%
            of it.
        kinds: what to measure.
        size (H W): height and width.
        resume (PATH): resume: from PATH, if given.
        amp: mixed precision.
        scale: factor.
        launcher: starts the processes.
        to_file (FILE): where to write to.

    Returns:
        Nothing: really.
    """


def test_options_come_from_the_signature(capsys):
    given = dict(image='x', kinds=['b'], to_file='y', resume=False, amp=False, scale=None,
                 size=(512, 640), launcher='none')  # fmt: skip
    for line, options in (
        ('x a b --to-file y', dict(kinds=['a', 'b'])),
        ('x b --to-file y --size 3 4 --amp --scale 2', dict(size=[3, 4], amp=True, scale=2.0)),
        ('x b --to-file y --resume --launcher mpi', dict(resume=True, launcher='mpi')),
        ('x b --to-file y --resume p --local_rank=1', dict(resume='p', local_rank='1')),
    ):
        assert vars(parser_of(measure).parse_args(line.split())) == given | options
    with pytest.raises(SystemExit) as ended:
        run_command(measure, ['x.png', 'a'])
    assert ended.value.code == 2 and 'required: --to-file' in capsys.readouterr().err


def test_help_comes_from_the_docstrings(capsys):
    with pytest.raises(SystemExit):
        run_command(measure, ['--help'])
    said = ' '.join(capsys.readouterr().out.split())
    assert said.startswith('usage: test_command [-h] [--size H W] [--resume [PATH]] [--amp]')
    assert '--to-file FILE' in said and 'Command lines from functions, and how they end.' in said
    for text in (
        'IMAGE an image, 100% of it',
        'height and width (default: 512 640)',
        '--resume [PATH] resume: from PATH, if given --amp mixed precision --scale SCALE factor',
        'starts the processes (default: none)',
    ):
        assert text in said
    assert 'local' not in said and 'really' not in said


def test_failing_imports(capsys):
    for code, line in (
        ('import no_such.part', "No module named 'no_such': no_such is not installed for "),
        ('try: import no_such\nexcept ImportError: raise ImportError from None',
         "No module named 'no_such': no_such is not installed for "),
        ('import torch.no_such', "No module named 'torch.no_such': torch is not installed for "),
        ('from torch import no_such', "cannot import name 'no_such' from 'torch'"),
    ):  # fmt: skip
        assert run_tool('tool', lambda code=code: exec(code), {}, '') == 2
        error = capsys.readouterr().err
        assert error.startswith(f'tool: {line}') and error.count('\n') == 1
    for code in ('import cpvt_pyramid.no_such', 'raise ImportError("no name")'):
        with pytest.raises(ImportError):
            run_tool('tool', lambda code=code: exec(code), {}, '')


def test_tools_are_named_as_the_user_calls_them(tmp_path, monkeypatch, capsys):
    text = 'use python tools/check_data.py, or a file of tools/export.py'
    assert command.as_called(text) == text
    monkeypatch.setattr(command, 'ROOT', tmp_path)  # installed, without a checkout
    assert command.as_called(text) == 'use cpvt check-data, or a file of cpvt export'
    with pytest.raises(SystemExit):
        load_tool('infer').main(['--help'])
    said = capsys.readouterr().out
    assert 'cpvt infer CONFIG CHECKPOINT INPUT...' in said and 'tools/' not in said
    with pytest.raises(SystemExit), command.imports_of('tool'):
        import no_such  # noqa: F401
    assert 'python -m cpvt_pyramid.doctor tells what to install' in capsys.readouterr().err
