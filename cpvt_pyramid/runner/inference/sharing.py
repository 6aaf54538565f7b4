"""Work that several processes share through a folder, on one machine or on several.

Nothing connects the processes. Each goes through the same list of tasks, claims one by locking a
file, and writes down its outcome when it is finished. The lock ends with the process, however that
ends, and another process takes the task over. A run of which all processes were killed is resumed
by starting it again, with any number of processes: finished tasks are not repeated.
"""

import glob
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from ...tooling.command import RANKS, UserError, one_line, rank
from ...tooling.files import locked, write_text
from ...tooling.inputs import is_video
from .batched import Named, Skipped
from .large_images import LargeImages, hashed, identity
from .raster import ReadError
from .tiling import Span

SIZES = {'pytorch': 'WORLD_SIZE', 'slurm': 'SLURM_NTASKS', 'mpi': 'OMPI_COMM_WORLD_SIZE'}
LOCAL_RANKS = {
    'pytorch': 'LOCAL_RANK', 'slurm': 'SLURM_LOCALID', 'mpi': 'OMPI_COMM_WORLD_LOCAL_RANK',
}  # fmt: skip
WAIT = 0.2, 2.0  # seconds after which a process looks again for a task to take over
REPORT = 30  # seconds between two lines about the progress
PARTS, MOST = 64, 16  # parts that many images are divided into; batches of a part, at most
FOLDER = '.shared'  # in the folder of the results

Write = Callable[[Sequence[Named]], Skipped]
Conclude = Callable[[Skipped], None]  # called once in the end


class Task(NamedTuple):
    """A part of the work."""

    name: str  # unique
    about: Any  # what the outcome depends on, as JSON values
    run: Callable[..., Any]  # does it and returns the outcome, JSON values
    needs: Sequence[str] = ()  # names of tasks that must be finished first; `run` gets the outcomes
    # Whether the results that an outcome stands for still exist
    kept: Callable[[Any], bool] = lambda outcome: True


class Record(NamedTuple):
    """A finished task."""

    about: str  # what the outcome depends on, hashed
    outcome: Any
    time: float  # when the task was finished


def share(folder: Path, tasks: Sequence[Task]) -> dict[str, Record]:
    """Finish tasks, in an order in which they can be done, together with the other processes that
    call this with the same arguments. The folder is for locks and records.

    Returns:
        The records of all tasks by name, when all are finished.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records, waited, reported = {}, WAIT[0], time.monotonic()
    while len(records) < len(tasks):
        before = len(records)
        for task in tasks:
            if task.name in records or not records.keys() >= set(task.needs):
                continue
            outcomes = [records[name].outcome for name in task.needs]
            record = finished(folder, task) or finish(folder, task, *outcomes)
            if record:
                records[task.name] = record
            if rank() == 0 and time.monotonic() - reported > REPORT:
                print(f'{len(records)} of {len(tasks)} parts done', file=sys.stderr)
                reported = time.monotonic()
        if len(records) < len(tasks):
            waited = WAIT[0] if len(records) > before else min(2 * waited, WAIT[1])
            time.sleep(waited)
    return records


def finish(folder: Path, task: Task, *outcomes: Any) -> Optional[Record]:
    """Run a task, unless another process is at work on it."""
    path = file_of(folder, task).with_suffix('.lock')
    try:
        lock = locked(path)
    except BlockingIOError:
        return None
    if lock is None:
        raise UserError(f'sharing work needs file locks, and the file system of {folder} has none')
    try:
        record = finished(folder, task)
        if record is None:
            record = Record(hashed(task.about), task.run(*outcomes), time.time())
            write_text(file_of(folder, task), json.dumps(record))
        path.unlink(missing_ok=True)  # a process that has opened it already finds the record
    finally:
        lock.release()
    return record


def finished(folder: Path, task: Task) -> Optional[Record]:
    """The record of a task, if it is finished."""
    try:
        record = Record(*json.loads(file_of(folder, task).read_text()))
    except (OSError, ValueError):
        return None
    return record if record.about == hashed(task.about) and task.kept(record.outcome) else None


def forget(folder: Path) -> None:
    """Remove the records of a shared run, whose results are about to be overwritten."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def file_of(folder: Path, task: Task) -> Path:
    return folder / f'{hashed(task.name)[:20]}.json'


# Images


