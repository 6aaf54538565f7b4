"""Images of other bands than RGB, from scenes to predictions in tiles."""

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Optional

import numpy as np
import pytest
import rasterio
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, TRANSFORMS
from PIL import Image
from rasterio.transform import from_origin
from support import ROOT, load_tool, photograph, save_tiff

from cpvt_pyramid.app.data.bands import LoadBands, LoadTileAnnotations
from cpvt_pyramid.app.data.config_data import check_dataset
from cpvt_pyramid.app.images.rasters import ReadError, read_bands, size_of_raster
from cpvt_pyramid.app.images.reading import picture
from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.predict.openmmlab.loading import build_model
from cpvt_pyramid.app.predict.openmmlab.model import OpenMMLabModel, image_pipeline

PAGE = (ROOT / 'docs/bands.md').read_text()
COMMANDS = re.findall(r'^cpvt .*$', PAGE, re.M)
NO_CLASSES = {'classes': (), 'palette': []}
CONFIG = 'configs/bands/semantic_fpn_cpvt_s.py'


def write(path: Path, image: np.ndarray, nodata: Optional[float] = None) -> Path:
    """A GeoTIFF of bands (N, h, w)."""
    place = dict(crs='EPSG:32633', transform=from_origin(500_000, 5_000_000, 10, 10))
    return save_tiff(path, np.moveaxis(image, 0, -1), nodata=nodata, **place)


def load_both(bands: LoadBands, image: Path, labels: Path, **more: object) -> dict:
    """What the pipeline makes of an image and its label map."""
    files = dict(img_path=image, seg_map_path=labels, seg_fields=[], reduce_zero_label=False)
    return LoadTileAnnotations()(bands({**files, **more}))


@pytest.fixture(scope='module')
def scenes(tmp_path_factory) -> Path:
    """Scenes of 16 bits, whose first band is 1000 + the label of the pixel."""
    root = tmp_path_factory.mktemp('bands')
    generator = np.random.default_rng(0)
    for split, sizes in (('train', [(90, 130), (70, 100)]), ('val', [(100, 75)])):
        for i, size in enumerate(sizes):
            labels = generator.integers(0, 4, size, np.uint8)
            bands = [labels.astype(int) + 1000, *generator.integers(1, 5000, (3, *size))]
            write(root / f'scenes/{split}/s{i}.tif', np.stack(bands).astype(np.uint16), nodata=0)
            write(root / f'labels/{split}/s{i}.tif', labels[None])
    return root


SETTINGS = {  # the example in small
    'model.backbone.arch': 'pcpvt_nano',
    'model.backbone.init_cfg': None,
    'model.neck.in_channels': [32, 64, 128, 192],
    'model.neck.out_channels': 16,
    'model.decode_head.in_channels': [16] * 4,
    'model.decode_head.channels': 16,
    'model.data_preprocessor.size': (64, 64),
    'model.test_cfg.crop_size': (64, 64),
    'model.test_cfg.stride': (48, 48),
    'train_cfg.max_iters': 2,
    'train_cfg.val_interval': 2,
    'default_hooks.checkpoint.interval': 2,
    'train_dataloader.dataset.pipeline.0.tile': (64, 64),
    'train_dataloader.batch_size': 2,
    **{f'{split}_dataloader.num_workers': 0 for split in ('train', 'val', 'test')},
    **{f'{split}_dataloader.persistent_workers': False for split in ('train', 'val', 'test')},
}
SMALL = ['--cfg-options', *(f'{k}={v}'.replace(' ', '') for k, v in SETTINGS.items())]


