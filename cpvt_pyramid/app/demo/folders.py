"""A data set's folder, which appears complete or not at all."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Union

from ..tooling.command import UserError
from ..tooling.files import is_taken, new_folder

MARKER = 'sample.json'  # the arguments, in the folder of a complete data set


def create_once(
    root: Union[Path, str], arguments: dict, write: Callable[[Path, dict], None]
) -> bool:
    """Create a data set, unless the folder has it.

    Args:
        root: folder to create.
        arguments: of the data set; other arguments are another data set.
        write: is called with an empty folder and the arguments.

    Returns:
        False if the folder has this data set already.

    Raises:
        UserError: the folder has something else.
    """
    folder = Path(os.path.realpath(root))
    marker = folder / MARKER
    text = json.dumps(arguments) + '\n'
    if marker.is_file() and marker.read_bytes() == text.encode():
        return False
    if is_taken(folder):
        raise UserError(
            f'{folder} has other files, or a data set with other arguments or of another version; '
            'remove it, or name another folder'
        )
    with new_folder(folder) as new:
        write(new, arguments)
        (new / MARKER).write_text(text)
    return True
