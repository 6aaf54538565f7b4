"""Command lines from functions, and how they end."""

import errno
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional, Union
from unittest import mock

import pytest
from support import ROOT, run
from torch._utils import ExceptionWrapper

from cpvt_pyramid.app.tooling import command, files
from cpvt_pyramid.app.tooling.command import (
    OptionError,
    UserError,
    check_at_least,
    parser_of,
    run_command,
    run_tool,
)


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


TWO_INTERRUPTS = """
import signal
from cpvt_pyramid.app.tooling.command import run_tool

def clean_up():
    try:
        yield
    finally:
        signal.raise_signal(signal.SIGINT)

def tool() -> None:
    unfinished = clean_up()
    next(unfinished)
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
run_tool('tool', tool, {}, 'try again')
"""


def test_a_second_interrupt_is_no_traceback():
    """The first one closes generators, in which another exception would be shown and ignored."""
    ended = run(sys.executable, '-c', TWO_INTERRUPTS, PYTHONPATH=ROOT)
    assert ended.returncode == -signal.SIGINT and not ended.stderr


def test_an_interrupt_during_imports_is_no_traceback(tmp_path):
    config = tmp_path / 'x.py'
    config.touch()
    (tmp_path / 'x.pth').touch()
    for module in ('argparse', 'mmengine'):
        folder = tmp_path / module
        folder.mkdir()
        (folder / f'{module}.py').write_text('raise KeyboardInterrupt')
        paths = f'{folder}:{ROOT}'
        named = config, config.with_suffix('.pth')
        ended = run(sys.executable, ROOT / 'tools/test.py', *named, PYTHONPATH=paths)
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
        'debug': False,
    }
    for line, options in (
        ('x a b --to-file y', {'kinds': ['a', 'b']}),
        ('x b --to-file y --size 3 4 --amp --scale -2', {'size': [3, 4], 'amp': True, 'scale': -2}),
        ('x b --to-file y --resume', {'resume': True}),
        ('x b --resume --to-file y', {'resume': True}),
        ('x b --to-file=y --resume=p', {'resume': 'p'}),
        ('--to-file=y --resume x b', {'resume': True}),
        ('- b --to-file -', {'image': '-', 'to_file': '-'}),
        ('x --to-file y b', {}),
        ('x --to-file y a --amp b', {'kinds': ['a', 'b'], 'amp': True}),
        ('x --resume b --to-file y', {'resume': True}),
        ('--amp x --size 3 4 a --to-file=y b', {'kinds': ['a', 'b'], 'amp': True, 'size': [3, 4]}),
        ('--to-file y -- -x b', {'image': '-x'}),
    ):
        assert vars(parser_of(measure).parse_args(line.split())) == given | options
    for line, said in (
        ('x.png a', '--to-file'),
        ('x.png --to-file y', 'kinds'),
        ('--to-file y --amp', 'kinds'),
        ('x --to-file y c --amp', "'c'"),
        ('x a c --to-file y', "'c'"),
        ('x a --to-file y --siez 3 4', '--siez'),
        ('x a --to-file y --scal 3', '--scal'),
        ('x a b --to-file y --resume p', "'p'"),
        ('x a --to-file y --size 3', '--size: expected 2'),
        ('x a --to-file y --size 3.5 4', "'3.5'"),
        ('x a --to-file y --scale much', "'much'"),
    ):
        with pytest.raises(SystemExit, match='2'):
            run_command(measure, line.split())
        error = capsys.readouterr().err
        assert error.startswith('test_command: ') and error.endswith('; see --help\n')
        assert said in error and error.count('\n') == 1, line


@dataclass(frozen=True)
class Sizes:
    """How large something is.

    Args:
        image: an image.
        size: height and width.
    """

    image: str
    size: tuple[int, int] = (3, 4)
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise UserError(f'--size must be at least 1, got {self.size}')


def test_options_of_a_dataclass(capsys):
    """Its fields without a default are positional; its checks are those of the tool."""
    given = []

    def measure(options: Sizes) -> None:
        given.append(options)

    assert run_command(measure, ['--size', '5', '6', 'a.png', '--names', 'x', 'y']) == 0
    assert run_command(measure, ['a.png']) == 0
    assert given == [Sizes('a.png', [5, 6], ['x', 'y']), Sizes('a.png')]
    assert run_command(measure, ['a.png', '--size', '0', '6']) == 2
    assert capsys.readouterr().err == 'test_command: --size must be at least 1, got [0, 6]\n'
    with pytest.raises(SystemExit, match='0'):
        run_command(measure, ['--help'])
    assert 'height and width (default: 3 4)' in ' '.join(capsys.readouterr().out.split())


@dataclass(frozen=True)
class Counted(Sizes):
    """Sizes, and a number of them.

    Args:
        count: how many.
    """

    count: int = 1


