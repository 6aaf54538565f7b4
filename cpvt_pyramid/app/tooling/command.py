"""A command-line tool from a plain function: its options, its errors, its exit status.

A tool declares each option once, in the signature and the `Args:` of the docstring of a function.
`run_command(measure, argv)` calls

    def measure(image: str, *, size: tuple[int, int] = (512, 512), amp: bool = False) -> None:

with the options of `measure IMAGE [--size SIZE SIZE] [--amp]`. The text above the options in
`--help` is the docstring of the module. A parameter becomes:

    positional                            a positional argument
    keyword-only                          an option; without a default it is required
    bool = False                          a flag
    bool | str = False                    a flag with an optional value, --flag=VALUE; True without
    Sequence[T]                           one or more values
    tuple[T, T]                           as many values
    Size                                  SIDE or HEIGHTxWIDTH, see `sizes`
    Literal['a', 'b']                     a choice
    Optional[T] = None                    as T

A parameter whose type is a dataclass stands for its fields: options that several commands have are
declared once, and checked where the dataclass is built. Fields without a default are positional
arguments, others options; what a field is stands in the `Args:` of the class that declares it, so
that a class can inherit the options of another.

Every command also has `--debug`, which shows the traceback of an error.

Importing this file imports neither torch nor mm, so that `--help` is quick; a tool imports them
inside its function.
"""

import errno
import inspect
import os
import re
import signal
import sys
import traceback
import types
import warnings
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Optional,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from . import memory
from .sizes import SYNTAX, Size, parse_size

ROOT = Path(__file__).resolve().parents[3]  # the checkout, or site-packages
PACKAGE = __name__.partition('.')[0]
# The process index, from the variable that each launcher sets.
RANKS = {'pytorch': 'RANK', 'slurm': 'SLURM_PROCID', 'mpi': 'OMPI_COMM_WORLD_RANK'}
# How OpenMP's threads wait. SPIN_COUNT is in steps of libgomp's loop, 10000 take about 0.3 ms.
WAIT_VARIABLES = frozenset({'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME'})
SPIN_COUNT = '10000'
# Exit statuses, as shells report them.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
FAILED = 2
BROKEN_PIPE = 128 + 13  # SIGPIPE, which Windows does not have
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command can continue
MOST_CHOICES = 6  # that --help lists; the text of a tool lists more
# A path that the user gave is of the wrong kind, or in the wrong place.
PATH_ERRORS = errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG
LONGEST = 300  # letters of a message; of a longer one, its beginning and its end are shown
# Warnings of mm and torch about settings that are intended, of torch about its own code, of Pillow
# and rasterio about images.
# Nothing that runs in threads ignores warnings itself: `catch_warnings` is for all threads, and
# would restore another run's `showwarning`.
IGNORED_WARNINGS = (
    'faster_coco_eval is not|The draw is False|`reduce_zero_label`|.*avg_non_ignore|'
    '`broadcast_buffers`|`isinstance\\(treespec|Image size .* exceeds limit|'
    'Dataset has no geotransform'
)


OPTION_NAME = re.compile(r'\{(\w+)\}')  # in the message of an `OptionError`


class UserError(Exception):
    """An error that the user can fix. Its message is one line: what is wrong and what to do.

    Commands print it and end with exit status 2. `details` are lines for the user to copy, which
    commands print to stdout after it.

    Examples:
        >>> try:
        ...     Predictor('nowhere.onnx')
        ... except UserError as error:
        ...     print(error)
        no model at nowhere.onnx
    """

    status = FAILED  # of the process
    details = ''


class OptionError(UserError):
    """A mistake in options. They have one name in Python and another on a command line: the message
    has `{name}` for an option, which is `name` in Python; commands print `--name`."""

    def __init__(self, message: str) -> None:
        super().__init__(OPTION_NAME.sub(r'\1', message))
        self.with_flags = OPTION_NAME.sub(lambda found: flag_of(found[1]), message)


