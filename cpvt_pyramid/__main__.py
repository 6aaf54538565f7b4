"""Train, test, export and run models: all tools of the package as one command.

    cpvt help                   list the tools, as does cpvt alone
    cpvt train CONFIG ...       run a tool, here cpvt_pyramid/app/commands/train.py
    cpvt help train             what a tool does, and its options, as does cpvt train --help
    cpvt version                the version of the package

`python -m cpvt_pyramid` is the same as `cpvt`. Listing the tools imports none of them.
"""

import ast
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Optional

from . import __version__

INTERRUPTED, BROKEN_PIPE = 130, 141  # exit statuses, as shells report them
# The order of `cpvt help`. The file of each tool has the name of its group, `GROUP = 'data'`.
GROUPS = 'data', 'training', 'evaluation and prediction', 'deployment', 'installation'


def find_tools() -> dict[str, Path]:
    """The file of each tool."""
    files = sorted(Path(__file__).parent.glob('app/commands/[!_]*.py'))
    return {path.stem.replace('_', '-'): path for path in files}


def first_sentence(path: Path) -> str:
    """The beginning of a file's docstring, up to a full stop or a colon."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ''
    return re.split(r'[.:](?:\s|$)', text)[0]


def group_of(path: Path) -> str:
    """What the file of a tool sets GROUP to."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'GROUP':
            return ast.literal_eval(node.value)
    raise ValueError(f'{path} must set GROUP to one of {", ".join(GROUPS)}')


def list_tools(tools: dict[str, Path]) -> None:
    print('usage: cpvt COMMAND ...')
    for group in GROUPS:
        print(f'\n{group}:')
        for name, path in tools.items():
            if group_of(path) == group:
                print(f'  {name:<16}  {first_sentence(path)}')
    print('\ncpvt COMMAND --help lists the options of a command.')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a tool with the arguments that follow its name; by default those of the process."""
    try:
        status = run_named(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `cpvt help | head`; nothing reads what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:  # while something is imported
        return INTERRUPTED


def run_named(argv: Sequence[str]) -> int:
    """Run the tool that the first argument names; see `main`."""
    name, *arguments = argv or ['help']
    tools = find_tools()
    if name in ('version', '--version', '-V'):
        print(f'cpvt_pyramid {__version__}')
        return 0
    if name in ('help', '--help', '-h'):
        if not arguments:
            list_tools(tools)
            return 0
        name, arguments = arguments[0], ['--help']  # `cpvt help train`
    tool = name.replace('_', '-')
    if tool not in tools:
        nearest = get_close_matches(tool, tools)
        advice = f'use {" or ".join(nearest)}' if nearest else 'cpvt help lists the commands'
        print(f'cpvt: no command {name!r}; {advice}', file=sys.stderr)
        return 2
    module = import_module(f'.app.commands.{tools[tool].stem}', __package__)
    return module.main(arguments)


if __name__ == '__main__':
    sys.exit(main())
