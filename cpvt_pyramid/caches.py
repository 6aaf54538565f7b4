"""The folder in which this package keeps what can be compiled or downloaded again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`cpvt_pyramid` in the user's folder for caches: `XDG_CACHE_HOME` if it is absolute, as its
    specification says (XDG Base Directory Specification, Basics), else `~/.cache`. It need not
    exist.

    Raises:
        FileNotFoundError: the user has no home folder.
    """
    caches = os.environ.get('XDG_CACHE_HOME', '')
    if os.path.isabs(caches):
        return Path(caches, 'cpvt_pyramid')
    home = os.path.expanduser('~')
    if not os.path.isabs(home):  # a user whom the system does not know, and no HOME
        raise FileNotFoundError('no folder for caches; set XDG_CACHE_HOME')
    return Path(home, '.cache/cpvt_pyramid')
