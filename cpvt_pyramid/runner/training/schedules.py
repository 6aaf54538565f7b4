"""A recipe on another number of images a step: its learning rate and its iterations.

`auto_scale_lr.base_batch_size` of a config is the number of images in a step of its recipe.
"""

from typing import Any, Union

from mmengine.config import Config
from mmengine.dist import get_world_size

from ...tooling.command import UserError, rank
from ..config.parts import as_list, kind_of

# Settings of loops, checkpoint hooks and schedulers that count iterations.
COUNTS = (
    'max_iters',
    'val_begin',
    'val_interval',
    'dynamic_intervals',
    'interval',
    'save_begin',
    'begin',
    'end',
    'T_max',
    'total_steps',
    'step_size',
    'milestones',
    'periods',
)


def fit_to_batch(cfg: Config, scale_lr: bool, scale_iters: bool) -> None:
    """Scale a training config to the images in a step of this run, or say what was not scaled.

    Args:
        cfg: changed in place.
        scale_lr: let mmengine multiply the learning rate by the images in a step / those in a step
            of the recipe.
        scale_iters: divide the numbers of iterations by that ratio, so that an iteration-based
            training sees as many images as the recipe. `ExponentialLR`, whose decay for each
            iteration would have to change, is an error.
    """
    auto = cfg.get('auto_scale_lr') or {}
    base = auto.get('base_batch_size')
    scales = scale_lr or scale_iters or auto.get('enable')
    if scales and not (isinstance(base, int) and base > 0):
        raise UserError(
            'to scale a recipe, the config must set auto_scale_lr.base_batch_size to a number of '
            f'images, got {base!r}'
        )
    if scale_lr:
        cfg.auto_scale_lr.enable = True
    counts_iterations = cfg.train_cfg.get('max_iters') is not None
    if scale_iters and not counts_iterations:
        raise UserError(
            '--auto-scale-iters needs a training that counts iterations; epochs have the same '
            'images with any batch'
        )
    batch = cfg.train_dataloader.get('batch_size')
    counts = cfg.optim_wrapper.get('accumulative_counts', 1)
    if not all(isinstance(x, int) and x > 0 for x in (base, batch, counts)):
        return  # unknown, or a mistake that mmengine names
    images = batch * get_world_size()
    step = images * counts
    if scale_iters:
        scale_iterations(cfg, base / images)
    left = []
    if step != base and not cfg.auto_scale_lr.get('enable'):
        left.append(f'the learning rate is for {base} (--auto-scale-lr changes it)')
    if images != base and counts_iterations and not scale_iters:
        left.append(
            f'training sees {images / base:.3g} times the images of the recipe '
            '(--auto-scale-iters changes that)'
        )
    if left and rank() == 0:
        print(f'a step has {step} images: {", and ".join(left)}')


def scale_iterations(cfg: Config, factor: float) -> None:
    """Multiply by `factor` what an iteration-based training config counts in iterations."""
    checkpoint = (cfg.get('default_hooks') or {}).get('checkpoint') or {}
    others = [checkpoint, *as_list(cfg.get('param_scheduler'))]
    for settings in [cfg.train_cfg, *(s for s in others if not s.get('by_epoch', True))]:
        if kind_of(settings).startswith('Exponential'):
            raise UserError(
                f'--auto-scale-iters cannot scale the gamma of {kind_of(settings)}; '
                'change param_scheduler in the config'
            )
        for name in COUNTS:
            if settings.get(name) is not None:
                settings[name] = scaled_count(settings[name], factor)


def scaled_count(count: Union[float, list, tuple], factor: float) -> Any:
    """A number of iterations, or all numbers in a list. Infinity, 0 and -1, which means never, are
    kept; others are at least 1."""
    if isinstance(count, (list, tuple)):
        return [scaled_count(inner, factor) for inner in count]
    if count <= 0 or count == float('inf'):
        return count
    return max(1, round(count * factor))
