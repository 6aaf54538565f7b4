"""The names of the metrics that an evaluation computes, before it has computed them."""

from typing import Any, Optional

from mmengine.config import Config
from mmengine.hooks import CheckpointHook

from ..tooling.command import UserError
from .parts import as_list, kind_of

AP = 'mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l'
AR = 'AR@100', 'AR@300', 'AR@1000', 'AR_s@1000', 'AR_m@1000', 'AR_l@1000'
SEGMENTATION = {
    'mIoU': ('mIoU', 'mAcc'),
    'mDice': ('mDice', 'mAcc'),
    'mFscore': ('mFscore', 'mPrecision', 'mRecall'),
}


def metric_names(cfg: Config, split: str) -> Optional[list[str]]:
    """The names of the metrics of a split, in their order; None if they are not known, as those of
    metrics by users are not, and of loops other than mmengine's, which can change names."""
    if kind_of(cfg.get(f'{split}_cfg') or {}) not in ('', 'ValLoop', 'TestLoop'):
        return None
    names = []
    for metric in as_list(cfg.get(f'{split}_evaluator')):
        found = NAMES[kind_of(metric)](metric) if kind_of(metric) in NAMES else None
        if found is None:
            return None
        prefix = metric.get('prefix') or PREFIXES.get(kind_of(metric))
        names += [f'{prefix}/{name}' if prefix else name for name in found]
    return list(dict.fromkeys(names))


def names_of_iou(metric: dict) -> list[str]:
    names = ['aAcc']
    for each in as_list(metric.get('iou_metrics', 'mIoU')):
        names += SEGMENTATION.get(each, ())
    return [] if metric.get('format_only') else names


def names_of_coco(metric: dict) -> Optional[list[str]]:
    if metric.get('format_only'):
        return []
    if metric.get('classwise'):  # a name for each class
        return None
    items = metric.get('metric_items')
    names: list[str] = []
    for kind in as_list(metric.get('metric', 'bbox')):
        if kind in ('bbox', 'segm'):
            names += [f'{kind}_{item}' for item in items or AP]
        elif kind == 'proposal':
            names += items or AR
        else:
            names += [f'AR@{count}' for count in metric.get('proposal_nums', (100, 300, 1000))]
    return names


def names_of_voc(metric: dict) -> list[str]:
    thresholds = as_list(metric.get('iou_thrs', 0.5))
    if as_list(metric.get('metric', 'mAP')) == ['mAP']:
        return ['mAP', *(f'AP{int(threshold * 100):02d}' for threshold in thresholds)]
    counts = metric.get('proposal_nums', (100, 300, 1000))
    names = [f'recall@{count}@{threshold}' for count in counts for threshold in thresholds]
    return names + [f'AR@{count}' for count in counts if len(thresholds) > 1]


NAMES: dict[str, Any] = {
    'IoUMetric': names_of_iou,
    'CocoMetric': names_of_coco,
    'VOCMetric': names_of_voc,
}
PREFIXES = {'CocoMetric': 'coco', 'VOCMetric': 'pascal_voc'}


def check_monitored(cfg: Config) -> None:
    """Check that the metrics are computed by which hooks choose the best checkpoint or stop, and
    schedules lower the learning rate."""
    names = metric_names(cfg, 'val')
    if not names:
        return
    for path, hook in hooks_in(cfg):
        if kind_of(hook) == 'EarlyStoppingHook':
            check_name(f'{path}.monitor', hook.get('monitor'), names)
        if kind_of(hook).endswith('CheckpointHook'):
            for name in as_list(hook.get('save_best')):
                if name == 'auto':
                    check_rule(path, hook, names[0])
                else:
                    check_name(f'{path}.save_best', name, names)
    for index, schedule in enumerate(as_list(cfg.get('param_scheduler'))):
        if kind_of(schedule).startswith('ReduceOnPlateau') and schedule.get('by_epoch', True):
            check_name(f'param_scheduler.{index}.monitor', schedule.get('monitor', 'loss'), names)


def hooks_in(cfg: Config) -> list[tuple[str, dict]]:
    """The hooks of a config, with their paths as in --cfg-options."""
    found = [
        (f'default_hooks.{key}', hook) for key, hook in (cfg.get('default_hooks') or {}).items()
    ]
    found += [
        (f'custom_hooks.{index}', hook) for index, hook in enumerate(cfg.get('custom_hooks') or ())
    ]
    return [(path, hook) for path, hook in found if isinstance(hook, dict)]


def check_name(setting: str, name: Any, names: list[str]) -> None:
    if name not in names:
        raise UserError(
            f'{setting} must be a metric that the evaluation computes, got {name!r}; it computes '
            f'{", ".join(names)}'
        )


def check_rule(path: str, hook: dict, name: str) -> None:
    """Check that mmengine knows whether the metric that it chooses itself should be high or low."""
    options = {key: hook.get(key) for key in ('rule', 'greater_keys', 'less_keys')}
    try:
        CheckpointHook(save_best=name, **options)
    except ValueError:
        raise UserError(
            f"{path}.save_best='auto' takes {name}; set {path}.rule to 'greater' or 'less'"
        ) from None
