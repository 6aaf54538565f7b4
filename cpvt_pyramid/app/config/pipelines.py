"""The data pipelines of a config: which transforms load images and annotations, how they resize.

A pipeline is a list of transforms. Some of them hold others, as RandomChoice and TestTimeAug do.
"""

import re
from collections.abc import Iterator
from typing import Any, Optional

from mmengine.config import Config

from .parts import kind_of, leaves


def pipeline_of(cfg: Config, split: str) -> list[dict]:
    """The pipeline of a split, which is that of its first innermost data set; empty if the config
    has none."""
    loader = cfg.get(f'{split}_dataloader')
    if not loader:
        return []
    return next(leaves(loader['dataset'])).get('pipeline') or []


def transforms_in(pipeline: Any) -> Iterator[dict]:
    """The transforms of a pipeline, also those inside others."""
    if isinstance(pipeline, dict):
        yield pipeline
        pipeline = list(pipeline.values())
    if isinstance(pipeline, (list, tuple)):
        for inner in pipeline:
            yield from transforms_in(inner)


# Loading


def loads_image(transform: dict) -> bool:
    return kind_of(transform).endswith(('LoadImageFromFile', 'LoadBands'))


def loads_annotations(transform: dict) -> bool:
    return re.search(r'Load\w*Annotations?$', kind_of(transform)) is not None


def loaded_bands(pipeline: Any) -> Optional[tuple[int, ...]]:
    """The bands that a pipeline loads; None if it loads RGB."""
    for transform in transforms_in(pipeline):
        if kind_of(transform).endswith('LoadBands'):
            return tuple(transform['bands'])
    return None


# Resizing


def scales_of(transform: dict) -> list[tuple[float, float]]:
    """The scales to which a transform resizes, as (longer side, shorter side); several if it
    chooses one of them, none if it does not resize or only by a factor."""
    choices = transform.get('scale') or transform.get('scales')
    if not isinstance(choices, (list, tuple)):
        choices = [choices]
    elif isinstance(choices[0], (int, float)) and not isinstance(transform.get('scales'), list):
        choices = [choices]  # the two sides of one
    found = []
    for scale in choices:
        if isinstance(scale, int):  # both sides; of ResizeShortestEdge, the shorter one
            scale = (transform.get('max_size') or scale, scale)
        if isinstance(scale, (list, tuple)):
            found.append((max(scale), min(scale)))
    return found


def keeps_ratio(transform: dict) -> bool:
    """Whether a transform that resizes images keeps their aspect ratio."""
    kinds = kind_of(transform), kind_of({'type': transform.get('resize_type')})
    return 'ResizeShortestEdge' in kinds or bool(transform.get('keep_ratio'))


def keeps_size(transform: dict) -> bool:
    """Whether a transform is a Resize that explicitly leaves each image as it is."""
    factors = transform.get('scale_factor')
    if not isinstance(factors, (list, tuple)):
        factors = [factors]
    is_resize = kind_of(transform).endswith('Resize')
    return is_resize and not transform.get('scale') and all(factor == 1 for factor in factors)