def test_options_of_a_dataclass_among_others(capsys):
    """They may be inherited, and come with those of the function."""
    given = []

    def measure(path: str, *, speed: bool = False, options: Counted) -> None:
        given.append((path, speed, options))

    words = ['out.txt', 'a.png', '--count', '2', '--speed', '--names', 'x']
    assert run_command(measure, words) == 0
    assert given == [('out.txt', True, Counted('a.png', (3, 4), ['x'], 2))]
    assert run_command(measure, ['out.txt', 'a.png', '--size', '0', '1']) == 2
    capsys.readouterr()
    with pytest.raises(SystemExit, match='0'):
        run_command(measure, ['--help'])
    said = ' '.join(capsys.readouterr().out.split())
    assert 'PATH IMAGE' in said and 'how many (default: 1)' in said
    assert 'height and width (default: 3 4)' in said


def test_a_value_after_a_flag_is_explained(capsys):
    """It is not the flag's, and there is no positional argument for it."""

    def train(config: str, *, resume: Union[bool, str] = False) -> None:
        raise AssertionError('it is called')

    with pytest.raises(SystemExit, match='2'):
        run_command(train, ['c.py', '--resume', 'p'])
    assert 'arguments: p (--resume takes a value after =)' in capsys.readouterr().err


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


def mention(name: str, *, fails: bool = False) -> None:
    """A tool that mentions a file."""
    if fails:
        raise UserError(f'no file {name}')
    print(f'wrote {name}')


@pytest.mark.parametrize(
    'name, shown', [('a\nb', r'a\nb'), ('\x1b[1m', r'\x1b[1m'), ('\udcff', r'\udcff'), ('ü', 'ü')]
)
def test_names_with_control_characters_are_one_line(name, shown, capsys):
    assert run_command(mention, [name, '--fails']) == 2
    assert capsys.readouterr().err.endswith(f': no file {shown}\n')
    with pytest.raises(SystemExit):
        run_command(mention, [name, name])
    assert capsys.readouterr().err.endswith(f'unrecognized arguments: {shown}; see --help\n')


@pytest.mark.parametrize('encoding', ['utf-8', 'ascii'])
def test_names_that_the_output_cannot_show(encoding):
    program = (
        'from cpvt_pyramid.app.tooling.command import run_command\n'
        'def show(name: str) -> None:\n'
        '    print(name)\n'
        'raise SystemExit(run_command(show))'
    )
    name = os.fsdecode(b'a\xff') if encoding == 'utf-8' else 'aü'
    done = run(sys.executable, '-c', program, name, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout == ascii(name).strip("'") + '\n'


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
        assert run_tool('tool', lambda code=code: exec(code), {}, '') == 2
        assert '(--debug shows the traceback)' in capsys.readouterr().err


def raise_in_a_worker() -> None:
    """As a data loader raises the error of one of its processes."""
    try:
        int('a')
    except ValueError:
        wrapper = ExceptionWrapper(where='in DataLoader worker process 0')
    wrapper.reraise()


def raise_without_a_message() -> None:
    assert not 'x'


def raise_surrogates() -> None:
    raise ValueError(os.fsdecode(b'caf\xe9.jpg'))


@pytest.mark.parametrize(
    'function, line',
    [
        (
            raise_in_a_worker,
            'ValueError: Caught ValueError in DataLoader worker .* inva.*',
        ),
        (raise_without_a_message, "AssertionError: assert not 'x'"),
        (raise_surrogates, r'ValueError: caf\\udce9\.jpg'),
    ],
)
def test_the_traceback_of_an_unexpected_error(function, line, capsys):
    """Is shown with `--debug`, which the one line names without it."""
    sys.stderr.reconfigure(errors='backslashreplace')  # as Python's own
    assert run_tool('tool', function, {}, '') == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf'tool: {line} \(--debug shows the traceback\)\n', said)
    assert run_tool('tool', function, {}, '', debug=True) == 2
    shown = capsys.readouterr().err
    assert shown.startswith('Traceback (most recent call last):') and function.__name__ in shown
    assert shown.splitlines()[-1] == said.rstrip()


def test_every_command_has_the_option_debug(capsys):
    def divide(number: int, *, by: int = 0) -> None:
        number / by

    assert run_command(divide, ['3']) == 2
    assert capsys.readouterr().err.count('\n') == 1
    assert run_command(divide, ['3', '--debug']) == 2
    assert 'number / by' in capsys.readouterr().err
    assert run_command(divide, ['--debug', '3', '--by', '1']) == 0


