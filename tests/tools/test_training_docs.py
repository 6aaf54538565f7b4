"""The commands of docs/clusters.md and docs/logging.md: the tools understand their options."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support import ROOT, load_tool

from cpvt_pyramid.tooling.command import parser_of

COMMANDS = [
    line.strip()
    for page in ('clusters', 'logging')
    for line in (ROOT / f'docs/{page}.md').read_text().splitlines()
    if re.match(r' {4}.*\btools/', line)
]


def test_commands_are_found():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize('command', COMMANDS)
def test_tools_understand(command, tmp_path):
    """A fake interpreter says what the shell scripts start."""
    said = tmp_path / 'said'
    (tmp_path / 'py').write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}')
    (tmp_path / 'py').chmod(0o755)
    line = re.sub('^srun |python | \\|\\| {$', '', command)
    if '.py' in line.split()[0]:
        words = shlex.split(line)
    else:
        environment = os.environ | {'PYTHON': str(tmp_path / 'py')}
        subprocess.run(['bash', '-c', line], cwd=ROOT, env=environment, check=True)
        words = said.read_text().splitlines()
        tools = ('train.py', 'test.py', 'infer.py')
        words = words[next(i for i, word in enumerate(words) if word.endswith(tools)) :]
    tool = Path(words[0]).stem
    options = parser_of(getattr(load_tool(tool), tool)).parse_args(words[1:])
    config = options.model if tool == 'infer' else options.config
    assert (ROOT / config).is_file()
