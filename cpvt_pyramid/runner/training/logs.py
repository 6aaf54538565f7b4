"""Where a training logs to, and what."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mmengine.config import Config
from mmengine.registry import LOG_PROCESSORS, VISBACKENDS
from mmengine.runner import LogProcessor, Runner
from mmengine.visualization import MLflowVisBackend

from ...config.parts import kind_of
from ...config.plan import Change, append, set_value
from ...tooling import memory
from ...tooling.command import UserError
from .resume import batch_size_of


class Log(NamedTuple):
    """What --log-to can name."""

    backend: str
    package: str
    distribution: str  # that installs the package


LOGS = {
    'tensorboard': Log('TensorboardVisBackend', 'tensorboard', 'tensorboard'),
    'wandb': Log('WandbVisBackend', 'wandb', 'wandb'),
    'mlflow': Log('MLflowBackend', 'mlflow', 'mlflow-skinny'),
}
PROJECT = 'cpvt_pyramid'  # of Weights & Biases


def plan_logs(cfg: Config, names: Sequence[str], work_dir: str) -> list[Change]:
    """Throughput and memory in the log of a training, and further logs.

    Args:
        cfg: the config.
        names: keys of `LOGS`. Each writes into a folder of its name in the work dir.
        work_dir: of the training.
    """
    changes = []
    if kind_of(cfg.get('log_processor') or {}) in ('', 'LogProcessor'):
        reason = 'adds images per second and, without a GPU, the memory'
        changes.append(set_value('log_processor.type', 'ProgressLogProcessor', reason))
    visualizer = cfg.get('visualizer') or {}
    if not visualizer:
        changes.append(
            set_value('visualizer.type', 'Visualizer', 'writes logs; the config has none')
        )
    backends = visualizer.get('vis_backends') or []
    if not backends:
        local = [{'type': 'LocalVisBackend'}]
        changes.append(set_value('visualizer.vis_backends', local, 'logs for the curves'))
    kinds = [kind_of(backend) for backend in backends]
    for name in dict.fromkeys(names):
        if LOGS[name].backend not in kinds:
            backend = backend_of(name, work_dir)
            changes.append(append('visualizer.vis_backends', backend, f'--log-to {name}'))
    return changes


def backend_of(name: str, work_dir: str) -> dict:
    """The config of a backend of `LOGS`; a UserError if its package is not installed."""
    log = LOGS[name]
    if find_spec(log.package) is None:
        raise UserError(
            f'--log-to {name} needs the package {log.package}; pip install {log.distribution}'
        )
    backend: dict[str, Any] = {'type': log.backend, 'save_dir': str(Path(work_dir, name))}
    if name == 'wandb':
        backend['init_kwargs'] = {'project': PROJECT, 'name': Path(work_dir).name}
    return backend


@VISBACKENDS.register_module()
class MLflowBackend(MLflowVisBackend):
    """mmengine's backend for MLflow, which works with MLflow 3 and does not copy the work dir.

    MLFLOW_TRACKING_URI names another store than the folder in the work dir.
    """

    def _init_env(self) -> None:
        self._tracking_uri = self._tracking_uri or os.environ.get('MLFLOW_TRACKING_URI')
        if self._tracking_uri is None:  # MLflow 3 asks for this, to store runs in a folder
            os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')
        self._run_name = self._run_name or Path(self._save_dir).parent.name
        super()._init_env()

    def close(self) -> None:
        if hasattr(self, '_mlflow'):
            self._mlflow.end_run()


@LOG_PROCESSORS.register_module()
class ProgressLogProcessor(LogProcessor):
    """mmengine's LogProcessor, which adds the throughput and, without a GPU, the memory."""

    def get_log_after_iter(
        self, runner: Runner, batch_idx: int, mode: str
    ) -> tuple[dict[str, Any], str]:
        tag, line = super().get_log_after_iter(runner, batch_idx, mode)
        seconds = tag.get('time', tag.get('train/time'))
        if mode != 'train' or not seconds:
            return tag, line
        images = runner.world_size * (batch_size_of(runner) or 1)
        tag['images_per_second'] = images / seconds
        line += f'  images/s: {tag["images_per_second"]:.1f}'
        if 'memory' not in tag:
            tag['memory'] = memory.resident() // 2**20
            line += f'  memory: {tag["memory"]}'
        return tag, line