class Preempted(UserError):
    """Ends a training that was told to stop and has written a checkpoint."""

    status = STOPPED


def run_command(
    function: Callable[..., Optional[int]],
    argv: Optional[Sequence[str]] = None,
    interrupted: str = 'nothing was written',
) -> int:
    """Call a function with options from the command line.

    Any exception ends it with one line on stderr; with `--debug`, its traceback comes before. A
    `UserError`, an interrupt, a full disk, a path of the wrong kind or without permission, and a
    missing package rarely need it; the line of any other exception says that there is `--debug`.
    Warnings of this package are one line, too.

    Args:
        function: declares the options, see above; it may return an exit status.
        argv: the arguments, by default those of the process.
        interrupted: shown after an interrupt or on a full disk, with values of options: `{name}`.
    """
    prepare_for_torch()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == 'strict':
        # Names that its encoding lacks are printed as on stderr, with escapes.
        sys.stdout.reconfigure(errors='backslashreplace')
    name = program_name(function)
    try:
        options = vars(parser_of(function).parse_args(argv))
    except KeyboardInterrupt:
        print(f'{name}: interrupted; nothing was written', file=sys.stderr)
        return INTERRUPTED
    debug = options.pop('debug')
    tool = lambda **values: call_with(function, values)  # noqa: E731
    return run_tool(name, tool, options, interrupted.format(**options), debug)


def program_name(function: Callable) -> str:
    """The name with which the lines of a tool begin, such as `cpvt train`."""
    package, _, module = function.__module__.rpartition('.')
    if package in (PACKAGE, f'{PACKAGE}.app', f'{PACKAGE}.app.commands'):
        return f'cpvt {module.replace("_", "-")}'
    if module == '__main__':
        file = Path(sys.argv[0])
        return file.parent.name if file.stem == '__main__' else file.stem
    return module


def prepare_for_torch() -> None:
    """Set what torch, OpenMP and onnxruntime read when they start, unless the environment sets it.

    The threads of libgomp spin for about 10 ms after each of a pass's hundreds of parallel regions,
    and on a busy machine keep others from the core that they wait for. If they sleep at once, they
    must be woken for each region, up to a fifth of a pass. In between is GOMP_SPINCOUNT=10000,
    about 0.3 ms. Large pages are faster to touch first. onnxruntime would report its use.
    """
    if not WAIT_VARIABLES & os.environ.keys():
        os.environ['GOMP_SPINCOUNT'] = SPIN_COUNT
    os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')
    os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')


