"""Training, resuming and tiled inference through the tools on a GPU.

The segmentor needs none of mmcv's operators; the detector does, so that its tests also tell whether
mmcv was compiled for the GPU.
"""

import numpy as np
import pytest
import torch
from gpu import DEVICE, assert_near, assert_never_waits
from mmengine.registry import MODELS
from PIL import Image
from support import load_tool

import cpvt_pyramid.mm  # noqa: F401 registers the backbone
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.predict.openmmlab.loading import (
    build_model,
    fetch_checkpoint,
    load_whole_model,
)

NAMES = ('detector', 'segmentor')
PRECISIONS = {
    'float32': [],
    'float16': ['--amp'],
    'bfloat16': ['--cfg-options', 'optim_wrapper.type=BFloat16OptimWrapper'],
}


def tensors(checkpoint):
    return torch.load(checkpoint, map_location='cpu', weights_only=False)['state_dict']


def train(config, folder, *options):
    assert load_tool('train').main([str(config), '--work-dir', str(folder), *options]) == 0


@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('name', NAMES)
def test_training(name, precision, configs, tmp_path):
    train(configs[name], tmp_path, *PRECISIONS[precision])
    last = (tmp_path / 'last_checkpoint').read_text()
    assert all(x.isfinite().all() for x in tensors(last).values() if x.is_floating_point())


def test_resume(configs, tmp_path):
    """A training that resumes ends near one that was not interrupted: GPU kernels add up in any
    order, so that two trainings are not bit-identical."""
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    train(configs['segmentor'], whole)
    train(configs['segmentor'], parts, f'--resume={whole}/iter_10.pth')
    a, b = (tensors((folder / 'last_checkpoint').read_text()) for folder in (whole, parts))
    assert a.keys() == b.keys()
    assert_near([a[k] for k in a], [b[k] for k in a], 0.05)


@pytest.mark.parametrize('name', NAMES)
def test_predictions_equal_the_cpu(name, untrained, sample_dataset):
    config, checkpoint = untrained[name]
    cfg, results = load_config(config), []
    image = torch.randint(0, 255, (3, 96, 96), generator=torch.Generator().manual_seed(0)).byte()
    smaller = image[:, :64, :80] if name == 'detector' else image  # mmseg pads in training alone
    for device in ('cpu', DEVICE):
        model = build_model(cfg, device)
        load_whole_model(model, fetch_checkpoint(checkpoint), checkpoint)
        batch = model.data_preprocessor({'inputs': [image, smaller]})
        with torch.inference_mode():
            outputs = model(batch['inputs'], mode='tensor')
        leaves = torch.utils._pytree.tree_leaves(outputs)
        results.append([x.as_subclass(torch.Tensor) for x in leaves])
    assert_near(results[1], results[0], 1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_tiles(name, untrained, tmp_path):
    config, checkpoint = untrained[name]
    noise = np.random.default_rng(0).integers(0, 255, (700, 900, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / 'scene.png')
    command = [config, checkpoint, str(tmp_path / 'scene.png'), '--tile', '256']
    for device, size in (('cpu', '1'), (DEVICE, '4')):
        options = ['--device', device, '--batch-size', size, '--out-dir', str(tmp_path / device)]
        assert load_tool('infer').main([*command, *options]) == 0
    for path in (tmp_path / 'cpu').iterdir():
        assert (tmp_path / DEVICE / path.name).is_file()


def test_a_padded_batch_of_the_registered_backbone_never_waits_for_the_gpu():
    """After the first batch, for which the validity channel is checked."""
    model = MODELS.build(dict(type='CPVTPyramid', arch='pcpvt_nano')).to(DEVICE).train()
    batch = torch.randn(2, 4, 96, 128, device=DEVICE)
    batch[:, 3] = 0
    batch[0, 3, :60, :100] = batch[1, 3, :96, :128] = 1

    def step():
        maps = model(batch)
        sum(x.as_subclass(torch.Tensor).square().mean() for x in maps).backward()

    assert_never_waits(step)
