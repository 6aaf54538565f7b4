"""What the transforms of a config's pipelines do, also of those inside others."""

from pathlib import Path

import numpy as np
import pytest
import rasterio
from mmengine.config import Config
from PIL import Image

import cpvt_pyramid.app.data.bands  # noqa: F401 (it registers classes)
from cpvt_pyramid.app.config.pipelines import (
    keeps_ratio,
    keeps_size,
    loaded_bands,
    loads_annotations,
    loads_image,
    pipeline_of,
    scales_of,
)
from cpvt_pyramid.app.data.config_data import mask_reader, needs_masks
from cpvt_pyramid.app.data.recipes import Scales, has_fixed_input
from cpvt_pyramid.app.predict.openmmlab.model import image_pipeline
from cpvt_pyramid.app.tooling.command import UserError

SHORT_EDGES = dict(
    type='RandomChoiceResize',
    resize_type='ResizeShortestEdge',
    scales=[320, 640],
    max_size=2048,
)
RANGE = dict(type='RandomResize', scale=[(1333, 640), (1333, 800)], keep_ratio=True)


@pytest.mark.parametrize(
    'transform, scales, ratio',
    [
        (dict(type='Resize', scale=(1333, 800), keep_ratio=True), [(1333, 800)], True),
        (dict(type='mmdet.Resize', scale=(800, 1333)), [(1333, 800)], False),
        (dict(type='Resize', scale=640, keep_ratio=True), [(640, 640)], True),
        (dict(type='Resize', scale=0.5, keep_ratio=True), [], True),
        (dict(type='Resize', scale_factor=2), [], False),
        (dict(type='ResizeShortestEdge', scale=512, max_size=2048), [(2048, 512)], True),
        (RANGE, [(1333, 640), (1333, 800)], True),
        (dict(type='RandomResize', scale=(640, 640)), [(640, 640)], False),
        (dict(type='RandomChoiceResize', scales=[(9, 4), (4, 8)]), [(9, 4), (8, 4)], False),
        (dict(type='RandomChoiceResize', scales=(9, 4)), [(9, 4)], False),
        (SHORT_EDGES, [(2048, 320), (2048, 640)], True),
        (dict(type='RandomFlip', prob=0.5), [], False),
    ],
    ids=str,
)
def test_scales(transform, scales, ratio):
    assert scales_of(transform) == scales
    assert keeps_ratio(transform) == ratio


def test_images_that_keep_their_size():
    for factor in (1, 1.0, (1, 1.0), [1.0, 1.0]):
        assert keeps_size(dict(type='Resize', scale_factor=factor))
    for settings in (dict(scale_factor=(1, 2)), dict(scale=(8, 8)), {}):
        assert not keeps_size(dict(type='Resize', **settings))
    assert not keeps_size(dict(type='RandomFlip', scale_factor=1))


def test_loading():
    bands = dict(type='LoadBands', bands=[4, 1])
    assert loaded_bands([dict(type='TransformBroadcaster', transforms=[bands])]) == (4, 1)
    assert loaded_bands([dict(type='LoadImageFromFile')]) is None
    for kind in ('LoadBands', 'mmdet.LoadImageFromFile'):
        assert loads_image(dict(type=kind)) and not loads_annotations(dict(type=kind))
    for kind in ('mmdet.LoadAnnotations', 'LoadTileAnnotations', 'LoadDepthAnnotation'):
        assert loads_annotations(dict(type=kind)) and not loads_image(dict(type=kind))


def test_pipeline_of_a_split():
    inner = dict(type='CocoDataset', pipeline=[dict(type='LoadBands')])
    loader = dict(dataset=dict(type='RepeatDataset', dataset=inner))
    cfg = Config(dict(train_dataloader=loader, val_dataloader=dict(dataset=dict(type='X'))))
    assert pipeline_of(cfg, 'train') == inner['pipeline']
    assert pipeline_of(cfg, 'val') == pipeline_of(cfg, 'test') == []


def test_masks_of_a_transform_inside_another():
    load = dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
    assert needs_masks(Config(), 'train', [dict(type='RandomApply', transforms=[load])])


def test_scales_of_a_recipe_that_trains_on_several():
    """Tests keep the size of images, so that the scale is that of training."""
    whole = dict(type='Resize', scale_factor=(1.0, 1.0))
    cfg = Config(
        {
            f'{split}_dataloader': dict(dataset=dict(pipeline=[step]))
            for split, step in (('train', RANGE), ('val', whole))
        }
    )
    scales = Scales.of(cfg, np.array([[320, 400]] * 3), 'detection')
    assert scales.before == (1333, 640) and scales.keeps_resolution
    assert scales.scale == pytest.approx(0.5)


def test_resizing_without_the_aspect_ratio_is_a_fixed_input():
    """mmcv's Resize has keep_ratio=False by default."""
    for more, is_fixed in (
        ({}, True),
        (dict(keep_ratio=False), True),
        (dict(keep_ratio=True), False),
    ):
        resize = dict(type='Resize', scale=(640, 640), **more)
        cfg = Config(dict(train_dataloader=dict(dataset=dict(pipeline=[resize]))))
        assert has_fixed_input(cfg) == is_fixed


@pytest.mark.parametrize('load', ['LoadAnnotations', 'LoadTileAnnotations'])
def test_a_report_reads_masks_as_test_time_augmentation_does(load, tmp_path, monkeypatch):
    """Its loading is inside TestTimeAug; the masks have a value for pixels without data."""
    monkeypatch.chdir(tmp_path)
    for name in ('images', 'masks'):
        Path(name).mkdir()
    Image.new('RGB', (4, 3)).save('images/a.tif')
    labels = np.array([[0, 1, 2, 9]] * 3, np.uint8)
    with rasterio.open(
        'masks/a.tif', 'w', driver='GTiff', width=4, height=3, count=1, dtype='uint8', nodata=9
    ) as file:
        file.write(labels, 1)
    step = dict(type=load, reduce_zero_label=True)
    tests = dict(type='TestTimeAug', transforms=[[dict(type='RandomFlip')], [step]])
    dataset = dict(
        type='BaseSegDataset',
        img_suffix='.tif',
        seg_map_suffix='.tif',
        reduce_zero_label=True,
        metainfo=dict(classes=('one', 'two')),
        data_prefix=dict(img_path='images', seg_map_path='masks'),
        pipeline=[dict(type='LoadImageFromFile'), tests],
    )
    infos, read = mask_reader(dataset, 'mmseg')
    ((_, info),) = infos.items()
    last = 8 if load == 'LoadAnnotations' else 255
    assert read(info).tolist() == [[255, 0, 1, last]] * 3


def test_prediction_refuses_several_inputs_of_an_image():
    """Its annotations, which are loaded inside, would be those of a file."""
    augmented = dict(type='TestTimeAug', transforms=[[dict(type='LoadAnnotations')]])
    loader = dict(dataset=dict(pipeline=[dict(type='LoadImageFromFile'), augmented]))
    with pytest.raises(UserError, match='one input of an image, got TestTimeAug; leave it in'):
        image_pipeline(Config(dict(test_dataloader=loader)))
