"""The shipped DINO finds the same boxes in an image alone and in any batch."""

import torch
from mmdet.models.detectors import DINO
from models.samples import annotated, random_images
from models.small import dino
from torch import Tensor, nn


def found(model: nn.Module, batch: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Boxes and scores of each image."""
    samples = [annotated(False, image.shape[1:]) for image in batch]
    data = model.data_preprocessor(dict(inputs=batch, data_samples=samples))
    with torch.no_grad():
        results = model.predict(data['inputs'], data['data_samples'], rescale=False)
    return [(r.pred_instances.bboxes, r.pred_instances.scores) for r in results]


def test_boxes_do_not_depend_on_the_batch():
    """As they do in mmdet's own, which is the same without padding."""
    # Among the proposals that become queries is no padding with these weights; see ValidRegionDINO.
    ours, theirs = dino(), dino(kind='DINO')
    assert type(theirs) is DINO and ours.state_dict().keys() == theirs.state_dict().keys()
    images = random_images(((96, 128), (130, 70), (75, 190)))
    for image, (boxes, scores) in zip(images, found(ours, images)):
        ((own_boxes, own_scores),) = found(ours, [image])
        torch.testing.assert_close(scores, own_scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(boxes, own_boxes, rtol=1e-4, atol=1e-2)  # of 190 pixels
    (_, scores), *_ = found(theirs, images)
    ((_, own_scores),) = found(theirs, images[:1])
    assert (scores - own_scores).abs().max() > 1e-4

    equal = random_images([(128, 160)] * 2)
    torch.testing.assert_close(found(ours, equal), found(theirs, equal))
