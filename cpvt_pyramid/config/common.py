"""What a training and a test change in a config alike."""

from pathlib import Path
from typing import Optional

from mmengine.config import Config

from .plan import Change, note, set_value


def plan_work_dir(cfg: Config, work_dir: Path, given: Optional[str]) -> list[Change]:
    """Set the work dir; `given` is --work-dir."""
    if cfg.get('work_dir') == str(work_dir):
        return []
    reason = '--work-dir' if given else 'the config sets none'
    return [set_value('work_dir', str(work_dir), reason)]


def plan_scope(cfg: Config) -> list[Change]:
    if isinstance(cfg.model.get('type'), str):
        return []
    return [note('default_scope', f'{cfg.default_scope}, which the class of the model is of')]


def plan_compilation(cfg: Config) -> list[Change]:
    """Compile for fixed sizes, unless the config has `dynamic`. By default PyTorch compiles for all
    sizes once it has seen two, and PyTorch 2.13 cannot do so for the gradients of pyramids
    (docs/performance.md)."""
    options = cfg.get('compile')
    reason = 'PyTorch cannot compile the gradients of pyramids for all sizes'
    if options is True:
        return [set_value('compile', {'dynamic': False}, reason)]
    if isinstance(options, dict) and 'dynamic' not in options:
        return [set_value('compile.dynamic', False, reason)]
    return []
