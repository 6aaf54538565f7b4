import json

import numpy as np
import pytest
from PIL import Image

from benchmarks import batch_drift


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp('images')
    noise = np.random.default_rng(0)
    for name, size in (('small', (75, 90)), ('large', (192, 128))):
        Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(
            folder / f'{name}.png'
        )
    return [str(folder / f'{name}.png') for name in ('small', 'large')]


def test_features(images, tmp_path):
    files = tmp_path / 'drift.png', tmp_path / 'drift.json'
    archs = 'pcpvt_nano', 'pvt_tiny'
    options = [*images, '--archs', *archs, '--out', str(files[0]), '--json', str(files[1])]
    options += ['--strides', '8']  # a picture of 28 maps takes seconds
    assert batch_drift.main(['--images', *options]) == 0
    results = json.loads(files[1].read_text())
    assert results['images'] == [[75, 90], [192, 128]]
    picture = np.asarray(Image.open(files[0]).convert('RGB')).astype(float)
    # The image in gray where nothing drifts, red where much does.
    darkest, brightest = picture.min(-1), picture.max(-1)
    gray = (brightest == darkest) & (brightest > 20) & (brightest < 235)
    red = (picture[..., 0] > 150) & (picture[..., 1] < 100) & (picture[..., 2] < 100)
    assert gray.mean() > 0.05 and red.mean() > 0.05
    libraries = {}
    for row in results['features']:
        libraries.setdefault(row['arch'], []).append(row['library'])
        assert list(row['max']) == list(row['mean']) == ['4', '8', '16', '32']
        largest = row['max'].values()
        if row['library'] == 'cpvt_pyramid':
            assert max(largest) < 1e-5
        else:
            assert min(largest) > 1e-2
        assert all(row['mean'][stride] <= row['max'][stride] for stride in row['max'])
    ours = ['cpvt_pyramid', 'cpvt_pyramid, unmasked']
    twins = [*ours, 'timm', 'mmseg']
    assert libraries == {'pcpvt_nano': twins, 'pvt_tiny': [*ours, 'mmdet']}


@pytest.mark.parametrize(
    'arguments, complaint',
    [
        (['--images', 'one.png'], '--images must be two files, the second image larger; got 1'),
        (['--images', '{large}', '{small}'], 'must be larger than'),
        (['--weights', 'vit=x.pth'], 'ARCH=FILE'),
        (['--archs', 'pcpvt_nano', '--weights', 'pcpvt_nano=x.pth'], 'no checkpoint at x.pth'),
        (['--json', '{small}'], 'already exists'),
    ],
)
def test_mistakes(arguments, complaint, images, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small, large = images
    arguments = [text.format(small=small, large=large) for text in arguments]
    monkeypatch.setattr(batch_drift, 'heat_maps', lambda *_: [np.zeros((2, 2))] * 4)
    assert batch_drift.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith('batch_drift: ') and complaint in error and error.count('\n') == 1
    assert not list(tmp_path.iterdir())
