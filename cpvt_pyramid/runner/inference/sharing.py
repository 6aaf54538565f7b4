"""Work that several processes share through a folder, on one machine or on several.

Nothing connects the processes. Each goes through the same list of tasks, claims one by locking a
file, and writes down its outcome when it is finished. The lock ends with the process, however that
ends, and another process takes the task over. A run of which all processes were killed is resumed
by starting it again, with any number of processes: finished tasks are not repeated.
"""

import glob
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from ...tooling.command import RANKS, UserError, one_line, rank
from ...tooling.files import locked, write_text
from ...tooling.inputs import is_video
from .batched import Named, Skip
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

Write = Callable[[Sequence[Named], Skip], None]
Conclude = Callable[[Sequence[Path]], None]  # called once in the end, with the skipped inputs


class Task(NamedTuple):
    """A part of the work."""

    name: str  # unique
    about: Any  # what the outcome depends on, as JSON values
    run: Callable[[], Any]  # does it and returns the outcome, JSON values
    needs: Sequence[str] = ()  # names of tasks that must be finished first
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
            record = finished(folder, task) or finish(folder, task)
            if record:
                records[task.name] = record
            if rank() == 0 and time.monotonic() - reported > REPORT:
                print(f'{len(records)} of {len(tasks)} parts done', file=sys.stderr)
                reported = time.monotonic()
        if len(records) < len(tasks):
            waited = WAIT[0] if len(records) > before else min(2 * waited, WAIT[1])
            time.sleep(waited)
    return records


def finish(folder: Path, task: Task) -> Optional[Record]:
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
            record = Record(hashed(task.about), task.run(), time.time())
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


def share_images(
    write: Write,
    named: Sequence[Named],
    folder: Path,
    about: Any,
    batch_size: int,
    conclude: Conclude,
) -> Sequence[Path]:
    """Write the results of images and videos in several processes.

    Args:
        write: writes the results of some of them; calls its second argument for those that cannot
            be read.
        named: all of them.
        folder: for the results.
        about: what the results depend on but for the inputs, as JSON values.
        batch_size: number of images that pass the model together.
        conclude: called in one process in the end, with the inputs that were skipped.

    Returns:
        The inputs that were skipped.
    """
    images = [entry for entry in named if not is_video(entry[0])]
    size = batch_size * min(max(len(images) // (PARTS * batch_size), 1), MOST)
    parts = [images[i : i + size] for i in range(0, len(images), size)]
    parts += [[entry] for entry in named if is_video(entry[0])]

    def task(part: Sequence[Named]) -> Task:
        def run() -> list[tuple[str, str]]:
            skipped = []
            write(part, lambda path, error: skipped.append((str(path), one_line(error))))
            return skipped

        def kept(skipped: Sequence[tuple[str, str]]) -> bool:
            return all(
                str(path) in dict(skipped) or any(folder.glob(f'{glob.escape(name)}.*'))
                for path, name in part
            )

        files = [(name, path.is_file() and identity(path)) for path, name in part]
        return Task(f'image {part[0][1]}', [about, files], run, kept=kept)

    return conclude_once(list(map(task, parts)), folder, conclude)


def share_tiles(
    large: LargeImages, named: Sequence[Named], processes: int, conclude: Conclude
) -> Sequence[Path]:
    """Write the results of large images in several processes, which share rows of tiles; see
    `share_images`. `large` is the model, the tiles and the folder for the results."""
    tasks = []
    for path, name in named:
        try:
            tasks += tasks_of_image(large, path, name, processes)
        except ReadError as error:
            skipped = [(str(path), one_line(error))]
            tasks.append(Task(f'image {name}', skipped, partial(list, skipped)))
    return conclude_once(tasks, large.folder, conclude)


def tasks_of_image(large: LargeImages, path: Path, name: str, processes: int) -> list[Task]:
    """A task for each band of rows of tiles, and the last for the results of the image. The outcome
    of each is the path and a reason, if the image is skipped.

    Of a detector, a band is a row. Of a segmentor, which computes tiles twice where bands meet,
    there is one for each process.
    """
    about, is_done = large.about_run(path), partial(large.is_done, path, name)
    rows = 0 if is_done() else large.rows(path)
    length = 1 if large.model.detects else math.ceil(rows / processes) or 1
    bands = [(start, min(start + length, rows)) for start in range(0, rows, length)]

    def write_band(band: Span) -> list[tuple[str, str]]:
        try:
            large.write_band(path, name, band)
        except ReadError as error:
            return [(str(path), one_line(error))]
        return []

    def has_band(band: Span, skipped: list) -> bool:
        return bool(skipped) or large.working_folder(name, band).exists() or is_done()

    def write_image() -> list[tuple[str, str]]:
        records = (finished(large.folder / FOLDER, part) for part in parts)
        skipped = [entry for record in records for entry in record.outcome]
        if bands and not skipped:
            large.join_bands(path, name, bands)
        shutil.rmtree(large.working_folder(name), ignore_errors=True)
        return skipped[:1]

    parts = [
        Task(
            f'{name} rows {band[0]}-{band[1]}', [about, band], partial(write_band, band),
            kept=partial(has_band, band),
        )
        for band in bands
    ]  # fmt: skip
    needs = [part.name for part in parts]
    image = Task(f'image {name}', about, write_image, needs, lambda skipped: skipped or is_done())
    return [*parts, image]


def conclude_once(tasks: Sequence[Task], folder: Path, conclude: Conclude) -> Sequence[Path]:
    """Share tasks whose outcomes are the paths of inputs that were skipped, and why; then let one
    process report these and conclude. Returns the inputs that were skipped."""
    records = share(folder / FOLDER, tasks)
    skipped = dict(entry for task in tasks for entry in records[task.name].outcome)

    def run() -> None:
        for path, reason in skipped.items():
            print(f'infer: skipped {path}: {reason}', file=sys.stderr)
        conclude(list(map(Path, skipped)))

    last = Task('conclusion', [records[task.name].time for task in tasks], run)
    if rank() == 0 and finished(folder / FOLDER, last):
        print(f'already done: results in {folder}; to repeat it, remove {folder / FOLDER}')
    share(folder / FOLDER, [last])
    return list(map(Path, skipped))
