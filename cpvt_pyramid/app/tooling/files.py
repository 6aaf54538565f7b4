"""Output files and folders."""

import base64
import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, Union

from .command import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

# Errors of file systems without locks, for example Lustre as it is mounted by default.
NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP

# See predictions/formats.py; here, because the options of tools name it before they import anything
# slow.
Format = Literal['coco', 'geojson']
# File systems allow 255 bytes for the name of a file.
LONGEST_NAME = 200  # bytes of that of a temporary file
LONGEST_STEM = 220  # bytes of a name of results, to which endings are added
LOST_AND_FOUND = 'lost+found'  # a folder of file systems, which root alone can read


def check_file(path: Union[str, Path]) -> None:
    """Check that a file can be written to `path`. Nothing is created."""
    if Path(path).is_dir():
        raise UserError(f'{path} must be a file to write, but it is a folder')
    check_folder(Path(path).parent)


def check_new(
    *paths: Union[str, Path], option: str = '--out', overwrite: Optional[bool] = None
) -> None:
    """Check that files can be written to paths that a user has named, and that nothing is there.

    Args:
        paths: of the files; a folder to write may be among them.
        option: that names them.
        overwrite: whether the command was told to replace them; None if it cannot be told.
    """
    for path in paths:
        if os.path.lexists(path) and not overwrite:
            other = f'choose another {option}'
            ways = f'remove it, or {other}' if overwrite is None else f'{other}, or --overwrite'
            raise UserError(f'{path} exists; {ways}')


def keep_former(path: Path) -> Optional[Path]:
    """Rename the file in whose place another one is to be written, to `former_NAME`; returns its
    new path, or None if there is none."""
    if not path.exists():
        return None
    kept = path.with_name(f'former_{path.name}')
    while kept.exists():
        kept = kept.with_name(f'former_{kept.name}')
    path.rename(kept)
    return kept


def check_folder(path: Union[str, Path]) -> None:
    """Check that files can be written to a folder, or that it can be created. Nothing is
    created."""
    path = Path(path)
    for folder in (path, *path.parents):
        if folder.is_dir():
            check_writable(folder)
            return
        if os.path.lexists(folder):
            culprit = 'it' if folder == path else folder
            kind = 'a file'
            if folder.is_symlink() and not folder.exists():
                kind = f'a link to {os.readlink(folder)}, which does not exist'
            raise UserError(f'{path} must be a folder to write to, but {culprit} is {kind}')


def check_writable(folder: Path) -> None:
    """Check that files can be created in a folder. The permissions do not tell it: the file system
    may be read-only, or /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f'cannot write to the folder {folder}: {error.strerror}') from error


def make_folder(path: Union[str, Path]) -> Path:
    """Create a folder, unless it exists, and check that files can be created in it."""
    check_folder(path)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot create the folder {path}: {error.strerror}') from error
    return Path(path)


@contextmanager
def folder_to_fill(path: Union[str, Path]) -> Iterator[Path]:
    """A folder, which is created unless it exists. On a failure, those that were created are
    removed, if they are empty."""
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        make_folder(path)
    try:
        yield path
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


def full_if_current(folder: Union[str, Path]) -> str:
    """A folder as messages show it: the current one by its full path, not as a dot."""
    text = str(folder)
    return os.getcwd() if text == os.curdir else text


def path_from(folder: Union[str, Path], path: Union[str, Path]) -> str:
    """The path relative to a folder; the absolute path if it is on another drive of Windows."""
    try:
        return os.path.relpath(path, folder)
    except ValueError:
        return os.path.abspath(path)


def files_below(folder: Union[str, Path], unread: Optional[list[Path]] = None) -> Iterator[Path]:
    """The files in a folder and its subfolders, without hidden ones and what fsck has found. Links
    to folders are followed, but not in rings.

    `unread` gets the subfolders that cannot be read. None: the error is raised.

    Raises:
        OSError: the folder cannot be read.
    """

    def report(error: OSError) -> None:
        if unread is None or error.filename == os.fspath(folder):
            raise error
        unread.append(Path(error.filename))

    seen = set()
    for root, folders, names in os.walk(folder, onerror=report, followlinks=True):
        seen.add(os.path.realpath(root))
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != '.'
            and name != LOST_AND_FOUND
            and os.path.realpath(Path(root, name)) not in seen
        )
        yield from (Path(root, name) for name in sorted(names) if name[0] != '.')


def digest_of(path: Path) -> str:
    """SHA-256 of the content of a file."""
    digest = hashlib.sha256()
    with path.open('rb') as content:
        while part := content.read(2**20):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def atomic_write(path: Union[str, Path], suffix: str = '') -> Iterator[Path]:
    """A hidden path next to `path` to write to; it is renamed to `path` on success. Its folder is
    created.

    On any failure `path` keeps its previous content. An OSError names it. `suffix` is that of the
    hidden path, by which some libraries choose the format.
    """
    path = Path(path)
    name = path.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    partial = path.with_name(f'.{name}.partial{suffix}')
    with folder_to_fill(path.parent):
        try:
            yield partial
            os.replace(partial, path)
        except OSError as error:
            if error.errno and error.filename in (None, str(partial)):
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        finally:
            partial.unlink(missing_ok=True)


def is_taken(folder: Path) -> bool:
    """Whether there is something that a new folder would replace."""
    return folder.is_symlink() or folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder in `parent`, which is created; the hidden one is removed at the end."""
    check_folder(parent)
    with folder_to_fill(parent), tempfile.TemporaryDirectory(prefix='.', dir=parent) as path:
        yield Path(path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A hidden folder next to `path`, to be filled; it is renamed to `path` on success, and removed
    on any failure. `path` must not exist, or be an empty folder."""
    with scratch_folder(path.parent) as scratch:
        new = scratch / 'new'
        new.mkdir()
        yield new
        new.rename(path)


def write_text(path: Union[str, Path], text: str) -> None:
    """Write a file atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding='utf-8')


def locked(path: Union[str, Path], timeout: float = 0) -> Optional['BaseFileLock']:
    """A lock on the file at `path`, which is created and which nothing else uses, until `release()`
    or the end of the process; None if the file system has no locks.

    Raises:
        BlockingIOError: another process has locked it, also after `timeout` seconds.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout)
    try:
        lock.acquire()
    except Timeout as error:
        raise BlockingIOError(errno.EWOULDBLOCK, 'locked by another process', str(path)) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return lock


def distinct_name(
    wanted: str, taken: set[str], conflicts: Callable[[str], bool] = lambda name: False
) -> str:
    """`wanted`, with a number appended if it is taken or conflicts; added to `taken`.

    Names that differ only in case are the same, as they are in the file systems of macOS and
    Windows.
    """
    numbered = (f'{wanted}-{number}' for number in itertools.count(2))
    names = itertools.chain([wanted], numbered)
    name = next(n for n in names if n.casefold() not in taken and not conflicts(n))
    taken.add(name.casefold())
    return name


def shortened(name: str) -> str:
    """A name of results whose last part leaves room for their endings and a number."""
    folder, slash, last = name.rpartition('/')
    while len(os.fsencode(last)) > LONGEST_STEM:
        last = last[:-1]
    return f'{folder}{slash}{last}'


def data_url(kind: str, content: bytes) -> str:
    """A URL that holds a file of a media type, such as image/jpeg."""
    return f'data:{kind};base64,{base64.b64encode(content).decode()}'
