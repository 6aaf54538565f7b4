"""A recipe on another number of images a step: its learning rate and its iterations.

`auto_scale_lr.base_batch_size` of a config is the number of images in a step of its recipe.
"""

from typing import Any, NamedTuple, Optional, Union

from mmengine.config import Config

from ...config.parts import items_of, kind_of
from ...config.plan import Change, note, set_value
from ...tooling.command import UserError

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


class StepImages(NamedTuple):
    """Images of all processes."""

    recipe: int  # in a step of the recipe
    iteration: int
    step: int  # of the optimizer, which may accumulate the gradients of several iterations


def batch_of(cfg: Config, processes: int) -> Optional[StepImages]:
    """The images in a step; None if it is unknown, or a mistake that mmengine names."""
    recipe: Any = (cfg.get('auto_scale_lr') or {}).get('base_batch_size')
    images = cfg.train_dataloader.get('batch_size')
    counts = accumulated(cfg)
    if not (is_count(recipe) and is_count(images) and is_count(counts)):
        return None
    images *= processes
    return StepImages(recipe, images, images * counts)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def accumulated(cfg: Config) -> Any:
    """How many iterations have a step together."""
    return cfg.optim_wrapper.get('accumulative_counts', 1)


def scales_lr(cfg: Config, scale_lr: bool) -> bool:
    return scale_lr or bool((cfg.get('auto_scale_lr') or {}).get('enable'))


def counts_iterations(cfg: Config) -> bool:
    return cfg.train_cfg.get('max_iters') is not None


def plan_scaling(cfg: Config, processes: int, scale_lr: bool, scale_iters: bool) -> list[Change]:
    """Scale a training config to the images in a step of this run.

    Args:
        cfg: the config.
        processes: number of processes.
        scale_lr: let mmengine multiply the learning rate by the images in a step / those in a step
            of the recipe.
        scale_iters: divide the numbers of iterations by that ratio, so that an iteration-based
            training sees as many images as the recipe. `ExponentialLR`, whose decay for each
            iteration would have to change, is an error.
    """
    base = (cfg.get('auto_scale_lr') or {}).get('base_batch_size')
    if (scales_lr(cfg, scale_lr) or scale_iters) and not is_count(base):
        raise UserError(
            'to scale a recipe, the config must set auto_scale_lr.base_batch_size to a number of '
            f'images, got {base!r}'
        )
    if scale_iters and not counts_iterations(cfg):
        raise UserError(
            '--auto-scale-iters needs a training that counts iterations; epochs have the same '
            'images with any batch'
        )
    changes = []
    if scale_lr:
        changes.append(set_value('auto_scale_lr.enable', True, '--auto-scale-lr'))
    batch = batch_of(cfg, processes)
    if batch is None:
        return changes
    if scales_lr(cfg, scale_lr) and accumulated(cfg) > 1:
        changes.append(note('auto_scale_lr.base_batch_size', 'compared with the images in a step'))
    if scale_iters:
        changes += plan_iterations(cfg, batch)
    return changes


def plan_iterations(cfg: Config, batch: StepImages) -> list[Change]:
    """Scale what an iteration-based training config counts in iterations."""
    factor = batch.recipe / batch.iteration
    reason = f'--auto-scale-iters, {batch.iteration} images in place of {batch.recipe}'
    changes = []
    for path, settings in counted_by_iteration(cfg):
        if kind_of(settings).startswith('Exponential'):
            raise UserError(
                f'--auto-scale-iters cannot scale the gamma of {kind_of(settings)}; '
                'change param_scheduler in the config'
            )
        for name in COUNTS:
            count = settings.get(name)
            if count is None:
                continue
            scaled = scaled_count(count, factor)
            if scaled != count:
                changes.append(set_value(f'{path}.{name}', scaled, reason))
    return changes


def counted_by_iteration(cfg: Config) -> list[tuple[str, dict]]:
    """The parts of an iteration-based training config that count iterations, with their paths."""
    hooks = cfg.get('default_hooks') or {}
    others = items_of(hooks, 'checkpoint', 'default_hooks') + items_of(cfg, 'param_scheduler', '')
    by_iteration = [(path, part) for path, part in others if not part.get('by_epoch', True)]
    return [('train_cfg', cfg.train_cfg), *by_iteration]


def scaled_count(count: Union[float, list, tuple], factor: float) -> Any:
    """A number of iterations, or all numbers in a list. Infinity, 0 and -1, which means never, are
    kept; others are at least 1."""
    if isinstance(count, (list, tuple)):
        return type(count)([scaled_count(inner, factor) for inner in count])
    if count <= 0 or count == float('inf'):
        return count
    return max(1, round(count * factor))


def what_is_not_scaled(
    cfg: Config, processes: int, scale_lr: bool, scale_iters: bool
) -> Optional[str]:
    """A line about a run with another number of images than its recipe, if something is for the
    recipe's."""
    batch = batch_of(cfg, processes)
    if batch is None:
        return None
    left = []
    if batch.step != batch.recipe and not scales_lr(cfg, scale_lr):
        left.append(f'the learning rate is for {batch.recipe} (--auto-scale-lr changes it)')
    if batch.iteration != batch.recipe and counts_iterations(cfg) and not scale_iters:
        share = batch.iteration / batch.recipe
        left.append(
            f'training sees {share:.3g} times the images of the recipe '
            '(--auto-scale-iters changes that)'
        )
    if not left:
        return None
    return f'a step has {batch.step} images: {", and ".join(left)}'
