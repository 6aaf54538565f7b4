"""`cpvt infer --ray`: images on the workers of a Ray cluster.

Ray Data divides the images, repeats those of a lost worker, and starts as many workers as there is
work for. Each worker loads the model once and writes whole results into the folder, which all
machines share, as they do the images and the model. Between the processes travel only names.
"""

import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..images.inputs import NamedInput
from ..tooling.command import UserError, described, one_line, optional_package
from ..tooling.threads import usable_cores
from .opening import ModelFiles, open_model
from .options import InferOptions
from .results import Results
from .running import Skip, predict_files

PATIENCE = 10  # seconds to wait for the address of a cluster
MOST = 16  # images that a worker takes at a time
TURNS = 4  # in which each worker takes images, at least, so that all end at about the same time
WORKER_MEMORY = 3 * 2**29  # bytes that a worker takes on a CPU at 800 x 1333, at most
STORE = 128 * 2**20  # bytes of Ray's object store, through which names pass

Batch = dict[str, np.ndarray]


class Worker:
    """Writes the results of images and videos.

    Args:
        files: of the model.
        options: how results are made, without threads.
        here: the folder in which the command was started, to which paths are relative.
    """

    def __init__(self, files: ModelFiles, options: InferOptions, here: str) -> None:
        os.chdir(here)
        self.model = open_model(files, options)
        self.options = options

    def __call__(self, batch: Batch) -> Batch:
        """Takes `path` and `name` of inputs. Returns the path of each, the reason why it was
        `skipped`, what `failed`, after which the run cannot go on, and, of the first, what was
        found as `counts`; or empty texts. `full` is whether the model returned as many boxes as it
        can."""
        named = [(Path(path), str(name)) for path, name in zip(batch['path'], batch['name'])]
        results = Results(self.options, self.model.kind, self.model.classes)
        skipped: dict[Path, str] = {}
        failed = ''
        try:
            predict_files(self.model, named, results, self.options, skipped.__setitem__)
        except (OSError, UserError) as error:  # for example, of a full disk
            failed = str(error)
        except Exception as error:
            failed = described(error)
        counts = [json.dumps(results.counts)] + [''] * (len(named) - 1)
        return {
            'path': batch['path'],
            'skipped': np.array([skipped.get(path, '') for path, _ in named], object),
            'failed': np.array([failed] * len(named), object),
            'counts': np.array(counts, object),
            'full': np.array([path in results.full for path, _ in named]),
        }


def predict_on_ray(
    files: ModelFiles,
    named: Sequence[NamedInput],
    results: Results,
    options: InferOptions,
    skip: Skip,
) -> None:
    """Write the results of images and videos, of which there is one, on a cluster.

    Args:
        files: of the model.
        named: the inputs.
        results: in which they are counted.
        options: how results are made, without threads. A cluster that this process is connected to
            already comes before that of `ray`.
        skip: called with inputs that cannot be read.

    Raises:
        UserError: there is no cluster, or a worker failed.
    """
    with connected(str(options.ray)) as ray:
        resources = Counter(ray.cluster_resources())
        gpus = 0 if options.device == 'cpu' else int(resources['GPU'])
        room = int(resources['memory'] // WORKER_MEMORY)
        most = options.ray_workers or max(gpus or min(int(resources['CPU']), room), 1)
        size = min(-(-len(named) // (most * TURNS)), MOST)
        blocks = -(-len(named) // max(size, options.batch_size))
        rows = [{'path': str(path), 'name': name} for path, name in named]
        arguments = {'files': files, 'options': options, 'here': os.getcwd()}
        found = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            Worker,
            fn_constructor_kwargs=arguments,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(most, blocks)),
            num_cpus=1,
            num_gpus=1 if gpus else None,
            batch_size=None,  # a block
        )
        for row in found.iter_rows():
            if row['failed']:
                raise UserError(f'in a worker of Ray: {row["failed"]}')
            if row['full']:
                results.full.add(Path(row['path']))
            if row['skipped']:
                skip(Path(row['path']), row['skipped'])
            results.counts += Counter(json.loads(row['counts'] or '{}'))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The package ray, connected to a cluster; see `InferOptions`."""
    os.environ.setdefault('RAY_BACKEND_LOG_LEVEL', 'fatal')  # read by the import
    optional_package('ray.data', '--ray', "'ray[data]'")
    import ray

    is_mine = not ray.is_initialized()
    on_terminate = signal.getsignal(signal.SIGTERM)
    if is_mine:
        start_or_join(ray, address)
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's own aborts the process
    logging.getLogger('ray.data').setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    try:
        yield ray
    finally:
        if is_mine:
            ray.shutdown()


def start_or_join(ray: Any, address: str) -> None:
    """Start a cluster on this machine, or connect to one; see `InferOptions`."""
    options: dict[str, Any] = {'log_to_driver': False, 'logging_level': logging.ERROR}
    if address == 'local':
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
            check_address(address, failure)
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
        raise UserError(f'--ray must be local, auto or HOST:PORT, got {address}')
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise UserError(f'{failure}: {one_line(error)}') from error
