"""Our backbones in transformers, through its wrappers of timm's models."""

import re
import textwrap
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support import ROOT
from torch import Tensor, nn
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModelForImageClassification,
    TimmBackbone,
    TimmBackboneConfig,
    TimmWrapperConfig,
)

import cpvt_pyramid.timm_models  # noqa: F401 registers the backbones
from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.padding.batching import map_in_batches

ATTENTION = dict(encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5, d_model=32)
DETR = dict(ATTENTION, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
RT_DETR = dict(
    ATTENTION,
    encoder_hidden_dim=32,
    encoder_in_channels=[64, 128, 192],
    encoder_ffn_dim=32,
    decoder_in_channels=[32, 32, 32],
    decoder_ffn_dim=32,
    decoder_layers=1,
    num_denoising=2,
)
MASK2FORMER = dict(
    feature_size=32,
    mask_feature_size=32,
    hidden_dim=32,
    encoder_feedforward_dim=32,
    encoder_layers=1,
    decoder_layers=2,
    num_attention_heads=2,
    dim_feedforward=32,
    num_queries=5,
    train_num_points=50,
)
UPERNET = dict(num_labels=4, hidden_size=32, auxiliary_in_channels=128, auxiliary_channels=16)


def config(*stages: int, **options: object) -> TimmBackboneConfig:
    return TimmBackboneConfig(backbone='pcpvt_nano', out_indices=list(stages), **options)


# By the beginning of its classes' names: the stages, and other options of the config.
DETECTORS = {
    'Detr': ((3,), DETR),
    'ConditionalDetr': ((3,), DETR),
    'DeformableDetr': ((1, 2, 3), DETR),
    'RTDetr': ((1, 2, 3), RT_DETR),
}
SEGMENTORS = {
    'Mask2Former': ('UniversalSegmentation', MASK2FORMER),
    'MaskFormer': ('InstanceSegmentation', dict(fpn_feature_size=32, mask_feature_size=32)),
    'UperNet': ('SemanticSegmentation', UPERNET),
}


def build(kind: str, task: str, stages: Sequence[int], **options: object) -> nn.Module:
    model_config = getattr(transformers, f'{kind}Config')
    model = getattr(transformers, f'{kind}For{task}')
    return model(model_config(backbone_config=config(*stages), **options))


def detector(kind: str) -> nn.Module:
    stages, options = DETECTORS[kind]
    return build(kind, 'ObjectDetection', stages, **options)


def segmentor(kind: str) -> nn.Module:
    task, options = SEGMENTORS[kind]
    if kind == 'MaskFormer':
        decoder = transformers.DetrConfig(backbone_config=config(3), **DETR)
        options = dict(options, decoder_config=decoder)
    return build(kind, task, (0, 1, 2, 3), **options)


def body_of(model: nn.Module) -> CPVTPyramid:
    """Our model within one of transformers."""
    (body,) = (part for part in model.modules() if isinstance(part, CPVTPyramid))
    return body


def logits_of(outputs: object) -> Tensor:
    return outputs['logits' if 'logits' in outputs else 'masks_queries_logits']


def check(model: nn.Module, image: Tensor, folder: object, **labels: object) -> None:
    """A training step, a prediction, and a model that is saved and loaded."""
    outputs = model.train()(pixel_values=image, **labels)
    assert outputs.loss.isfinite()
    outputs.loss.backward()
    trained = {name: p.grad for name, p in body_of(model).named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in trained.values())
    model.eval().save_pretrained(folder)
    with torch.no_grad():
        expected = logits_of(model(pixel_values=image))
        again = type(model).from_pretrained(folder).eval()
        assert torch.equal(logits_of(again(pixel_values=image)), expected)


@pytest.mark.parametrize('kind', DETECTORS)
def test_detectors(kind, tmp_path):
    target = dict(class_labels=torch.tensor([1]), boxes=torch.tensor([[0.5, 0.5, 0.2, 0.3]]))
    model, mask = detector(kind), torch.ones(2, 96, 128, dtype=torch.long)
    mask[1, 70:] = 0
    check(model, torch.rand(2, 3, 96, 128), tmp_path, pixel_mask=mask, labels=[target] * 2)


@pytest.mark.parametrize('kind', SEGMENTORS)
def test_segmentors(kind, tmp_path):
    if kind == 'UperNet':
        labels = dict(labels=torch.randint(4, (2, 96, 128)))
    else:
        masks = [(torch.rand(2, 96, 128) > 0.5).float() for _ in range(2)]
        labels = dict(mask_labels=masks, class_labels=[torch.tensor([0, 2])] * 2)
    check(segmentor(kind), torch.rand(2, 3, 96, 128), tmp_path, **labels)


def test_maps_are_those_of_the_backbone(tmp_path):
    source = CPVTPyramid('pcpvt_nano', out_indices=(1, 3)).eval()
    torch.save(source.state_dict(), tmp_path / 'backbone.pth')
    model = AutoBackbone.from_config(config(1, 3)).eval()
    assert isinstance(model, TimmBackbone) and model.channels == [64, 192]
    load_weights(body_of(model), tmp_path / 'backbone.pth')
    image = torch.randn(1, 3, 71, 90)
    with torch.no_grad():
        assert all(map(torch.equal, model(image).feature_maps, source(image)))
        every = AutoBackbone.from_config(config(0, 1, 2, 3)).eval()
        assert len(every(image, output_hidden_states=True).hidden_states) == 4
    model.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.backbone, again.out_indices) == ('pcpvt_nano', [1, 3])


