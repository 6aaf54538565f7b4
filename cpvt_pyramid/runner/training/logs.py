"""Where a training logs to, and what."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import LOG_PROCESSORS, VISBACKENDS
from mmengine.runner import LogProcessor, Runner
from mmengine.visualization import MLflowVisBackend

from ...tooling import memory
from ...tooling.command import UserError
from ..config.parts import kind_of
from .resume import batch_size_of

# For each name for --log-to: the backend, the package, and what installs it.
LOGS = {
    'tensorboard': ('TensorboardVisBackend', 'tensorboard', 'tensorboard'),
    'wandb': ('WandbVisBackend', 'wandb', 'wandb'),
    'mlflow': ('MLflowBackend', 'mlflow', 'mlflow-skinny'),
}
PROJECT = 'cpvt_pyramid'  # of Weights & Biases


def set_up_logs(cfg: Config, names: Sequence[str] = ()) -> None:
    """Add throughput and memory to the log of a training config, and further logs.

    Args:
        cfg: the config; its work dir is set.
        names: keys of `LOGS`. Each writes into a folder of its name in the work dir.
    """
    processor = cfg.get('log_processor') or {}
    if kind_of(processor) in ('', 'LogProcessor'):
        cfg.log_processor = {**processor, 'type': 'ProgressLogProcessor'}
    if not cfg.get('visualizer'):
        cfg.visualizer = {'type': 'Visualizer'}
    backends = list(cfg.visualizer.get('vis_backends') or [{'type': 'LocalVisBackend'}])
    for name in dict.fromkeys(names):
        kind, package, distribution = LOGS[name]
        if find_spec(package) is None:
            raise UserError(
                f'--log-to {name} needs the package {package}; pip install {distribution}'
            )
        if kind not in map(kind_of, backends):
            backends.append({'type': kind, 'save_dir': str(Path(cfg.work_dir, name))})
            if name == 'wandb':
                backends[-1]['init_kwargs'] = {'project': PROJECT, 'name': Path(cfg.work_dir).name}
    cfg.visualizer.vis_backends = backends


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
