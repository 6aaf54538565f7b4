"""`cpvt infer --ray`: the images of a run, or the rows of tiles of large ones, on the workers of a
Ray cluster.

Ray Data divides the work, repeats that of a lost worker, and starts as many workers as there is
work for. Each worker loads the model once and writes results into the folder, which all machines
share, as they do the images and the model. Between the processes travel only names.
"""

import logging
import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np

from ...tooling.command import UserError, one_line, optional_package
from ...tooling.explain import explained
from ...tooling.inputs import Named
from ...tooling.rasters import ReadError
from ...tooling.threads import usable_cores
from .batch_predictor import BatchPredictor
from .large_images import LargeImage, Tiling
from .writing import Skipped, images_and_videos, write_results

PATIENCE = 10  # seconds to wait for the address of a cluster
MOST = 16  # images that a worker takes at a time
TURNS = 4  # in which each worker takes images, at least, so that all end at about the same time
WORKER_MEMORY = 3 * 2**29  # bytes that a worker takes on a CPU at 800 x 1333, at most
STORE = 128 * 2**20  # bytes of Ray's object store, through which names pass

Batch = dict[str, np.ndarray]


# What a worker does


class ImageWriter:
    """Writes the results of images and videos.

    Args:
        model: arguments of a `BatchPredictor`.
        here: the folder in which the command was started, to which paths are relative.
        folder: for the results.
        pictures: also write an overlay for each image.
    """

    def __init__(self, model: dict, here: str, folder: Path, pictures: bool) -> None:
        os.chdir(here)
        self.model = BatchPredictor(**model).model
        self.folder = folder
        self.pictures = pictures

    def __call__(self, batch: Batch) -> Batch:
        """Takes `path` and `name` of inputs. Returns the path of each, the reason why it was
        `skipped`, and what `failed`, after which the run cannot go on; or empty texts."""
        named = [(Path(path), str(name)) for path, name in zip(batch['path'], batch['name'])]
        skipped: Skipped = {}

        def write() -> None:
            skipped.update(write_results(self.model, named, self.folder, pictures=self.pictures))

        failed = failure_of(write)
        reasons = [skipped.get(str(path), '') for path, _ in named]
        return outcome(batch['path'], reasons, failed)


class RowWriter:
    """Writes the results of bands of rows of tiles. For the arguments, see `ImageWriter`."""

    def __init__(
        self, model: dict, here: str, folder: Path, pictures: bool, tiling: Tiling
    ) -> None:
        os.chdir(here)
        self.model = BatchPredictor(**model).model.in_tiles()
        self.folder = folder
        self.pictures = pictures
        self.tiling = tiling

    def __call__(self, batch: Batch) -> Batch:
        """Takes `path` and `name` of an image, and the band of rows from `start` to `stop`. Returns
        what `ImageWriter` does."""
        [path] = batch['path']
        [name] = batch['name']
        [start] = batch['start']
        [stop] = batch['stop']
        skipped = ''

        def write() -> None:
            nonlocal skipped
            image = LargeImage(
                Path(path), str(name), self.model, self.tiling, self.folder, self.pictures
            )
            try:
                image.write_rows((int(start), int(stop)))
            except ReadError as error:
                skipped = one_line(error)

        failed = failure_of(write)
        return outcome(batch['path'], [skipped], failed)


def failure_of(work: Callable[[], object]) -> str:
    """Do some work; returns in one line what a user must know if it cannot be done. Other errors
    are raised, and end the run with a traceback."""
    try:
        work()
    except (OSError, UserError) as error:  # for example, of a full disk
        return one_line(error)
    return ''


def outcome(paths: Iterable[str], skipped: Sequence[str], failed: str) -> Batch:
    return {
        'path': np.array(list(paths), object),
        'skipped': np.array(skipped, object),
        'failed': np.array([failed] * len(skipped), object),
    }


# What the first process does


class Cluster(NamedTuple):
    """A Ray cluster that this process is connected to."""

    ray: Any  # the package
    workers: int  # at most
    gpus: int  # for each worker, 0 or 1

    def table(self, named: Sequence[Named], blocks: int) -> Any:
        """A data set of inputs, in blocks of equal length."""
        rows = [{'path': str(path), 'name': name} for path, name in named]
        return self.ray.data.from_items(rows, override_num_blocks=blocks)

    def results(self, writer: type, rows: Any, **arguments: Any) -> Iterator[dict]:
        """What a writer, see above, returns for a data set, row by row, in any order. A worker
        takes a block at a time.

        Raises:
            UserError: a worker failed.
        """
        tasks = rows.num_blocks()
        workers = self.ray.data.ActorPoolStrategy(min_size=1, max_size=min(self.workers, tasks))
        done = rows.map_batches(
            writer,
            fn_constructor_kwargs=arguments,
            compute=workers,
            num_cpus=1,
            num_gpus=self.gpus or None,
            batch_size=None,  # a block
        )
        with explained():  # also what Ray raises if a worker cannot start
            for row in done.iter_rows():
                if row['failed']:
                    raise UserError(f'in a worker of Ray: {row["failed"]}')
                yield row


