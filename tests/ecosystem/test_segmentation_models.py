"""segmentation_models_pytorch on our encoders, `tu-` and their names in timm's registry."""

import re

import pytest
import segmentation_models_pytorch as smp
import skimage.data
import timm
import torch
from reference import same_maps
from support import ROOT
from torch import Tensor, nn

import cpvt_pyramid.timm_models  # noqa: F401 registers the encoders
from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.masked_map import padded_batch

PLAIN = ('Unet', 'UnetPlusPlus', 'MAnet', 'Linknet', 'FPN', 'PSPNet', 'UPerNet', 'Segformer')
DILATED = ('DeepLabV3', 'DeepLabV3Plus', 'PAN')


def photograph(height: int, width: int) -> Tensor:
    """(1, 3, height, width), normalized."""
    image = torch.tensor(skimage.data.chelsea()[:height, 100 : 100 + width])
    return (image.permute(2, 0, 1)[None] / 255 - 0.45) / 0.225


def build(kind: str, **options: object) -> nn.Module:
    return getattr(smp, kind)('tu-pcpvt_nano', encoder_weights=None, classes=3, **options)


def test_encoder_has_the_maps_of_the_backbone():
    encoder = smp.encoders.get_encoder('tu-pcpvt_nano', weights=None).eval()
    assert encoder.out_channels == [3, 0, 32, 64, 128, 192]
    assert encoder.output_stride == 32
    backbone = CPVTPyramid('pcpvt_nano').eval()
    backbone.load_state_dict(encoder.model.model.state_dict())
    image = photograph(71, 90)
    with torch.no_grad():
        same_maps(encoder(image)[2:], backbone(image), rtol=0, atol=0)
        assert build('Unet').eval()(image).shape == (1, 3, 71, 90)


@pytest.mark.parametrize('kind', [*PLAIN, *DILATED])
def test_every_model_trains(kind):
    options = dict(encoder_depth=4, encoder_output_stride=16) if kind in DILATED else {}
    model = build(kind, **options)
    logits = model(photograph(128, 128).repeat(2, 1, 1, 1))  # batch norm of one value
    assert logits.shape == (2, 3, 128, 128)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.encoder.parameters())


@torch.no_grad()
def test_images_of_a_padded_batch_are_segmented_as_alone():
    model, batch = build('Unet').eval(), photograph(96, 128).repeat(2, 1, 1, 1)
    alone = model(batch[:1, :, :64, :96])
    assert (model(batch)[:1, :, :64, :96] - alone).abs().max() > 0.1
    together = model(padded_batch(batch, torch.tensor([[64, 96], [96, 128]])))
    torch.testing.assert_close(together[:1, :, :64, :96], alone, atol=1e-3, rtol=1e-3)


def test_dilation_is_refused():
    with pytest.raises(ValueError, match='output_stride must be 32.*got 16.*encoder_depth'):
        build('DeepLabV3Plus')
    with pytest.raises(ValueError, match='must be 16, the stride of the last map, got 8'):
        timm.create_model('pcpvt_nano', output_stride=8, features_only=True, out_indices=(0, 2))


def test_weights_freezing_and_checkpointing(tmp_path):
    source = CPVTPyramid('pcpvt_nano')
    torch.save(source.state_dict(), tmp_path / 'backbone.pth')
    model = build('FPN')
    load_weights(model.encoder.model.model, tmp_path / 'backbone.pth')
    image = photograph(64, 96)
    model.eval().save_pretrained(tmp_path / 'model')
    again = smp.from_pretrained(tmp_path / 'model').eval()
    with torch.no_grad():
        expected = model(image)
        assert torch.equal(again(image), expected)
        assert torch.equal(model.encoder(image)[-1], source.eval()(image)[-1])
    model.encoder.requires_grad_(False)
    model.encoder.model.set_grad_checkpointing()
    out = model(image)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert all(p.grad is None for p in model.encoder.parameters())
    assert all(p.grad is not None for p in model.decoder.parameters())


@torch.no_grad()
def test_the_page_about_it(tmp_path, monkeypatch):
    text = (ROOT / 'docs/ecosystems.md').read_text().replace('pcpvt_small', 'pcpvt_nano')
    blocks = re.findall(r'```python\n(.*?)```', text, re.S)
    (block,) = (b for b in blocks if b.startswith('import cpvt_pyramid.timm_models\nimport segm'))
    monkeypatch.chdir(tmp_path)
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'pcpvt_nano.pth')
    names = {}
    exec(re.sub('.*# downloads them\n', '', block), names)
    assert names['model'].eval()(photograph(64, 96)).shape == (1, 11, 64, 96)
    (block,) = (b for b in blocks if 'maps = encoder' in b)
    exec(block, names)
    assert [x.shape[2:] for x in names['maps']] == [(24, 32), (12, 16), (6, 8), (3, 4)]
    (inline,) = re.findall(r'`(smp.DeepLab[^`]*)`', text)
    eval(inline.replace('16)', '16, encoder_weights=None)'), names)
    (inline,) = re.findall(r'`(smp.DPT[^`]*)`', text)
    inline = inline.replace("')", "', encoder_weights=None)").replace('cpvt_small', 'cpvt_tiny')
    assert eval(inline, names).eval()(photograph(64, 96)).shape == (1, 1, 64, 96)
