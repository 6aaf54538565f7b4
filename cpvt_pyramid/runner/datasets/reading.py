"""Reading what a data set holds: annotations, label maps, and images to draw on."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.registry import TRANSFORMS
from pycocotools.coco import COCO

from ...mm.bands import opened, read_bands
from ...tooling.command import UserError
from ..configs import dataset_class, kind_of
from ..inference.bands import size_of_raster
from ..inference.prediction import read_image
from ..inference.raster import ReadError, picture


def indexed_coco(content: dict[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = content
    with redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def label_map_reader(dataset: dict, scope: str) -> tuple[dict[Path, dict], Any]:
    """What a data set lists for each image, and a function that reads a label map for the test."""
    if 'BaseSegDataset' not in {base.__name__ for base in dataset_class(dataset, scope).__mro__}:
        raise UserError(f'the test data must be a BaseSegDataset, got {kind_of(dataset)}')
    kind = dataset_class(dataset, scope)
    config = {k: v for k, v in dataset.items() if k not in ('type', 'pipeline')}
    built = kind(**{**config, 'pipeline': [], 'lazy_init': True, 'serialize_data': False})
    default = {'type': 'LoadAnnotations', 'reduce_zero_label': built.reduce_zero_label}
    steps = (step for step in dataset.pipeline if kind_of(step).endswith('LoadAnnotations'))
    with TRANSFORMS.switch_scope_and_registry(scope) as registry:
        load = registry.build(next(steps, default))

    def read(info: dict) -> np.ndarray:
        return load({**info, 'seg_fields': []})['gt_seg_map']

    return {Path(info['img_path']).resolve(): info for info in built.load_data_list()}, read


def shown_image(path: Path) -> np.ndarray:
    """An image (H, W, 3) RGB uint8 to draw on; of another TIFF, its first bands.

    Raises:
        ReadError: not a complete image.
    """
    try:
        image = read_image(path)
    except ReadError:
        if size_of_raster(path) is None:
            raise
        with opened(path) as file:
            bands = file.indexes[:3]
        image = picture(read_bands(path, bands)[0])
    return np.ascontiguousarray(image[..., ::-1])