@contextmanager
def connected(
    address: Union[bool, str], workers: Optional[int], device: Optional[str]
) -> Iterator[Cluster]:
    """A `Cluster`: one that this process starts on this machine, or that at an address.

    Args:
        address: True for this machine; else `auto`, for a cluster that this machine is part of, or
            HOST:PORT. A cluster that this process is connected to already comes first.
        workers: how many, at most; by default as many as there are GPUs or, without GPUs, cores and
            memory for.
        device: on which the models run, if the user says so.

    Raises:
        UserError: there is no cluster.
    """
    os.environ.setdefault('RAY_BACKEND_LOG_LEVEL', 'fatal')  # read by the import
    optional_package('ray.data', '--ray', "'ray[data]'")
    import ray

    is_mine = not ray.is_initialized()
    if is_mine:
        start_or_join(ray, address)
    logging.getLogger('ray.data').setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    try:
        resources = Counter(ray.cluster_resources())
        gpus = 0 if device == 'cpu' else int(resources['GPU'])
        room = int(resources['memory'] // WORKER_MEMORY)
        most = gpus or min(int(resources['CPU']), room)
        yield Cluster(ray, workers or max(most, 1), min(gpus, 1))
    finally:
        if is_mine:
            ray.shutdown()


def start_or_join(ray: Any, address: Union[bool, str]) -> None:
    """Start a cluster on this machine, or connect to one; see `connected`."""
    options: dict[str, Any] = {'log_to_driver': False, 'logging_level': logging.ERROR}
    if address is True:
        options |= {
            'address': 'local',
            'num_cpus': usable_cores(),
            'object_store_memory': STORE,
            'include_dashboard': False,
        }
        failure = 'Ray does not start on this machine'
    else:
        options['address'] = address
        failure = f'no Ray cluster answers at {address}'
        if address != 'auto':
            check_address(str(address), failure)
        # How often Ray tries to reach a server that takes connections but does not answer; each
        # time takes 40 seconds.
        os.environ.setdefault('RAY_gcs_server_port_wait_time_s', '1')
    try:
        ray.init(**options)
    except Exception as error:  # of many classes: what Ray's processes report
        raise UserError(f'{failure}: {one_line(error)}') from error


def check_address(address: str, failure: str) -> None:
    """Raise a UserError unless HOST:PORT takes connections; Ray would try for minutes."""
    host, _, port = address.removeprefix('ray://').rpartition(':')
    if not host or not port.isdigit():
        raise UserError(f'--ray takes auto or HOST:PORT, got {address}; it comes after the inputs')
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise UserError(f'{failure}: {one_line(error)}') from error


def write_images_on(
    cluster: Cluster, model: dict, named: Sequence[Named], folder: Path, pictures: bool
) -> Skipped:
    """Write the results of images and videos, of which there is one; returns those that cannot be
    read. A worker takes some images at a time, or a video. For the arguments, see `ImageWriter`."""
    images, videos = images_and_videos(named, model['batch_size'])
    size = math.ceil(len(images) / (cluster.workers * TURNS))
    size = max(min(size, MOST), model['batch_size'])
    tables = []
    if images:
        tables.append(cluster.table(images, math.ceil(len(images) / size)))
    if videos:
        tables.append(cluster.table(videos, len(videos)))
    rows = tables[0]
    if len(tables) > 1:  # Ray unites no single one
        rows = tables[0].union(tables[1]).materialize()
    arguments = {'model': model, 'here': os.getcwd(), 'folder': folder, 'pictures': pictures}
    skipped: Skipped = {}
    for row in cluster.results(ImageWriter, rows, **arguments):
        if row['skipped']:
            skipped[row['path']] = row['skipped']
    return skipped


def write_tiles_on(
    cluster: Cluster,
    model: dict,
    images: Sequence[LargeImage],
    folder: Path,
    pictures: bool,
    tiling: Tiling,
) -> Skipped:
    """Write the results of large images; returns those that cannot be read. A worker takes a band
    of rows of tiles at a time; this process joins them. For the arguments, see `RowWriter`."""
    skipped: Skipped = {}
    image_of: dict[str, LargeImage] = {}
    rows: list[dict] = []
    for image in images:
        path = str(image.path)
        try:
            count = image.rows()
        except ReadError as error:
            skipped[path] = one_line(error)
            continue
        image_of[path] = image
        size = math.ceil(count / cluster.workers)
        for start in range(0, count, size):
            stop = min(start + size, count)
            rows.append({'path': path, 'name': image.name, 'start': start, 'stop': stop})
    if not rows:
        return skipped
    waiting = Counter(row['path'] for row in rows)
    bands = cluster.ray.data.from_items(rows, override_num_blocks=len(rows))
    arguments = {'model': model, 'here': os.getcwd(), 'folder': folder, 'pictures': pictures}
    for row in cluster.results(RowWriter, bands, **arguments, tiling=tiling):
        path = row['path']
        waiting[path] -= 1
        if row['skipped']:
            skipped[path] = row['skipped']
        if waiting[path] == 0 and path not in skipped:
            image_of[path].join()
        elif waiting[path] == 0:
            image_of[path].give_up()
    return skipped
