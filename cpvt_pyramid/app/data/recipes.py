"""A recipe for data of another size: scales of images, batch size, learning rate, length."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Optional

import numpy as np
from mmengine.config import Config

from ..config.parts import as_list, kind_of
from ..config.pipelines import keeps_ratio, keeps_size, pipeline_of, scales_of, transforms_in
from ..tooling.report import amount

# Length of a training: at least that of the recipe in epochs, or this number of steps with as many
# images as those of the recipe; at most this number of epochs, or those of the recipe.
MIN_STEPS = 3000
MAX_EPOCHS = 300
SEGMENTATION_EPOCHS = 100  # at least, of a recipe that counts iterations, unless it is shorter
# Settings of loops, hooks and schedulers that count epochs or iterations.
COUNTS = (
    'max_epochs',
    'max_iters',
    'val_begin',
    'val_interval',
    'dynamic_intervals',
    'begin',
    'end',
    'T_max',
    'total_steps',
    'step_size',
    'milestones',
    'periods',
)
EVALUATIONS = 10  # of a training, at least; the first one shows early whether it learns
WARM_UP = 10  # a warm-up in iterations takes at most this part of a training by epochs: 1 / 10
# Images are enlarged at most by this factor for detection, as most of COCO are by its recipe.
ENLARGED = 5 / 3
LARGER = 2  # segmentation of large images: at most this factor of the recipe's scale
SMALL = 16  # pixels; objects that are smaller in the network's input are hard to find


class Scales(NamedTuple):
    """How the scales of a recipe change for images of other sizes."""

    before: tuple[float, ...]  # scale of the base's test images, or of its training images
    scale: float  # factor on scales
    is_segmentation: bool
    # Tests do not resize images, and training does so only by the base's random factors: as
    # cpvt infer --tile, which does not either
    keeps_resolution: bool = False

    @classmethod
    def of(cls, cfg: Config, sizes: np.ndarray, task: str) -> 'Scales':
        """For images of some (N, 2) heights and widths."""
        is_segmentation = task == 'segmentation'
        tests = pipeline_of(cfg, 'val')
        if not is_segmentation and has_fixed_input(cfg):
            return cls(first_scale(tests), 1, is_segmentation)
        is_unscaled = any(map(keeps_size, transforms_in(tests)))
        keeps_resolution = not is_segmentation and is_unscaled
        before = first_scale(tests)
        if keeps_resolution and not before:
            before = first_scale(pipeline_of(cfg, 'train'))
        if not before:
            return cls((), 1, is_segmentation, keeps_resolution)
        by_long = max(before) / sizes.max(1)
        by_short = min(before) / sizes.min(1)
        enlarged = np.median(np.minimum(by_long, by_short))  # by the base
        if keeps_resolution:
            scale = 1 / enlarged
        elif is_segmentation:
            scale = min(1 / enlarged, LARGER)
        else:
            scale = min(ENLARGED / enlarged, 1)
        is_same = abs(scale - 1) < (1e-9 if keeps_resolution else 0.05)
        return cls(before, 1 if is_same else scale, is_segmentation, keeps_resolution)

    def line(self, sizes: np.ndarray, objects: np.ndarray) -> str:
        """One line about the sizes of images and objects; the arguments are those of `Data`."""
        (height, width), (low, narrow) = np.median(sizes, 0).astype(int), sizes.min(0).astype(int)
        line = f'images: {width} x {height} pixels (median), {narrow} x {low} at least'
        if self.keeps_resolution:
            line += '; not resized'
        elif self.before:
            line += f'; resized to {self.scaled(self.before)}'
        else:
            return line
        if len(objects):
            sides = objects[:, 0]
            if not self.keeps_resolution:
                after = self.scaled(self.before)
                long, short = objects[:, 1:].max(1), objects[:, 1:].min(1)
                sides = sides * np.minimum(max(after) / long, min(after) / short)
            tiny = (sides < SMALL).mean()
            line += f'; objects have {np.median(sides):.0f} x {np.median(sides):.0f} pixels then'
            if tiny > 0.2:
                line += f', and {tiny:.0%} are smaller than {SMALL}'
                if not self.keeps_resolution:
                    line += ': consider a larger scale, or tiles of large images'
        return line

    def scaled(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.scaled, value))
        return value if self.scale == 1 else max(round(value * self.scale), 32)

    def crops(self, size: Sequence[int]) -> tuple[int, ...]:
        if not self.is_segmentation:
            # Larger images are no reason for larger crops.
            smaller = self._replace(scale=min(self.scale, 1)) if self.keeps_resolution else self
            return smaller.scaled(tuple(size))
        return tuple(math.ceil(side * min(self.scale, 1) / 32) * 32 for side in size)

    def pipeline(self, pipeline: Any, reduce_zero_label: bool, is_test: bool = False) -> Any:
        """A pipeline of the base with other scales."""
        pipeline = deepcopy(pipeline)
        for step in transforms_in(pipeline):
            if is_test and self.keeps_resolution and kind_of(step) == 'Resize':
                step.pop('scale', None)
                step['scale_factor'] = 1.0
            for key in ('scale', 'scales', 'max_size'):
                if step.get(key) and not isinstance(step[key], float):  # a factor
                    step[key] = self.scaled(step[key])
            if isinstance(step.get('crop_size'), (list, tuple)):
                step['crop_size'] = self.crops(step['crop_size'])
            if self.is_segmentation and kind_of(step) == 'LoadAnnotations':
                step.pop('reduce_zero_label', None)
                if reduce_zero_label:
                    step['reduce_zero_label'] = True
        return pipeline


class Recipe(NamedTuple):
    """Learning rate and length of a training with the batch size of the base on one GPU."""

    settings: dict[str, Any]
    comments: dict[str, str]  # by setting
    line: str  # for people
    reason: str  # of the length, for people


def adapted_recipe(cfg: Config, images: int, epochs: Optional[int] = None) -> Recipe:
    """The recipe of a base for one GPU and another number of training images.

    Args:
        cfg: the base.
        images: in an epoch.
        epochs: length of the training; None chooses it by the number of images.
    """
    batch = cfg.train_dataloader.get('batch_size') or 1
    recipe_batch = (cfg.get('auto_scale_lr') or {}).get('base_batch_size') or batch
    if epochs is None:
        length = length_of(cfg, images, batch, recipe_batch)
    else:
        length = length_of_epochs(cfg, images, batch, epochs)
    scaled_loop = scale_counts(cfg.train_cfg, length.factor)
    interval = scaled_loop.get('val_interval', max(round(length.factor), 1))
    interval = min(interval, max(length.after // EVALUATIONS, 1))
    scaled_loop['val_interval'] = interval
    settings: dict[str, Any] = {
        'train_cfg': scaled_loop,
        'auto_scale_lr': dict(enable=False, base_batch_size=batch),
        'default_hooks': dict(checkpoint=dict(interval=interval)),
    }
    unit = 'epoch' if length.by_epoch else 'iteration'
    iterations = amount(length.iterations, 'iteration')
    comments = {'train_cfg': f'{iterations}; the base has {amount(length.before, unit)}.'}
    lr_before = cfg.optim_wrapper.get('optimizer', {}).get('lr')
    factor = batch / recipe_batch if lr_before else 1
    if cfg.get('param_scheduler'):
        settings['param_scheduler'] = [
            adapted_scheduler(scheduler, length, factor)
            for scheduler in as_list(cfg.param_scheduler)
        ]
        if not all(map(has_steps, settings['param_scheduler'])):
            settings['param_scheduler'] = []
            comments['param_scheduler'] = 'The training is too short for the schedules of the base.'
    lr = lr_before and float(f'{lr_before * factor:.3g}')
    if lr:
        settings['optim_wrapper'] = dict(optimizer=dict(lr=lr))
        comments['optim_wrapper'] = (
            f'{lr_before} for {amount(recipe_batch, "image")} per step in the base; here {batch}.\n'
            '# On several GPUs, or with another batch_size: --auto-scale-lr.'
        )
    for name, hook in (cfg.get('default_hooks') or {}).items():
        if kind_of(hook or {}) == 'EMAHook':  # averages over 1 / momentum steps
            momentum = max(hook.get('momentum', 2e-4), 10 / length.iterations)
            settings['default_hooks'][name] = dict(momentum=float(f'{momentum:.2g}'))
    for scheduler in as_list(settings.get('param_scheduler')):
        lr = scheduler.get('eta_max') or lr  # the highest of OneCycleLR
    in_epochs = f'{amount(length.after, "epoch")}, ' if length.by_epoch else ''
    line = f'training: {in_epochs}{iterations} of {amount(batch, "image")}'
    reason = f'length: {length.reason}; --epochs sets another. cpvt train logs how long it takes'
    return Recipe(settings, comments, f'{line}, learning rate {lr}', reason)


class Length(NamedTuple):
    """How long a training is, in epochs or iterations: that of the base, and that of the config."""

    by_epoch: bool
    before: int
    after: int
    iterations: int
    reason: str  # of the choice, for people

    @property
    def factor(self) -> float:
        return self.after / self.before


def length_of(cfg: Config, images: int, batch: int, recipe_batch: int) -> Length:
    """The length of a training with some images, `batch` of them in a step."""
    enough = MIN_STEPS * recipe_batch  # images, seen once or several times
    as_many = f'as many images as {MIN_STEPS} steps of the base, {enough}'
    few = f'with few images, {MAX_EPOCHS} epochs at most'
    if 'max_epochs' in cfg.train_cfg:
        before = cfg.train_cfg.max_epochs
        after = math.ceil(enough / images)
        reason = as_many
        if after > MAX_EPOCHS:
            after = MAX_EPOCHS
            reason = few
        if after <= before:
            after = before
            reason = f'the {amount(before, "epoch")} of the base'
        return Length(True, before, after, after * math.ceil(images / batch), reason)
    before = cfg.train_cfg.max_iters
    least = max((enough, as_many), (SEGMENTATION_EPOCHS * images, f'{SEGMENTATION_EPOCHS} epochs'))
    most = min((MAX_EPOCHS * images, few), (before * recipe_batch, 'as many images as the base'))
    seen, reason = min(least, most)
    after = math.ceil(seen / batch)
    if after > 1000:
        after = 100 * round(after / 100)
    return Length(False, before, after, after, reason)


def length_of_epochs(cfg: Config, images: int, batch: int, epochs: int) -> Length:
    """The length of a training of a given number of epochs."""
    reason = f'{amount(epochs, "epoch")}, as given'
    iterations = epochs * math.ceil(images / batch)
    if 'max_epochs' in cfg.train_cfg:
        return Length(True, cfg.train_cfg.max_epochs, epochs, iterations, reason)
    return Length(False, cfg.train_cfg.max_iters, iterations, iterations, reason)


def adapted_scheduler(scheduler: dict, length: Length, lr_factor: float) -> dict:
    """A scheduler of a base for a training of another length. What counts iterations in a training
    by epochs, as warm-ups do, is kept as far as the training is long enough."""
    scheduler = deepcopy(dict(scheduler))
    if scheduler.get('by_epoch', True) == length.by_epoch:
        after = scheduler | scale_counts(scheduler, length.factor)
        if str(scheduler.get('type')).startswith('Exponential'):
            after['gamma'] = scheduler['gamma'] ** (1 / length.factor)
    else:
        most = max(length.iterations // WARM_UP, 1)
        after = {
            key: min(value, most) if key in COUNTS and isinstance(value, int) else value
            for key, value in scheduler.items()
        }
    if after.get('eta_max'):
        after['eta_max'] = float(f'{after["eta_max"] * lr_factor:.3g}')
    return after


def has_steps(scheduler: dict) -> bool:
    """Whether a scheduler ends after it begins; mmengine builds no other."""
    return scheduler.get('end', math.inf) > scheduler.get('begin', 0)


def scale_counts(settings: dict, factor: float) -> dict[str, Any]:
    """The settings that count epochs or iterations, for a training that is `factor` as long."""
    return {key: scale_count(settings[key], factor) for key in COUNTS if settings.get(key)}


def scale_count(count: Any, factor: float) -> Any:
    """A count, or all counts in a list. 0, infinity and -1, which means never, are kept; others are
    at least 1."""
    if isinstance(count, (list, tuple)):
        return [scale_count(inner, factor) for inner in count]
    if count <= 0 or count == math.inf:
        return count
    return max(round(count * factor), 1)


def has_fixed_input(cfg: Config) -> bool:
    """Whether a recipe makes inputs of one size, which several transforms and the model rely on: it
    joins images (`img_scale` of Mosaic), pads them to a size, or resizes without their aspect
    ratio."""
    loader = cfg.get('train_dataloader') or {'dataset': {}}
    outer = loader['dataset'].get('pipeline')
    for step in transforms_in([pipeline_of(cfg, 'train'), outer]):
        if step.get('img_scale') or kind_of(step) == 'Pad' and step.get('size'):
            return True
        if kind_of(step) == 'Resize' and scales_of(step) and not keeps_ratio(step):
            return True
    return False


def first_scale(pipeline: list) -> tuple[float, ...]:
    """The scale of the first transform of a pipeline that has one; () if none has."""
    for step in transforms_in(pipeline):
        for scale in scales_of(step):
            return scale
    return ()
