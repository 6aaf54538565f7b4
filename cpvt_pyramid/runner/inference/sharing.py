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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from ...tooling.command import RANKS, UserError, one_line, rank
from ...tooling.files import locked, write_text
from ...tooling.inputs import is_video
from ...tooling.rasters import ReadError
from .batched import Named, Skipped
from .large_images import LargeImage, hashed, identity
from .tiling import Span

SIZES = {'pytorch': 'WORLD_SIZE', 'slurm': 'SLURM_NTASKS', 'mpi': 'OMPI_COMM_WORLD_SIZE'}
LOCAL_RANKS = {
    'pytorch': 'LOCAL_RANK', 'slurm': 'SLURM_LOCALID', 'mpi': 'OMPI_COMM_WORLD_LOCAL_RANK',
}  # fmt: skip
WAIT = 0.5  # seconds after which a process looks again for a task to take over
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
    call this with the same arguments; returns the records of all by name. The folder is for locks
    and records."""
    folder.mkdir(parents=True, exist_ok=True)
    records, reported = {}, time.monotonic()
    while True:
        for task in tasks:
            waits = any(name not in records for name in task.needs)
            if task.name in records or waits:
                continue
            outcomes = [records[name].outcome for name in task.needs]
            record = finished(folder, task) or try_to_finish(folder, task, *outcomes)
            if record:
                records[task.name] = record
            if rank() == 0 and time.monotonic() - reported > REPORT:
                print(f'{len(records)} of {len(tasks)} parts done', file=sys.stderr)
                reported = time.monotonic()
        if len(records) == len(tasks):
            return records
        time.sleep(WAIT)


def try_to_finish(folder: Path, task: Task, *outcomes: Any) -> Optional[Record]:
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
        write: writes the results of some of them into the folder.
        about: what the results depend on but for the inputs, as JSON values.
    """
    images = [entry for entry in named if not is_video(entry[0])]
    size = batch_size * min(max(len(images) // (PARTS * batch_size), 1), MOST)
    parts = [images[i : i + size] for i in range(0, len(images), size)]
    parts += [[entry] for entry in named if is_video(entry[0])]

    def task(part: Sequence[Named]) -> Task:
        def kept(skipped: Skipped) -> bool:
            return all(
                str(path) in skipped or any(folder.glob(f'{glob.escape(name)}.*'))
                for path, name in part
            )

        files = [(name, identity(path)) for path, name in part]
        return Task(f'image {part[0][1]}', [about, files], partial(write, part), kept=kept)

    return [task(part) for part in parts]


def tasks_of_tiles(image: LargeImage, processes: int) -> list[Task]:
    """Tasks for an image of any size: one for each band of rows of tiles, and one for the results.
    The outcome of each are skipped inputs."""
    path = str(image.path)

    def write_band(band: Span) -> Skipped:
        try:
            image.write_band(band)
        except ReadError as error:
            return {path: one_line(error)}
        return {}

    def has_band(band: Span, skipped: Skipped) -> bool:
        return image.band_folder(band).exists() or has_image(skipped)

    def write_image(*skipped: Skipped) -> Skipped:
        if not bands:
            print(f'{path}: already done')
        elif not any(skipped):
            image.join_bands(bands)
        shutil.rmtree(image.working_folder, ignore_errors=True)
        return all_skipped(skipped)

    def has_image(skipped: Skipped) -> bool:
        return bool(skipped) or image.is_done()

    try:
        bands = [] if image.is_done() else image.bands(processes)
    except ReadError as error:
        reason = one_line(error)
        return [Task(f'image {image.name}', reason, lambda: {path: reason})]
    tasks = []
    for band in bands:
        name, work = f'{image.name} rows {band}', partial(write_band, band)
        tasks.append(Task(name, [image.about, band], work, kept=partial(has_band, band)))
    needs = [task.name for task in tasks]
    return [*tasks, Task(f'image {image.name}', image.about, write_image, needs, has_image)]


def in_order(tasks: Sequence[Task]) -> Skipped:
    """Finish tasks in this process; returns the inputs that were skipped."""
    outcomes: dict[str, Skipped] = {}
    for task in tasks:
        outcomes[task.name] = task.run(*(outcomes[name] for name in task.needs))
    return all_skipped(outcomes.values())


def conclude_once(tasks: Sequence[Task], folder: Path, conclude: Conclude) -> Skipped:
    """Share tasks, and let one process conclude; returns the inputs that were skipped."""
    records = share(folder / FOLDER, tasks)
    skipped = all_skipped(records[task.name].outcome for task in tasks)
    about = [records[task.name].time for task in tasks]
    last = Task('conclusion', about, partial(conclude, skipped))
    if rank() == 0 and finished(folder / FOLDER, last):
        print(f'already done: results in {folder}; to repeat it, remove {folder / FOLDER}')
    share(folder / FOLDER, [last])
    return skipped


def all_skipped(outcomes: Iterable[Skipped]) -> Skipped:
    return {path: reason for skipped in outcomes for path, reason in skipped.items()}