def test_classifier():
    wrapped = TimmWrapperConfig(architecture='pcpvt_nano', num_labels=3)
    model = AutoModelForImageClassification.from_config(wrapped)
    out = model(torch.rand(2, 3, 64, 90), labels=torch.tensor([0, 2]))
    out.loss.backward()
    assert out.logits.shape == (2, 3)


def test_frozen_checkpointed_and_in_half_precision(tmp_path):
    model = detector('Detr')
    model.model.freeze_backbone()
    assert not any(p.requires_grad for p in body_of(model).parameters())
    model.model.unfreeze_backbone()
    body_of(model).set_grad_checkpointing()
    model.bfloat16().train()
    out = model(torch.rand(1, 3, 64, 64, dtype=torch.bfloat16))
    out.logits.sum().backward()
    assert all(p.grad is not None for p in body_of(model).parameters())


def test_the_page_about_it(tmp_path, monkeypatch):
    text = (ROOT / 'docs/ecosystems.md').read_text().replace('pcpvt_small', 'pcpvt_nano')
    blocks = [textwrap.dedent(b) for b in re.findall(r' *```python\n(.*?)```', text, re.S)]
    (block,) = (b for b in blocks if 'transformers' in b)
    (batches,) = (b for b in blocks if 'def detect' in b)
    monkeypatch.chdir(tmp_path)
    source = CPVTPyramid('pcpvt_nano')
    torch.save(source.state_dict(), 'pcpvt_nano.pth')
    names = {}
    exec(block, names)
    for model in ('detector', 'segmentor'):
        weights = body_of(names[model]).state_dict()
        assert all(torch.equal(x, weights[name]) for name, x in source.state_dict().items())
    names['detector'].model.backbone.model.set_grad_checkpointing()

    pixels = np.random.default_rng(0).integers(256, size=(128, 128, 3), dtype=np.uint8)
    sizes = [(96, 128), (128, 96), (96, 128)]
    images = [Image.fromarray(pixels[:height, i:width]) for i, (height, width) in enumerate(sizes)]
    processor = transformers.DetrImageProcessor(do_resize=False)
    processor.post_process_object_detection = lambda found, **_: found.logits
    names.update(images=images, processor=processor)
    names['detector'].eval()
    exec(batches, names)
    alone = [names['detect']([image])[0] for image in images]
    torch.testing.assert_close(names['results'], alone)


@torch.no_grad()
@pytest.mark.parametrize('kind', [*DETECTORS, *SEGMENTORS])
def test_images_of_several_sizes_have_the_results_of_each_alone(kind):
    """In batches of one size, whatever the neck and head; the test fails with padded ones."""
    model = (detector if kind in DETECTORS else segmentor)(kind).eval()
    images = [torch.rand(3, *size) for size in ((96, 128), (64, 96), (96, 128), (64, 96))]

    def predict(batch: list[Tensor]) -> Tensor:
        height, width = (max(image.shape[i] for image in batch) for i in (1, 2))
        padded = torch.zeros(len(batch), 3, height, width)
        mask = torch.zeros(len(batch), height, width, dtype=torch.long)
        for i, image in enumerate(batch):
            padded[i, :, : image.shape[1], : image.shape[2]] = image
            mask[i, : image.shape[1], : image.shape[2]] = 1
        masks = {} if kind == 'UperNet' else dict(pixel_mask=mask)
        return logits_of(model(pixel_values=padded, **masks))

    def drift(key: Callable) -> float:
        found = zip(map_in_batches(predict, images, key, 4), images)
        differences = []
        for logits, image in found:
            (alone,) = predict([image])
            inside = logits[tuple(map(slice, alone.shape))]
            differences.append((inside - alone).abs().max().item())
        return max(differences)

    assert drift(lambda image: image.shape) < 1e-4
    assert drift(lambda image: None) > 1e-3
