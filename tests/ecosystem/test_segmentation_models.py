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
from cpvt_pyramid.checkpoints.loading import fit_checkpoint
from cpvt_pyramid.padding.batching import map_in_batches

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
@pytest.mark.parametrize('kind', ['Unet', 'PSPNet', 'Segformer'])
def test_images_of_several_sizes_are_segmented_as_alone(kind):
    """In a batch that is padded, they are not."""
    model, large = build(kind).eval(), photograph(96, 128)
    small = large[:, :, :64, :96]
    images = [small[0], large[0], small[0].flip(2), large[0].flip(1)]
    alone = [model(image[None])[0] for image in images]

    def together(batch: list[Tensor]) -> Tensor:
        assert len(batch) == 2
        return model(torch.stack(batch))

    for y, expected in zip(map_in_batches(together, images, lambda x: x.shape, 2), alone):
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    padded = torch.cat([nn.functional.pad(small, (0, 32, 0, 32)), large])
    assert (model(padded)[0, :, :64, :96] - alone[0]).abs().max() > 0.1


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
def test_models_that_the_page_names():
    text = (ROOT / 'docs/ecosystems.md').read_text().replace('pcpvt_small', 'pcpvt_nano')
    (inline,) = re.findall(r'`(smp.DeepLab[^`]*)`', text)
    eval(inline)
    (inline,) = re.findall(r'`(smp.DPT[^`]*)`', text)
    inline = inline.replace('cpvt_small', 'cpvt_tiny')
    assert eval(inline).eval()(photograph(64, 96)).shape == (1, 1, 64, 96)


@pytest.mark.parametrize('kind', ['Segformer', 'Unet', 'FPN', 'MAnet', 'UPerNet', 'PSPNet'])
@pytest.mark.parametrize(
    'encoder, arch', [('mit_b0', 'mit_b0'), ('tu-pvt_v2_b0', 'pvt_v2_b0'), ('tu-pcpvt_nano',) * 2]
)
def test_backbones_of_whole_models(kind, encoder, arch):
    """Theirs and timm's encoders inside of a segmentor; they were said to be damaged."""
    theirs = getattr(smp, kind)(encoder, encoder_weights=None, classes=3)
    arch = arch.removeprefix('tu-')
    model = CPVTPyramid(arch, out_indices=(0, 1) if kind == 'PSPNet' else (0, 1, 2, 3))
    _, report = fit_checkpoint(model, {f'module.{k}': v for k, v in theirs.state_dict().items()})
    assert not report.kept and not report.unused
