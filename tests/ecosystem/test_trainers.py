"""The examples that train with Lightning and torchgeo, on tiny data."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from rasterio.transform import from_origin
from support import ROOT, save_tiff

from cpvt_pyramid.tasks.trained import TRAINED, build_trained


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for the logs

    def run_example(name: str, *arguments: str) -> dict:
        path = str(ROOT / 'examples' / name)
        monkeypatch.setattr(sys, 'argv', [path, *arguments])
        return runpy.run_path(path, run_name='__main__')

    return run_example


def test_lightning(run, pages_dataset, capsys):
    data = pages_dataset
    names = run('lightning_segmentation.py', '--data', str(data), '--epochs', '1')
    saved = torch.load('segmentor.ckpt', weights_only=True)
    assert saved['global_step'] == 1
    segmentor = names['Segmentor'](**saved['hyper_parameters']).eval()
    segmentor.load_state_dict(saved['state_dict'])
    images, sizes, labels = names['padded']([names['MaskFolder'](data, 'train')[i] for i in (0, 1)])
    assert images.shape[2:] == labels.shape[1:] and (labels == names['IGNORED']).any()
    (height, width), model = sizes[1].tolist(), segmentor.model
    with torch.no_grad():
        maps = model.backbone(images, sizes)
        images[1, :, height:] = 1  # what is in the padding
        images[1, :, :, width:] = 1
        assert images[1].unique().numel() > 2
        torch.testing.assert_close(model.backbone(images, sizes), maps)


def write_label_maps(root: Path, train: int, val: int) -> None:
    """Write small images of noise and their label maps, of 6 classes, as the example reads them."""
    rng = np.random.default_rng(0)
    for split, count in (('train', train), ('val', val)):
        images, labels = root / split, root / 'masks' / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(256, size=(96, 128, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / f'{i}.png')
            Image.fromarray(pixels[..., 0] % 6).save(labels / f'{i}.png')


def test_lightning_starts_from_a_trained_model(run, tmp_path):
    name = 'segformer_b0_ade20k'
    torch.save(build_trained(TRAINED[name]).state_dict(), 'ade20k.pth')
    write_label_maps(tmp_path / 'data', train=8, val=1)
    run(
        'lightning_segmentation.py',
        '--data',
        'data',
        '--epochs',
        '1',
        '--trained',
        name,
        'ade20k.pth',
    )
    saved = torch.load('segmentor.ckpt', weights_only=True)['state_dict']
    assert saved['model.decode_head.conv_seg.weight'].shape == (6, 256, 1, 1)


def test_torchgeo(run, tmp_path):
    from torchgeo.trainers import SemanticSegmentationTask  # takes seconds

    photograph = skimage.data.coffee()[:64, :80]
    labels = (photograph[..., 0] > 120).astype('uint8')
    place = dict(crs='EPSG:32632', transform=from_origin(500_000, 5_000_000, 0.5, 0.5))
    for split in ('train', 'val'):
        save_tiff(tmp_path / split / 'images/scene.tif', photograph, **place)
        save_tiff(tmp_path / split / 'labels/scene.tif', labels, nodata=255, **place)
    run(
        'torchgeo_segmentation.py',
        str(tmp_path),
        '--num-classes',
        '2',
        '--arch',
        'pcpvt_nano',
        '--size',
        '64',
        '--tiles',
        '4',
        '--batch-size',
        '2',
        '--epochs',
        '1',
    )
    saved = torch.load('torchgeo.ckpt', weights_only=False)
    assert saved['global_step'] == 2
    task = SemanticSegmentationTask(**saved['hyper_parameters']).eval()
    task.load_state_dict(saved['state_dict'])
    with torch.no_grad():
        assert task(torch.rand(1, 3, 64, 96)).shape == (1, 2, 64, 96)
    with pytest.raises(ValueError, match='output_stride must be 32.*encoder_depth'):
        SemanticSegmentationTask('deeplabv3+', 'tu-pcpvt_nano', num_classes=2)