def run_tool(
    name: str,
    function: Callable[..., Optional[int]],
    options: dict,
    interrupted: str,
    debug: bool = False,
) -> int:
    """Call a tool's function; the line of an error, see `run_command`, begins with `name`."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, exit_on_signal)
    if handlers[signal.SIGINT] is signal.default_int_handler:  # else ignored, as in the background
        signal.signal(signal.SIGINT, interrupt_once)
    try:
        with warnings.catch_warnings():  # restores the filters and `showwarning`
            warnings.filterwarnings('ignore', IGNORED_WARNINGS)
            warnings.showwarning = partial(show_warning, name, warnings.showwarning)
            status = function(**options) or 0
            print(end='', flush=True)
            return status
    except BrokenPipeError:  # of `cpvt infer ... | head`; nothing reads what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except BaseException as error:
        ending = expected_ending(error, interrupted)
        if ending is None:
            if not isinstance(error, Exception):
                raise
            ending = Ending(f'{described(error)} (--debug shows the traceback)')
        if debug:
            traceback.print_exception(type(error), error, error.__traceback__)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    if rank() == 0 or ending.status == FAILED:  # another process may be the only one with an error
        where = f'rank {rank()}: ' if rank() else ''
        print(f'{name}: {where}{escaped(ending.line)}', file=sys.stderr)
        print(end=ending.details, flush=True)
    return ending.status


def show_warning(
    tool: str,
    others: Callable[..., None],
    message: Union[Warning, str],
    category: type[Warning],
    filename: str,
    *rest: Any,
    **named: Any,
) -> None:
    """`warnings.showwarning` of a tool: a warning of this package is one line; `others` shows those
    of other packages."""
    if filename.startswith(str(Path(__file__).parents[2])):
        # One call with its end of line: the lines of two threads would mix.
        print(f'{tool}: {escaped(str(message))}\n', end='', file=sys.stderr)
    else:
        others(message, category, filename, *rest, **named)


# Errors


class Ending(NamedTuple):
    """How a tool that fails ends."""

    line: str
    status: int = FAILED
    details: str = ''


def expected_ending(error: BaseException, interrupted: str = '') -> Optional[Ending]:
    """The line and the exit status for an error that needs no traceback; None for others."""
    if isinstance(error, OptionError):
        return Ending(error.with_flags)
    if isinstance(error, UserError):
        return Ending(str(error), error.status, error.details)
    # mmengine has a bare `except` that replaces a KeyboardInterrupt by another error.
    causes = list(contexts(error))
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return Ending(f'interrupted; {interrupted}', INTERRUPTED)
    if any(isinstance(cause, SystemExit) and cause.code == TERMINATED for cause in causes):
        return Ending(f'terminated; {interrupted}', TERMINATED)
    for cause in causes:
        if isinstance(cause, OSError) and is_disk_full(cause):
            where = f' for {cause.filename}' if cause.filename else ''
            return Ending(f'no space left on the disk{where}; {interrupted}')
    if isinstance(error, PermissionError) and error.filename:
        return Ending(f'permission denied for {error.filename}')
    if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename:
        return Ending(f'{error.filename}: {error.strerror}')
    if line := missing_package(error):
        return Ending(line)
    if memory.is_exhausted(error):
        free = memory.free_text()
        return Ending(f'too little memory ({free}): {one_line(error, 150)}')
    return None


def described(error: BaseException) -> str:
    """The class and the message of an error; without a message, the line of code that raised it."""
    text = ' '.join(str(error).split())
    if not text:
        text = traceback.extract_tb(error.__traceback__)[-1].line or ''
    if len(text) > LONGEST:  # an error in a data worker has its traceback before its message
        text = f'{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}'
    return f'{type(error).__name__}: {text}'


def is_disk_full(error: OSError) -> bool:
    """Whether the disk, a quota or `ulimit -f` leaves no space for a file."""
    full = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
    return error.errno in full


def check_at_least(name: str, value: Optional[float], least: float) -> None:
    """Raise an OptionError if the option of a name is below its bound; None is an option that was
    not given."""
    if value is not None and not value >= least:  # refuses nan too
        raise OptionError(f'{{{name}}} must be at least {least}, got {value}')


@contextmanager
def imports_of(tool: str, extra: str = '') -> Iterator[None]:
    """For imports at the top of a tool: exit with one line if a package is not installed.

    Args:
        tool: begins the line.
        extra: the extra of pyproject.toml with what is imported, if there is one.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ImportError as error:
        if line := missing_package(error):
            if extra:
                line = f"{one_line(error)}; pip install '.[{extra}]'"
            print(f'{tool}: {line}', file=sys.stderr)
            sys.exit(2)
        raise


def missing_package(error: BaseException) -> str:
    """What to do if an import failed because a package is not installed, or in a version without
    what is imported; '' for other errors."""
    if not isinstance(error, ImportError):
        return ''
    first = [cause for cause in contexts(error) if isinstance(cause, ImportError)][-1]
    package = (first.name or '').partition('.')[0]
    if package in ('', PACKAGE) or package in sys.builtin_module_names:
        return ''
    advice = 'cpvt doctor tells what to install'
    if Path(sys.prefix) != ROOT / '.venv' and (ROOT / 'tools/setup_env.sh').exists():
        advice = f'run this tool with {ROOT / ".venv/bin/python"}, which `make setup` creates'
    problem = f'{package} is not installed for {sys.executable}, or does not fit'
    return f'{one_line(first)}: {problem}; {advice}'


