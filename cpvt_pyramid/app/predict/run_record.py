"""What a run of `cpvt infer` did, in run.json of its folder: only the same run goes on there."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

from ..tooling.command import UserError, flag_of
from ..tooling.files import digest_of, folder_to_fill, locked, write_text
from .automatic_tiles import Tiling
from .opening import ModelFiles
from .options import RunOptions
from .result_files import has_results, remove_results

RUN = 'run.json'
LOCK = '.run.lock'
INPUTS = 'inputs'  # a key of run.json; runs of other inputs may share a folder
TILED_ABOVE = 'tiled_above'  # pixels of an image; None: no image is divided into tiles


def record_of(
    options: RunOptions, files: ModelFiles, inputs: Sequence[str], tiling: Optional[Tiling]
) -> dict[str, Any]:
    """What run.json says of a run: the files of its model, and all options that change results.
    Others change how fast they are there, or which further files are written."""
    record: dict[str, Any] = {}
    for name, value in files._asdict().items():
        if value is not None:
            record[name] = str(value)
            record |= hashes_of(name, Path(value))
    for each in fields(options):
        if each.metadata['changes_results']:
            value = getattr(options, each.name)
            record[each.name] = list(value) if isinstance(value, tuple) else value
    # What is done with images, rather than what was asked for
    record['tile'] = tiling.side if tiling else 0
    record['overlap'] = tiling.overlap if tiling else 0
    record[TILED_ABOVE] = tiling.above if tiling else None
    record[INPUTS] = [*inputs]
    return record


def hashes_of(name: str, path: Path) -> dict[str, str]:
    """The SHA-256 of a file of the model, and of the weights next to OpenVINO's .xml."""
    found = {}
    for suffix, file in (('', path), ('_weights', path.with_suffix('.bin'))):
        is_part = not suffix or path.suffix == '.xml'
        if is_part and file.is_file():
            found[f'{name}{suffix}_sha256'] = digest_of(file)
    return found


@contextmanager
def claimed(out_dir: str, record: dict[str, Any], overwrite: bool) -> Iterator[None]:
    """A context in which no other run writes into a folder, which has results of this run alone.

    Args:
        out_dir: the folder, which is created.
        record: see `record_of`.
        overwrite: remove the results of another run.

    Raises:
        UserError: another run is at work there, or has left results.
    """
    with folder_to_fill(out_dir) as folder, locked_folder(folder):
        earlier = read_record(folder)
        changed = []
        if earlier is not None and has_results(folder):
            changed = differences_of(earlier, record)
        if changed and not overwrite:
            raise UserError(
                f'{folder} has results of another run ({", ".join(changed)}); give another '
                '--out-dir, or --overwrite, which removes them'
            )
        if changed:
            remove_results(folder)
        write_text(folder / RUN, json.dumps(record, indent=1))
        try:
            yield
        finally:
            if not has_results(folder):  # nothing was written
                remove_results(folder)
                (folder / RUN).unlink()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    try:
        lock = locked(folder / LOCK)
    except BlockingIOError:
        raise UserError(
            f'another cpvt infer writes into {folder} now; give another --out-dir'
        ) from None
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):  # Windows
                (folder / LOCK).unlink()
            lock.release()


def read_record(folder: Path) -> Optional[dict[str, Any]]:
    """What run.json in a folder says: nothing if it is damaged. None if there is none."""
    file = folder / RUN
    if not file.is_file():
        return None
    try:
        return dict(json.loads(file.read_text(encoding='utf-8')))
    except (OSError, ValueError, TypeError):
        return {}


def differences_of(earlier: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """In words, what differs between two runs."""
    if not earlier:
        return [f'{RUN}, which says of which, is damaged']
    names = [name for name in {**earlier, **record} if name != INPUTS]
    changed = [name for name in names if earlier.get(name) != record.get(name)]
    return [words_for(name, earlier.get(name), record.get(name)) for name in changed]


def words_for(name: str, before: Any, now: Any) -> str:
    if name.endswith('_sha256'):
        return f'another file of the {name.partition("_")[0]} model'
    if name == TILED_ABOVE:
        return f'tiles of images above {before} pixels, now {now}'
    option = name if name in ModelFiles._fields else flag_of(name)
    return f'{option} {before}, now {now}'
