"""transformers' SegFormer: its weights in ours, from its files and from its modules, and back."""

import pytest
import torch
from torch import nn
from transformers import (
    SegformerConfig,
    SegformerForImageClassification,
    SegformerForSemanticSegmentation,
    SegformerModel,
)

from cpvt_pyramid import ARCHS, CPVTPyramid, load_weights
from cpvt_pyramid.checkpoints.formats import to_format, to_ours
from cpvt_pyramid.checkpoints.reading import tensors_of
from tests.models.ports import randomize, with_eps

MIT = ARCHS['mit_b0']._replace(depths=(2, 1, 1, 1))
CONFIG = SegformerConfig(depths=list(MIT.depths), num_labels=4, decoder_hidden_size=16)
MODELS = [SegformerModel, SegformerForImageClassification, SegformerForSemanticSegmentation]


def of_transformers(kind: type) -> nn.Module:
    return with_eps(randomize(kind(CONFIG)).eval())


@pytest.mark.parametrize('way', ['files', 'modules'])
@pytest.mark.parametrize('kind', MODELS)
@torch.no_grad()
def test_equals_segformer(kind, way, tmp_path):
    theirs = of_transformers(kind)
    model = with_eps(CPVTPyramid(MIT).eval())
    if way == 'files':
        theirs.save_pretrained(tmp_path)
        assert not load_weights(model, tmp_path).kept
    else:
        missing, unexpected = model.load_state_dict(theirs.state_dict(), strict=False)
        assert not missing and all(name.startswith('decode_head.') for name in unexpected)
    image = torch.randn(2, 3, 96, 128)  # at other sizes, its sub-sampling drops the rest
    expected = theirs(image, output_hidden_states=True).hidden_states
    torch.testing.assert_close(list(model(image)), list(expected))


def test_transformers_reads_what_is_converted(tmp_path):
    theirs = of_transformers(SegformerForImageClassification)
    ours = to_ours(tensors_of(theirs.state_dict()))
    theirs.save_pretrained(tmp_path)  # its config
    torch.save(to_format(ours, 'transformers'), tmp_path / 'pytorch_model.bin')
    (tmp_path / 'model.safetensors').unlink()
    again = SegformerForImageClassification.from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    fresh = of_transformers(SegformerForImageClassification)
    fresh.load_state_dict(to_format(ours, 'transformers_5'))
