"""The commands in the documentation are those of the benchmarks."""

import re
import shlex
from importlib import import_module

import pytest
from support import ROOT

from cpvt_pyramid.app.tooling.command import parser_of

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def documented_commands() -> list[str]:
    commands = []
    for page in PAGES:
        text = page.read_text().replace('\\\n', ' ')
        commands += re.findall(r'python -m (benchmarks\.[^`\n#]*)', text)
    return sorted({command.strip().rstrip(',.') for command in commands})


def test_commands_are_found():
    assert len(documented_commands()) >= 5


@pytest.mark.parametrize('command', documented_commands())
def test_benchmarks_understand(command):
    module, *options = shlex.split(command)
    function = getattr(import_module(module), module.removeprefix('benchmarks.'))
    if options:  # alone, a name in a sentence
        parser_of(function).parse_args(options)
