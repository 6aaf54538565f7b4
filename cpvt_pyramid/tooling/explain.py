"""An exception of a run in one line, with its traceback in a file.

Most are mistakes in a config: mmengine's registries name the class that they do not know, and
Python names the class whose arguments do not fit.
"""

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional, Union

from .command import (
    Stopped,
    UserError,
    contexts,
    is_disk_full,
    missing_package,
    rank,
)

LONGEST = 300  # letters of a message; of a longer one, its beginning and its end are shown


@contextmanager
def explained(folder: Union[str, Path, None] = None) -> Iterator[None]:
    """Inside this context an exception is a `UserError` of one line; its traceback is written into
    a file in `folder`, or else in the system's folder for temporary files."""
    try:
        yield
    except (Stopped, UserError):
        raise
    except Exception as error:
        is_interrupt = any(not isinstance(cause, Exception) for cause in contexts(error))
        is_full = any(is_disk_full(cause) for cause in contexts(error))
        if is_interrupt or is_full or missing_package(error):
            raise
        path = write_traceback(error, folder)
        raise UserError(f'{message_of(error)} (traceback: {path})') from error


def write_traceback(error: Exception, folder: Union[str, Path, None]) -> Path:
    """Write the whole traceback of an error to a file; returns its path."""
    if folder is not None and Path(folder).is_dir():
        path = Path(folder, f'traceback.{rank()}.txt' if rank() else 'traceback.txt')
    else:
        path = Path(tempfile.mkstemp('.txt', 'traceback-')[1])
    path.write_text(''.join(traceback.format_exception(type(error), error, error.__traceback__)))
    return path


def message_of(error: Exception) -> str:
    """The class and the message of an error; without a message, the line that raised it."""
    text = ' '.join(str(error).split())
    if not text:
        text = last_line(error) or ''
    if len(text) > LONGEST:  # an error in a data worker has its traceback before its message
        text = f'{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}'
    return f'{type(error).__name__}: {text}'


def last_line(error: Exception) -> Optional[str]:
    """The line of code that raised an error."""
    return traceback.extract_tb(error.__traceback__)[-1].line
