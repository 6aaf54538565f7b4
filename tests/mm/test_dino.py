"""The shipped DINO finds the same boxes in an image alone and in any batch."""

import torch
from mmdet.models.detectors import DINO
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from models.ports import randomize
from models.samples import annotated, random_images
from support import ROOT
from torch import Tensor, nn

SIZES = ((96, 128), (130, 70), (75, 190))


def small_dino(kind: str) -> nn.Module:
    cfg = Config.fromfile(ROOT / 'configs/dino_cpvt_s.py')
    init_default_scope('mmdet')
    import cpvt_pyramid.mm.detection  # noqa: F401 registers the classes

    model = cfg.model
    assert model.type == 'ValidRegionDINO'
    model.type, model.num_queries, model.bbox_head.num_classes = kind, 30, 7
    model.backbone.update(arch='pcpvt_nano', init_cfg=None)
    model.neck.in_channels = [64, 128, 192]
    model.encoder.num_layers, model.decoder.num_layers = 1, 2
    model.test_cfg.max_per_img = 50
    # Among the proposals that become queries is no padding with these weights; see ValidRegionDINO.
    return randomize(MODELS.build(model), seed=1).eval()


def found(model: nn.Module, batch: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Boxes and scores of each image."""
    samples = [annotated(False, image.shape[1:]) for image in batch]
    data = model.data_preprocessor(dict(inputs=batch, data_samples=samples))
    with torch.no_grad():
        results = model.predict(data['inputs'], data['data_samples'], rescale=False)
    return [(r.pred_instances.bboxes, r.pred_instances.scores) for r in results]


def test_boxes_do_not_depend_on_the_batch():
    """As they do in mmdet's own."""
    ours, theirs = small_dino('ValidRegionDINO'), small_dino('DINO')
    images = random_images(SIZES)
    for image, (boxes, scores) in zip(images, found(ours, images)):
        ((own_boxes, own_scores),) = found(ours, [image])
        torch.testing.assert_close(scores, own_scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(boxes, own_boxes, rtol=1e-4, atol=1e-2)  # of 190 pixels
    (_, scores), *_ = found(theirs, images)
    ((_, own_scores),) = found(theirs, images[:1])
    assert (scores - own_scores).abs().max() > 1e-4


def test_it_is_mmdets_without_padding():
    ours, theirs = small_dino('ValidRegionDINO'), small_dino('DINO')
    assert type(theirs) is DINO and ours.state_dict().keys() == theirs.state_dict().keys()
    image = torch.randint(0, 256, (3, 128, 160), dtype=torch.uint8)
    for (boxes, scores), (expected_boxes, expected_scores) in zip(
        found(ours, [image, image]), found(theirs, [image, image])
    ):
        torch.testing.assert_close(boxes, expected_boxes)
        torch.testing.assert_close(scores, expected_scores)
