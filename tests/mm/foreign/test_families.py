"""The contract that detectors and segmentors with our backbone pass, whatever their neck and head.

They are the configs of the mm packages, see tests/models/families.py. `make test` tries some,
`make test-foreign` all.
"""

import pytest
import torch
from family_results import assert_same, results
from support import ORIGINAL_MM

from benchmarks import family_drift
from tests.models.families import (
    DETECTORS,
    FAMILIES,
    SEGMENTORS,
    Drift,
    batch,
    build,
    distance,
    drift,
    made_contiguous,
)

# One of each kind of neck and head, and quick. DyHead takes 8 seconds; VFNet has deformable
# convolutions, too.
QUICK = (
    'RetinaNet',
    'FCOS',
    'VFNet',
    'HRFPN',
    'CornerNet',
    'Mask R-CNN',
    'Sparse R-CNN',
    'DINO',
    'Mask2Former',
    'UPerNet',
    'OCRNet',
    'DeepLabV3+',
)
FOREIGN = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.foreign) for name in FAMILIES
]
STATED = family_drift.read_page(family_drift.PAGE.read_text())


@pytest.mark.parametrize('name', FOREIGN)
def test_family(name):
    if name == 'DINO' and ORIGINAL_MM:
        pytest.skip("mmdet 3.3's decoder of DINO takes 256 channels only, here are fewer")
    family = FAMILIES[name]
    model = build(family)
    for padded in (False, True):
        data = batch(family, model, padded=padded)
        with torch.no_grad():
            assert all(x.is_contiguous() for x in model.backbone(data['inputs']))
        ours = results(model, data)
        with made_contiguous(model):
            assert_same(ours, results(model, data))

    # Rounding differs with the processor and the number of threads, and heads amplify it: a drift
    # may be half as large again as stated, and is no drift below the limit of the invariant ones.
    for part, measured, stated in zip(Drift._fields, drift(family, model), STATED[name]):
        assert measured <= max(1.5 * stated, family_drift.INVARIANT), part
    of_one_size = drift(family, model, one_size=True)
    if max(of_one_size) >= family_drift.INVARIANT:
        # Of rounding, whose size is that of the processor's, nothing is left in double precision.
        of_one_size = drift(family, model.double(), one_size=True)
    assert max(of_one_size) < family_drift.INVARIANT


def test_the_page_lists_all_families(capsys):
    assert list(STATED) == list(FAMILIES)
    assert len(DETECTORS) >= 40 and len(SEGMENTORS) >= 20
    assert all(one_size < family_drift.INVARIANT for *_, one_size in STATED.values())
    assert family_drift.main(['--families', 'YOLOv9']) == 2
    assert "unknown family 'YOLOv9'; choose from RetinaNet; " in capsys.readouterr().err


@pytest.mark.parametrize('channels_last', [False, True])
def test_drift_is_measured_inside_the_image(channels_last):
    """An image of 40 x 70 pixels in maps at stride 16: 3 x 5 cells, alone and in a batch of two."""
    alone, joint = torch.ones(1, 7, 4, 6), torch.ones(2, 7, 8, 8)
    joint[1] = joint[0, :, 3:] = joint[0, :, :, 5:] = 9
    joint[0, :, 2, 4] = 1.5
    if channels_last:  # the shapes, as of YOLACT's prototypes
        alone, joint = alone.permute(0, 2, 3, 1), joint.permute(0, 2, 3, 1)
    sizes = (40, 70), (64, 96), (128, 128)
    assert distance(alone, joint, *sizes) == pytest.approx(0.5)
    assert distance(alone, alone.expand(2, -1, -1, -1), *sizes) == 0
    # Queries: of layers, images, queries and channels.
    queries = torch.ones(3, 1, 5, 4)
    changed = torch.cat([queries, 9 * queries], dim=1)
    assert distance(queries, changed, *sizes) == 0
    changed[2, 0, 4] = 3
    assert distance(queries, changed, *sizes) == pytest.approx(2)