def optional_package(name: str, user: str, requirement: str = '') -> types.ModuleType:
    """Import a package; a UserError that names its user if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        fix = f'pip install {requirement or name}'
        raise UserError(f'{user} needs {name}; {fix} ({one_line(error)})') from error


def contexts(error: Optional[BaseException]) -> Iterator[BaseException]:
    """An exception, the one that was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__context__


def exit_on_signal(signum: int, frame: Optional[types.FrameType]) -> None:
    """Unwind the stack on SIGTERM, so that context managers remove partial files."""
    raise SystemExit(TERMINATED)


def interrupt_once(signum: int, frame: Optional[types.FrameType]) -> None:
    """Unwind the stack on the first interrupt. A second one ends the process at once: it would
    interrupt what the first one has left to do, with tracebacks from threads."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def rank() -> int:
    """The index of this process among those of its run."""
    return int(next((os.environ[name] for name in RANKS.values() if name in os.environ), 0))


def escaped(text: str) -> str:
    """A text with escapes for line breaks and other control characters, which names of files may
    have, so that it is one line."""
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in text)


def one_line(error: BaseException, length: int = 300) -> str:
    """The message of an error without line breaks, cut to `length`."""
    text = ' '.join(str(error).split())
    return text if len(text) <= length else text[:length] + ' ...'


# Options


class OneLineParser(ArgumentParser):
    """Options may stand before, between and after the positional arguments. Reports a mistake in
    one line, without the usage. Flags with an optional value take it as --flag=VALUE alone, so that
    they never take the next argument."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.flags: set[str] = set()  # with an optional value
        self.words: list[str] = []  # of the command line

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        self.words = words
        if '--' in words:  # which `parse_intermixed_args` drops, so that `-x` after it is an option
            return super().parse_args(words, namespace)
        return self.parse_intermixed_args(words, namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(
            [f'{word}=' if word in self.flags else word for word in words], namespace
        )

    def error(self, message: str) -> NoReturn:
        several = [action for action in self._actions if action.nargs == '+']
        greedy = {option for action in several for option in action.option_strings}
        if message.startswith('the following arguments are required') and greedy & {*self.words}:
            message += ' (options of several values take all that follows them)'
        if message.startswith('unrecognized arguments') and self.flags:
            message += f' ({", ".join(sorted(self.flags))} takes a value after =)'
        if message.startswith('unrecognized arguments'):
            message += self.similar_options()
        self.exit(2, f'{self.prog}: {escaped(message)}; see --help\n')

    def similar_options(self) -> str:
        """What misspelled options of the command line may mean, for the end of a message."""
        known = [option for action in self._actions for option in action.option_strings]
        given = [word.partition('=')[0] for word in self.words if word.startswith('--')]
        unknown = [option for option in given if option not in {*known, '--'}]
        similar = [get_close_matches(option, known, n=1, cutoff=0.7) for option in unknown]
        found = ', '.join(option for options in similar for option in options)
        return f'; did you mean {found}?' if found else ''


class Argument(NamedTuple):
    """An argument of a command line."""

    name: str
    kind: Any
    default: Any  # `Parameter.empty` if it is required
    is_positional: bool
    text: str  # for --help


def declared_arguments(declaration: Callable) -> Iterator[Argument]:
    """The arguments that a function or a dataclass declares, see the docstring of this file."""
    texts = documented_arguments(declaration)
    kinds = get_type_hints(declaration)
    for name, parameter in inspect.signature(declaration).parameters.items():
        if is_dataclass(kinds[name]):
            yield from declared_arguments(kinds[name])
            continue
        is_positional = parameter.kind is not parameter.KEYWORD_ONLY
        if is_dataclass(declaration):
            is_positional = parameter.default is parameter.empty
        text = texts.get(name, '')  # none with `python -OO`
        yield Argument(name, kinds[name], parameter.default, is_positional, text)


def call_with(declaration: Callable, values: dict[str, Any]) -> Any:
    """Call a function, or build a dataclass, with values of its `declared_arguments`."""
    kinds = get_type_hints(declaration)
    given = {}
    for name in inspect.signature(declaration).parameters:
        stands_for_fields = is_dataclass(kinds[name])
        given[name] = call_with(kinds[name], values) if stands_for_fields else values[name]
    return declaration(**given)


def parser_of(function: Callable) -> OneLineParser:
    """The parser of the options that a function declares."""
    parser = OneLineParser(
        prog=program_name(function),
        description=sys.modules[function.__module__].__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    for argument in declared_arguments(function):
        add_argument(parser, argument)
    parser.add_argument('--debug', action='store_true', help='show the traceback of an error')
    return parser


def add_argument(parser: OneLineParser, argument: Argument) -> None:
    settings = argparse_settings(argument.kind)
    text = argument.text.replace('%', '%%')
    is_required = argument.default is inspect.Parameter.empty
    if argument.is_positional:
        if 'choices' not in settings:
            settings['metavar'] = argument.name.upper()
        if not is_required:
            settings['nargs'] = '?'
        parser.add_argument(argument.name, help=text, **settings)
        return
    if not is_required:
        settings['default'] = argument.default
        text += shown_default(argument.default)
    flag = flag_of(argument.name)
    if settings.get('nargs') == '?':
        parser.flags.add(flag)
        settings['metavar'] = f'={argument.name.upper()}'
    parser.add_argument(flag, required=is_required, help=text, **settings)


def flag_of(name: str) -> str:
    """How an option is given on the command line."""
    return f'--{name.replace("_", "-")}'


def shown_default(value: Any) -> str:
    """A default in --help; '' if there is none to show."""
    if value is None or value is False:
        return ''
    if isinstance(value, (list, tuple)) and not isinstance(value, Size):
        value = ' '.join(map(str, value))
    return f' (default: {value})'.replace('%', '%%') if value != '' else ''


def argparse_settings(kind: Any) -> dict[str, Any]:
    """The settings of argparse for a type; see the docstring of this file."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, getattr(types, 'UnionType', Union)):  # Python 3.10 has the second
        (member,) = (k for k in inner if k not in (bool, type(None)))
        settings = argparse_settings(member)
        if bool in inner:
            settings |= {'nargs': '?', 'type': lambda text: os.path.expanduser(text) or True}
        return settings
    if kind is bool:
        return {'action': 'store_true'}
    if origin is Literal:
        settings = {'choices': inner, 'type': type(inner[0])}
        if len(inner) > MOST_CHOICES:
            settings['metavar'] = 'NAME'
        return settings
    if origin is abc.Sequence:
        return argparse_settings(inner[0]) | {'nargs': '+'}
    if kind is Size:
        return {'type': parse_size, 'metavar': SYNTAX}
    if origin is tuple:
        return argparse_settings(inner[0]) | {'nargs': len(inner)}
    return {'type': given_text if kind is str else kind}


def given_text(text: str) -> str:
    """Text of the command line, with ~ as the home folder: shells leave it as it is in --out=~/a.

    A variable of a shell that is not set leaves the text empty, which would be the current folder,
    or all addresses.
    """
    if not text:
        raise ArgumentTypeError('it is empty')
    return os.path.expanduser(text)


def documented_arguments(declaration: Callable) -> dict[str, str]:
    """Each argument's description in the docstring of a function, or in those of a class and of the
    classes that it inherits from, in one line."""
    texts: dict[str, str] = {}
    for each in reversed(getattr(declaration, '__mro__', [declaration])):
        section = re.search(r'^Args:\n((?: +.*\n|\n)*)', f'{inspect.getdoc(each)}\n', re.M)
        if section:
            entries = re.findall(r'^ {4}(\w+): (.*\n(?: {5,}.*\n)*)', section[1], re.M)
            texts |= {name: ' '.join(text.split()).removesuffix('.') for name, text in entries}
    return texts
