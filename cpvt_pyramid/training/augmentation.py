"""Test-time augmentation: predictions at several sizes, flipped and not, are merged."""

from collections.abc import Sequence
from typing import Any

from mmengine.config import Config

from ..config.parts import data_of, kind_of
from ..tooling.command import UserError

TTA_SCALES = (0.75, 1.0, 1.25)  # relative to the test pipeline
TTA_MODELS: dict[str, dict] = {
    'mmdet': {
        'type': 'DetTTAModel',
        'tta_cfg': {'nms': {'type': 'nms', 'iou_threshold': 0.5}, 'max_per_img': 100},
    },
    'mmseg': {'type': 'SegTTAModel'},
}


def augment(cfg: Config) -> None:
    """Wrap the model and the test pipeline of a config for test-time augmentation."""
    wrapper: dict = cfg.get('tta_model') or TTA_MODELS[cfg.default_scope]
    if kind_of(wrapper) == 'DetTTAModel' and has_masks(cfg.model):
        raise UserError('--tta merges boxes, and mmdet cannot merge masks: test without --tta')
    cfg.model = {**wrapper, 'module': cfg.model}
    for dataset in data_of(cfg, 'test'):
        dataset['pipeline'] = cfg.get('tta_pipeline') or augmented(dataset['pipeline'])


def has_masks(model: dict) -> bool:
    heads = {**model, **(model.get('roi_head') or {})}
    return bool(heads.get('mask_head') or heads.get('panoptic_head'))


def augmented(pipeline: Sequence[dict]) -> list[dict]:
    """The test pipeline at 3 sizes, each flipped and not."""
    kinds = [kind_of(step) for step in pipeline]
    if 'Resize' not in kinds:
        raise no_scale(None)
    place = kinds.index('Resize')
    resize = pipeline[place]
    sizes = [{**resize, 'scale': scale} for scale in tta_scales(resize.get('scale'))]
    flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (0.0, 1.0)]
    # The default `meta_keys` include what undoes the flip; those of a test pipeline may not.
    rest = [
        {key: value for key, value in step.items() if key != 'meta_keys'}
        for step in pipeline[place + 1 :]
    ]
    alternatives = [sizes, flips, *([step] for step in rest)]
    return [*pipeline[:place], {'type': 'TestTimeAug', 'transforms': alternatives}]


def tta_scales(scale: Any) -> list[tuple[int, int]]:
    """The (width, height) of the augmented images, from the scale of the pipeline."""
    width, height = scale if is_pair(scale) else (scale, scale)
    if not all(isinstance(side, (int, float)) for side in (width, height)):
        raise no_scale(scale)
    return [(round(factor * width), round(factor * height)) for factor in TTA_SCALES]


def is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2


def no_scale(scale: Any) -> UserError:
    return UserError(
        '--tta needs tta_pipeline, or a Resize in the test pipeline with a scale of numbers, '
        f'got {scale!r}'
    )