@pytest.mark.usefixtures('quick_training')
def test_commands_of_the_page(scenes, monkeypatch, tmp_path):
    """They run, on the example in small; tiles give the labels of the whole scene."""
    monkeypatch.setenv('BANDS_ROOT', str(scenes))
    work_dir = ('--work-dir', 'work_dirs/semantic_fpn_cpvt_s')
    for command in COMMANDS:
        _, tool, *words = shlex.split(command.replace('data/bands', str(scenes)))
        words = [str(ROOT / word) if word == CONFIG else word for word in words]
        words = [word.replace('iter_20000', 'iter_2') for word in words]
        name = tool.replace('-', '_')
        more = work_dir if name in ('train', 'test') else ()
        assert load_tool(name).main([*words, *more, *SMALL]) == 0
    assert {shlex.split(c)[1] for c in COMMANDS} == {'train', 'test', 'infer'}
    with rasterio.open(tmp_path / 'predictions/s0.labels.tif') as tiled:
        labels, place = tiled.read(1), tiled.transform
    assert place == from_origin(500_000, 5_000_000, 10, 10) and labels.shape == (100, 75)
    whole = [w for w in words if w not in ('--tile', '1024')]
    whole += ['--out-dir', 'whole', *SMALL]
    assert load_tool('infer').main(whole) == 0
    assert np.array_equal(np.array(Image.open(tmp_path / 'whole/s0.labels.png')), labels)
    with Image.open(tmp_path / 'predictions/s0.overlay.jpg') as overlay:
        assert overlay.mode == 'RGB'


def test_a_tile_and_its_labels_are_the_same_part(scenes):
    path, labels = (scenes / kind / 'train/s0.tif' for kind in ('scenes', 'labels'))
    whole, places = read_bands(path, [1, 2, 3, 4]), set()
    for _ in range(20):
        results = load_both(LoadBands([3, 1], tile=(40, 50)), path, labels)
        rows, columns = results['part'][1]
        places.add((rows, columns))
        expected = whole[slice(*rows), slice(*columns)][..., [2, 0]]
        assert np.array_equal(results['img'], expected) and results['img'].dtype == np.float32
        assert results['img_shape'] == results['gt_seg_map'].shape == (40, 50)
        assert np.array_equal(results['img'][..., 1], results['gt_seg_map'] + 1000.0)
    assert len(places) > 10
    wide = LoadBands([1], tile=(1000, 50))({'img_path': path})['img']
    assert wide.shape == (90, 50, 1)


def test_labels_are_reduced_and_mapped_as_mmseg_does(tmp_path):
    image = write(tmp_path / 'image.tif', np.array([[[0, 1, 2, 3, 254, 255]]], np.uint8))
    for reduce, expected in ((False, [5, 0, 2, 3, 254, 255]), (True, [255, 5, 0, 2, 253, 255])):
        options = dict(label_map={0: 5, 1: 0}, reduce_zero_label=reduce)
        found = load_both(LoadBands([1]), image, image, **options)
        assert found['gt_seg_map'].tolist() == [expected]


def test_pixels_without_data(tmp_path):
    image = np.array([[[7, -9, np.nan], [np.inf, 1, 2]]], np.float32)
    path = write(tmp_path / 'image.tif', image, nodata=-9)
    labels = write(tmp_path / 'labels.tif', np.array([[[0, 1, 2], [2, 1, 0]]], np.uint8), nodata=2)
    found = load_both(LoadBands([1]), path, labels)
    assert found['img'][..., 0].tolist() == [[7, 0, 0], [0, 1, 2]]
    assert found['gt_seg_map'].tolist() == [[0, 1, 255], [255, 1, 0]]


def test_pictures_of_bands():
    image = np.linspace(0, 4000, 60, dtype=np.float32).reshape(5, 6, 2)
    grey = picture(image)
    assert grey.shape == (5, 6, 3) and (grey[..., 0] == grey[..., 2]).all()
    assert grey.min() == 0 and grey.max() == 255
    colored = np.zeros((50, 50, 4), np.float32)
    colored[:25, :, 0] = 900
    assert picture(colored)[0, 0].tolist() == [255, 0, 0]
    assert not picture(np.full((3, 3, 4), 7, np.float32)).any()


@pytest.mark.parametrize('kind', ['DetDataPreprocessor', 'SegDataPreProcessor'])
def test_preprocessors_normalize_each_band(kind):
    import_module(f'cpvt_pyramid.mm.{"detection" if "Det" in kind else "segmentation"}')
    config = dict(type=f'ValidRegion{kind}', mean=[1, 2, 3, 4], std=[1, 2, 4, 8])
    image = torch.arange(4.0)[:, None, None].expand(4, 32, 32)
    made = MODELS.build(config)({'inputs': [image], 'data_samples': None})['inputs'][0]
    assert made[:, 0, 0].tolist() == [-1, -0.5, -0.25, -0.125]
    with pytest.raises(ValueError, match='std must have 4 values'):
        MODELS.build(dict(config, std=[1, 2, 3]))


