"""Train, test, export and run models: all tools of the package as one command.

    cpvt help                   list the tools, as does cpvt alone
    cpvt train CONFIG ...       the same as python tools/train.py CONFIG ...
    cpvt help train             what a tool does, and its options, as does cpvt train --help
    cpvt version                the version of the package

`python -m cpvt_pyramid` is the same as `cpvt`. Listing the tools imports none of them.
"""

import ast
import os
import re
import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Optional

from . import __version__

PACKAGE = Path(__file__).parent
MODULES = {  # in the package
    'app': 'app',
    'demo-data': 'cli.demo_data',
    'doctor': 'doctor',
    'run': 'runtime.__main__',
    'verify': 'runtime.verify',
}


def find_tools() -> dict[str, Path]:
    """The file of each tool."""
    packed = PACKAGE / '.mim/tools'  # in a wheel
    folder = packed if packed.is_dir() else PACKAGE.parent / 'tools'
    files = {path.stem: path for path in folder.glob('*.py')}
    files |= {name: PACKAGE / f'{m.replace(".", "/")}.py' for name, m in MODULES.items()}
    return {name.replace('_', '-'): files[name] for name in sorted(files)}


def first_sentence(path: Path) -> str:
    """The beginning of a file's docstring, up to a full stop or a colon."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ''
    return re.split(r'[.:](?:\s|$)', text)[0]


def list_tools(command: str, tools: dict[str, Path]) -> None:
    print(f'usage: {command} TOOL ...\n')
    for tool, path in tools.items():
        print(f'  {tool:<16}  {first_sentence(path)}')
    print(f'\n{command} TOOL --help lists the options of a tool.')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a tool with the arguments that follow its name; by default those of the process."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ['help']
    command = Path(sys.argv[0]).stem
    command = 'python -m cpvt_pyramid' if command == '__main__' else command
    tools = find_tools()
    if name in ('version', '--version', '-V'):
        print(f'cpvt_pyramid {__version__}')
        return 0
    if name in ('help', '--help', '-h'):
        if not arguments:
            try:
                list_tools(command, tools)
                sys.stdout.flush()
            except BrokenPipeError:  # of `cpvt help | head`; nothing reads what is left
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        name, arguments = arguments[0], ['--help']  # `cpvt help train`
    tool = name.replace('_', '-')
    if tool not in tools:
        nearest = get_close_matches(tool, tools)
        advice = f'use {" or ".join(nearest)}' if nearest else f'{command} help lists the tools'
        print(f'{command}: no tool {name!r}; {advice}', file=sys.stderr)
        return 2
    sys.argv[1:] = arguments
    given = {'PROG': f'{command} {tool}'}  # for the usage and errors of the tool
    if tool in MODULES:
        runpy.run_module(f'{__package__}.{MODULES[tool]}', given, '__main__', alter_sys=True)
    else:
        runpy.run_path(str(tools[tool]), given, '__main__')
    return 0


if __name__ == '__main__':
    sys.exit(main())
