"""What is written for an image."""

import numpy as np
from pycocotools import mask as coco

from cpvt_pyramid.results.predictions import Detections
from cpvt_pyramid.results.records import mask_of


def test_masks_are_run_lengths_as_pycocotools_writes_them() -> None:
    random = np.random.default_rng(0)
    for height, width in ((1, 1), (3, 3), (1, 500), (90, 130), (700, 900)):
        masks = np.stack([
            np.zeros((height, width), bool),
            np.ones((height, width), bool),
            random.random((height, width)) < 0.5,
            np.add.outer(np.arange(height), np.arange(width)) % 17 < 9,
        ])  # fmt: skip
        count = len(masks)
        records = found(np.ones((count, 4)), np.ones(count), np.zeros(count, int), masks)
        for record, mask in zip(records, masks):
            expected = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
            assert record['mask'] == {**expected, 'counts': expected['counts'].decode()}
            np.testing.assert_array_equal(mask_of(record['mask']), mask)
    (record,) = found(np.array([[1, 2, 3, 4.001]]), np.array([0.5]), np.array([0]))
    assert record == {'box': [1.0, 2.0, 3.0, 4.0], 'label': 0, 'class': 'a', 'score': 0.5}


def found(*arrays: np.ndarray) -> list[dict]:
    return Detections(np.zeros((1, 1, 3), np.uint8), ['a'], [(0, 0, 0)], *arrays).records()