def test_grayscale(tmp_path):
    """A PNG of one channel, through the pipeline and the model of an edited example."""
    cfg = Config.fromfile(ROOT / CONFIG)
    backbone = dict(arch='pcpvt_nano', init_cfg=None, in_channels=1, rgb_weights='mean')
    cfg.merge_from_dict(
        {
            'model.backbone': backbone,
            'model.neck': dict(in_channels=[32, 64, 128, 192]),
            'model.data_preprocessor': dict(mean=[120.0], std=[60.0]),
            'test_dataloader.dataset.pipeline.0.bands': [1],
        }
    )
    model = build_model(cfg, 'cpu')
    Image.fromarray(photograph(70, 60)[..., 0]).save(tmp_path / 'grey.png')
    load = TRANSFORMS.build(cfg.test_dataloader.dataset.pipeline[0])
    image = load(dict(img_path=tmp_path / 'grey.png'))['img']
    data = image_pipeline(cfg)({'img': image, 'img_id': 0})
    with torch.no_grad():
        (sample,) = model.test_step({k: [v] for k, v in data.items()})
    assert sample.pred_sem_seg.data.shape == (1, 70, 60)
    with pytest.raises(ReadError, match='takes 1 band, got 3'):  # a frame of a video
        OpenMMLabModel(model, cfg, NO_CLASSES).prepare(np.zeros((8, 8, 3), np.uint8))
    cfg.dump(tmp_path / 'grey.py')
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'grey.pth')
    predict = Predictor(tmp_path / 'grey.py', tmp_path / 'grey.pth')
    with pytest.raises(ValueError, match='takes 1 band, as a path or an array'):
        predict(Image.open(tmp_path / 'grey.png'))


def test_checks_of_the_data_read_scenes_of_any_size(scenes, monkeypatch):
    """Pillow reads neither scenes of 4 bands nor maps beyond its limit; GDAL does."""
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 100)
    monkeypatch.setenv('BANDS_ROOT', str(scenes))
    cfg = Config.fromfile(ROOT / CONFIG)
    dataset = cfg.train_dataloader.dataset
    assert check_dataset(cfg, 'train', dataset) == []
    dataset.metainfo = dict(classes=('one', 'two'))
    (problem,) = check_dataset(cfg, 'train', dataset)
    assert (
        problem.kind.words == 'segmentation masks with values that have no name and are not ignored'
    )


def test_mistakes_are_named(scenes, tmp_path):
    path = scenes / 'scenes/val/s0.tif'
    with pytest.raises(OSError, match=r'^bands must be from 1 to 4, got \(1, 5\)$'):
        read_bands(path, [1, 5])
    with pytest.raises(OSError, match=r'^bands must be from 1 to 4, got \(5,\): .*s0.tif$'):
        LoadBands([5])({'img_path': path})
    torn = tmp_path / 'torn.tif'
    torn.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(OSError, match='not a complete image'):
        read_bands(torn, [1])
    with pytest.raises(OSError, match='^no such file$'):
        read_bands(tmp_path / 'absent.tif', [1])
    assert size_of_raster(torn) is None and size_of_raster(path) == (100, 75)
    for labels, message in (
        (np.zeros((1, 100, 74), np.uint8), r'size of its image, \(100, 75\), got \(100, 74\)'),
        (np.full((1, 100, 75), 256, np.uint16), 'whole numbers from 0 to 255, got uint16'),
        (np.zeros((1, 100, 75), np.float32), 'whole numbers from 0 to 255, got float32'),
    ):
        with pytest.raises(OSError, match=message):
            load_both(LoadBands([1]), path, write(tmp_path / 'labels.tif', labels))
    for options in (dict(bands=[]), dict(bands=[0]), dict(bands=[1], tile=(5,))):
        with pytest.raises(ValueError, match='must be'):
            LoadBands(**options)
