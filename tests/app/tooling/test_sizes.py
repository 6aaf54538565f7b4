"""`--size` has one form in all commands: SIDE or HEIGHTxWIDTH."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Optional

import pytest

from cpvt_pyramid.app import commands
from cpvt_pyramid.app.tooling.command import declared_arguments, parser_of, run_command
from cpvt_pyramid.app.tooling.sizes import Size, parse_size

SIZE = Size(640, 480)
SIZES = (Size(32, 64), Size(8, 8))


def resize(*, size: Optional[Size] = None) -> None:
    """Resize.

    Args:
        size: of the image.
    """
    print(size)


def test_a_size():
    assert parse_size('800x1344') == (800, 1344) and parse_size('640') == (640, 640)
    for text in (
        '',
        '0',
        '0x3',
        '3x',
        'x3',
        '3X4',
        '3x4x5',
        '-3',
        '3.5',
        '3,4',
        '9' * 20,
        '\u0663',
    ):
        with pytest.raises(ArgumentTypeError, match='^must be SIDE or HEIGHTxWIDTH in pixels'):
            parse_size(text)


def test_a_default_is_shown_as_it_is_given(capsys):
    def crop(*, sizes: Sequence[Size] = SIZES, size: Size = SIZE) -> None:
        """Crop.

        Args:
            sizes: of some images
            size: of another
        """

    with pytest.raises(SystemExit):
        run_command(crop, ['--help'])
    shown = ' '.join(capsys.readouterr().out.split())
    assert '(default: 32x64 8x8)' in shown and '(default: 640x480)' in shown


def test_an_option(capsys):
    assert run_command(resize, ['--size', '30x40']) == 0
    assert capsys.readouterr().out == '30x40\n'
    with pytest.raises(SystemExit):
        run_command(resize, ['--size', '30', '40'])
    with pytest.raises(SystemExit):
        run_command(resize, ['--size', '3*4'])
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'argument --size: must be SIDE or HEIGHTxWIDTH' in line and 'got 3*4' in line
    assert '--size SIDE|HEIGHTxWIDTH' in parser_of(resize).format_help()


def test_every_command_has_this_size():
    found = []
    for path in Path(commands.__file__).parent.glob('[a-z]*.py'):
        if path.stem == 'doctor':
            continue
        module = import_module(f'{commands.__name__}.{path.stem}')
        for argument in declared_arguments(getattr(module, path.stem)):
            if argument.name == 'size':
                found.append(path.stem)
                assert argument.kind == Optional[Size]
    assert sorted(found) == ['export', 'verify']
