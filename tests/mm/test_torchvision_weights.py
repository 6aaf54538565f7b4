"""mm's checkpoints in torchvision's models: the same boxes and logits. And the training example."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from mmdet.structures import DetDataSample
from support import ROOT, assert_loaded

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.predict.openmmlab.models import build_model
from cpvt_pyramid.torchvision_models import load_mm_weights, retinanet, semantic_fpn


def mm_model(commands: list[str]) -> torch.nn.Module:
    """The model of a config and checkpoint, in evaluation mode."""
    config, checkpoint = map(str, commands)
    model = build_model(load_config(config), 'cpu')
    model.load_state_dict(torch.load(checkpoint, weights_only=True)['state_dict'])
    return model.eval()


@torch.no_grad()
def test_retinanet_predicts_what_mms_does(untrained):
    theirs = mm_model(untrained['detector'])
    # Sizes at which neither resizes. One is padded to a multiple of 32. For mm each is alone,
    # because it pads the images of a batch to one size.
    images = [torch.randint(256, (3, *size), dtype=torch.uint8) for size in ((64, 90), (96, 64))]
    expected = []
    for image in images:
        sample = DetDataSample(metainfo=dict(img_shape=image.shape[1:]))
        data = dict(inputs=[image.flip(0)], data_samples=[sample])  # BGR
        data = theirs.data_preprocessor(data, False)
        expected += theirs.predict(data['inputs'], data['data_samples'], rescale=False)

    ours = retinanet(
        'pcpvt_nano',
        num_classes=10,
        out_channels=16,
        head_convs=1,
        min_size=64,
        max_size=96,
        score_thresh=0.001,
        detections_per_img=100,
    ).eval()
    load_mm_weights(ours, untrained['detector'][1])
    for found, sample in zip(ours([image / 255 for image in images]), expected):
        instances = sample.pred_instances
        assert len(instances) > 50
        assert torch.equal(found['labels'], instances.labels)
        torch.testing.assert_close(found['boxes'], instances.bboxes, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(found['scores'], instances.scores, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_semantic_fpn_predicts_what_mms_does(untrained):
    theirs, image = mm_model(untrained['segmentor']), torch.randn(2, 3, 64, 96)
    ours = semantic_fpn('pcpvt_nano', num_classes=11, out_channels=16, head_channels=16).eval()
    load_mm_weights(ours, untrained['segmentor'][1])
    expected = theirs.encode_decode(image, [dict(img_shape=(64, 96))] * 2)
    torch.testing.assert_close(ours(image)['out'], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    'sizes, message',
    [
        (dict(head_convs=2), 'lacks: head.classification_head.conv.1.0.weight'),
        (dict(head_convs=1, num_classes=9), 'has other shapes: head.classification_head.cls_log'),
    ],
)
def test_other_sizes_are_refused_and_nothing_is_loaded(untrained, sizes, message):
    model = retinanet('pcpvt_nano', **dict(num_classes=10, out_channels=16) | sizes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f'{message}.*Build the model with the sizes of its conf'):
        load_mm_weights(model, untrained['detector'][1])
    assert_loaded(model, before)


def test_the_page_about_torchvision(tmp_path, monkeypatch):
    """Its code, with the smallest backbone and small images."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / 'docs/torchvision.md').read_text().replace('pcpvt_small', 'pcpvt_nano')
    first, of_mm = re.findall(r'```python\n(.*?)```', page, re.S)
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'pcpvt_nano.pth')
    monkeypatch.setattr(
        'cpvt_pyramid.checkpoints.downloads.from_hub', lambda *_: Path('pcpvt_nano.pth')
    )
    target = dict(boxes=torch.tensor([[2.0, 3, 40, 50]]), labels=torch.tensor([1]))
    names = dict(images=[torch.rand(3, 60, 70), torch.rand(3, 70, 50)], targets=[target] * 2)
    small = 'num_classes=10, out_channels=16, head_convs=1, min_size=40, max_size=50'
    exec(first.replace('num_classes=10', small), names)
    assert set(names['losses']) == {'classification', 'bbox_regression'}
    assert set(names['predictions'][1]) == {'boxes', 'scores', 'labels'}

    cfg = load_config(str(ROOT / 'configs/retinanet_cpvt_s.py'))
    cfg.model.backbone.update(arch='pcpvt_nano', init_cfg=None)
    cfg.model.neck.in_channels = [32, 64, 128, 192]
    trained = build_model(cfg, 'cpu')
    checkpoint = tmp_path / 'work_dirs/retinanet_cpvt_s/epoch_12.pth'
    checkpoint.parent.mkdir(parents=True)
    torch.save(dict(state_dict=trained.state_dict()), checkpoint)
    exec(of_mm, names)
    loaded = names['model'].head.regression_head.bbox_reg.weight
    assert torch.equal(loaded, trained.bbox_head.retina_reg.weight)


def test_the_example_trains_and_evaluates(sample_dataset, tmp_path, monkeypatch, capsys):
    path, root = str(ROOT / 'examples/torchvision_detection.py'), str(sample_dataset / 'coco')
    out = tmp_path / 'model.pth'
    arguments = [path, '--data', root, '--splits', 'train2017', 'val2017']
    arguments += ['--steps', '1', '--out', str(out)]
    monkeypatch.setattr(sys, 'argv', arguments)
    runpy.run_path(path, run_name='__main__')
    assert 'no boxes found' in capsys.readouterr().out
    assert out.is_file()

    example = runpy.run_path(path)
    data = example['CocoFolder'](root, 'val2017')
    answers = (
        target | dict(scores=torch.ones(len(target['boxes'])))
        for _, target in (data[i] for i in range(len(data)))
    )
    example['evaluate'](lambda images: [next(answers) for _ in images], data)
    assert 'area=   all | maxDets=100 ] = 1.000' in capsys.readouterr().out