def interrupt() -> None:
    """mmengine and data loaders may raise another error while they handle it."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise RuntimeError('worker exited unexpectedly') from None


@pytest.mark.parametrize(
    'function, line',
    [
        (interrupt, 'interrupted; try again'),
        (lambda: Path('/dev/full').write_text('x'), 'no space left on the disk; try again'),
        (lambda: __import__('nothing_like_it'), "No module named 'nothing_like_it': "),
        (lambda: check_at_least('most_drop', -1, 0), '--most-drop must be at least 0, got -1'),
    ],
)
def test_expected_errors_have_no_traceback(function, line, capsys):
    run_tool('tool', function, {}, 'try again')
    said = capsys.readouterr().err
    assert said.startswith(f'tool: {line}') and said.count('\n') == 1 and 'traceback' not in said


def test_options_have_their_name_in_python():
    """In a command, they are flags; see above."""
    error = OptionError('{shorter_side} has no effect with {tile}, got {1, 2}')
    assert str(error) == 'shorter_side has no effect with tile, got {1, 2}'
    error = pickle.loads(pickle.dumps(error))
    assert error.with_flags == '--shorter-side has no effect with --tile, got {1, 2}'
    with pytest.raises(UserError, match='^most_drop must be at least 0, got nan$'):
        check_at_least('most_drop', float('nan'), 0)


def test_warnings_of_this_package_are_one_line(monkeypatch, capsys):
    others = mock.Mock()
    monkeypatch.setattr(warnings, 'showwarning', others)

    def warn() -> None:
        warnings.warn('all images are gray', stacklevel=1)
        warnings.warn_explicit('gray', UserWarning, command.__file__, 1)
        line = '`isinstance(treespec, LeafSpec)` is deprecated, use ...'  # by torch, of torch
        warnings.warn(line, FutureWarning, stacklevel=1)

    assert run_tool('tool', warn, {}, '') == 0
    assert capsys.readouterr().err == 'tool: gray\n'
    assert str(others.call_args.args[0]) == 'all images are gray'
    assert warnings.showwarning is others


TOOL = """
import sys
from cpvt_pyramid.app.tooling.command import run_tool
sys.exit(run_tool('tool', lambda: print('done'), {}, ''))
"""


@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.parametrize(
    'arguments',
    [['-c', TOOL], ['-m', 'cpvt_pyramid', 'version'], ['-m', 'cpvt_pyramid', 'help']],
    ids=['tool', 'version', 'help'],
)
def test_nothing_reads_the_output(arguments, unbuffered):
    """As in `cpvt infer ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': unbuffered}
    with os.fdopen(writer, 'wb') as closed:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, stdout=closed, stderr=subprocess.PIPE
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


def test_a_tilde_is_the_home_folder(monkeypatch):
    """Shells leave it as it is after =, or in quotes."""
    monkeypatch.setenv('HOME', '/home/me')
    got = []

    def measure(
        image: str,
        *,
        out: str,
        crops: Sequence[str] = (),
        resume: Union[bool, str] = False,
        options: Sequence[str] = (),
    ) -> None:
        got.extend([image, out, *crops, resume, *options])

    words = [
        '~/a.png',
        '--out=~/b.png',
        '--crops',
        '~/c.png',
        '~no-such-user/d',
        '--resume=~/e.pth',
    ]
    assert run_command(measure, [*words, '--options', 'root=~/f']) == 0
    home = '/home/me'
    paths = [f'{home}/a.png', f'{home}/b.png', f'{home}/c.png', '~no-such-user/d', f'{home}/e.pth']
    assert got == [*paths, 'root=~/f']


def test_a_misspelled_option_has_a_suggestion(capsys):
    def infer(model: str, *, score_thr: float = 0.3) -> None:
        raise AssertionError('it is called')

    for word in ('--score-thresh', '--score_thr'):
        for words in ([word, '0.5'], [f'{word}=0.5']):
            with pytest.raises(SystemExit, match='2'):
                run_command(infer, ['m', *words])
            assert 'did you mean --score-thr?' in capsys.readouterr().err
    with pytest.raises(SystemExit, match='2'):
        run_command(infer, ['m', '--score-thr', '0.5', '--colour'])
    assert 'did you mean' not in capsys.readouterr().err


def test_a_missing_argument_is_explained_by_options_that_are_there(capsys):
    """Options of several values take positional arguments after them."""

    def test(config: str, checkpoint: str, *, cfg_options: Sequence[str] = ()) -> None:
        raise AssertionError('it is called')

    with pytest.raises(SystemExit, match='2'):
        run_command(test, ['c.py'])
    assert capsys.readouterr().err.endswith('required: CHECKPOINT; see --help\n')
    with pytest.raises(SystemExit, match='2'):
        run_command(test, ['c.py', '--cfg-options', 'a=1', 'c.pth'])
    assert 'take all that follows them' in capsys.readouterr().err


def test_a_warning_is_written_with_its_end_of_line(monkeypatch):
    """In one piece: the lines of two threads would mix."""
    pieces = []
    stream = SimpleNamespace(write=pieces.append, flush=lambda: None)
    monkeypatch.setattr(command.sys, 'stderr', stream)
    command.show_warning('cpvt infer', print, 'one', UserWarning, command.__file__)
    assert [piece for piece in pieces if piece] == ['cpvt infer: one\n']