class Sharing(NamedTuple):
    """The processes that share the results of images."""

    processes: int
    device: Optional[str]  # the GPU of this one, if there are any

    @classmethod
    def among(cls, launcher: str) -> Optional['Sharing']:
        """What a launcher (none, pytorch, slurm or mpi) has started; None for none.

        Raises:
            UserError: this process was started otherwise.
        """
        if launcher == 'none':
            return None
        if not {RANKS[launcher], SIZES[launcher]} <= os.environ.keys():
            raise UserError(f'--launcher {launcher} is for processes started by {launcher}')
        gpus = torch.cuda.device_count()
        device = f'cuda:{int(os.environ.get(LOCAL_RANKS[launcher], 0)) % gpus}' if gpus else None
        if device:
            torch.cuda.set_device(device)  # mmengine takes the current one
        return cls(int(os.environ[SIZES[launcher]]), device)


def tasks_of_images(
    write: Write, named: Sequence[Named], folder: Path, about: Any, batch_size: int
) -> list[Task]:
    """Tasks for parts of images and for each video. The outcome of each are skipped inputs.

    Args:
        write: writes the results of some of them.
        named: all of them.
        folder: for the results.
        about: what the results depend on but for the inputs, as JSON values.
        batch_size: number of images that pass the model together.
    """
    images = [entry for entry in named if not is_video(entry[0])]
    size = batch_size * min(max(len(images) // (PARTS * batch_size), 1), MOST)
    parts = [images[i : i + size] for i in range(0, len(images), size)]
    parts += [[entry] for entry in named if is_video(entry[0])]

    def task(part: Sequence[Named]) -> Task:
        def kept(skipped: Skipped) -> bool:
            return all(
                str(path) in dict(skipped) or any(folder.glob(f'{glob.escape(name)}.*'))
                for path, name in part
            )

        files = [(name, path.is_file() and identity(path)) for path, name in part]
        return Task(f'image {part[0][1]}', [about, files], partial(write, part), kept=kept)

    return [task(part) for part in parts]


def tasks_of_tiles(large: LargeImages, named: Sequence[Named], processes: int) -> list[Task]:
    """Tasks for images of any size: for each image one for each band of rows of tiles, and one for
    the results. The outcome of each are skipped inputs. `large` is the model, the tiles and the
    folder for the results."""

    def tasks(path: Path, name: str) -> list[Task]:
        is_done = partial(large.is_done, path, name)

        def write_band(band: Span) -> Skipped:
            try:
                large.write_band(path, name, band)
            except ReadError as error:
                return [(str(path), one_line(error))]
            return []

        def has_band(band: Span, skipped: Skipped) -> bool:
            return bool(skipped) or large.band_folder(name, band).exists() or is_done()

        def write_image(*skipped: Skipped) -> Skipped:
            if not bands:
                print(f'{path}: already done')
            elif not any(skipped):
                large.join_bands(path, name, bands)
            shutil.rmtree(large.working_folder(name), ignore_errors=True)
            return next(filter(None, skipped), [])

        try:
            bands = [] if is_done() else large.bands(path, processes)
        except ReadError as error:
            skipped = [(str(path), one_line(error))]
            return [Task(f'image {name}', skipped, lambda: skipped)]
        about = large.about_run(path)
        parts = [
            Task(f'{name} rows {band}', [about, band], partial(write_band, band),
                 kept=partial(has_band, band))
            for band in bands
        ]  # fmt: skip
        needs = [part.name for part in parts]
        kept = lambda skipped: bool(skipped) or is_done()  # noqa: E731
        return [*parts, Task(f'image {name}', about, write_image, needs, kept)]

    return [task for entry in named for task in tasks(*entry)]


def in_order(tasks: Sequence[Task]) -> Skipped:
    """Finish tasks in this process; returns the inputs that were skipped."""
    outcomes: dict[str, Skipped] = {}
    for task in tasks:
        outcomes[task.name] = task.run(*(outcomes[name] for name in task.needs))
    return list(dict(chain(*outcomes.values())).items())


def conclude_once(tasks: Sequence[Task], folder: Path, conclude: Conclude) -> Skipped:
    """Share tasks, and let one process conclude; returns the inputs that were skipped."""
    records = share(folder / FOLDER, tasks)
    skipped = list(dict(chain(*(records[task.name].outcome for task in tasks))).items())
    about = [records[task.name].time for task in tasks]
    last = Task('conclusion', about, partial(conclude, skipped))
    if rank() == 0 and finished(folder / FOLDER, last):
        print(f'already done: results in {folder}; to repeat it, remove {folder / FOLDER}')
    share(folder / FOLDER, [last])
    return skipped
