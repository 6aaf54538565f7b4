"""transformers' PVT and PVTv2: their weights in ours, from files and modules, and back."""

import pytest
import torch
from torch import nn
from transformers import (
    PvtConfig,
    PvtForImageClassification,
    PvtModel,
    PvtV2Config,
    PvtV2ForImageClassification,
    PvtV2Model,
)

from cpvt_pyramid import ARCHS, CPVTPyramid, load_weights
from cpvt_pyramid.checkpoints.formats import to_format, to_ours
from cpvt_pyramid.checkpoints.reading import tensors_of
from tests.models.ports import randomize, with_eps

DEPTHS = (2, 1, 1, 1)
PVT = ARCHS['pvt_tiny']._replace(depths=DEPTHS)
PVT_V2 = ARCHS['pvt_v2_b0']._replace(depths=DEPTHS)
LINEAR = PVT_V2._replace(attention='LinearAttention', mlp_relu=True)
V2_CONFIG = dict(depths=list(DEPTHS), num_labels=4)
CASES = {
    'Pvt': (PVT, PvtModel, PvtConfig(depths=list(DEPTHS), num_labels=4), 'transformers_pvt'),
    'PvtForImageClassification': (
        PVT,
        PvtForImageClassification,
        PvtConfig(depths=list(DEPTHS), num_labels=4),
        'transformers_pvt',
    ),
    'PvtV2': (PVT_V2, PvtV2Model, PvtV2Config(**V2_CONFIG), 'transformers_pvt_v2'),
    'PvtV2ForImageClassification': (
        PVT_V2,
        PvtV2ForImageClassification,
        PvtV2Config(**V2_CONFIG),
        'transformers_pvt_v2',
    ),
    'PvtV2, linear': (
        LINEAR,
        PvtV2Model,
        PvtV2Config(**V2_CONFIG, linear_attention=True),
        'transformers_pvt_v2',
    ),
}
every_case = pytest.mark.parametrize('case', CASES.values(), ids=CASES)


def of_transformers(kind: type, config: object) -> nn.Module:
    return with_eps(randomize(kind(config)).eval())


@pytest.mark.parametrize('way', ['files', 'modules'])
@every_case
@torch.no_grad()
def test_equals_transformers(case, way, tmp_path):
    arch, kind, config, _ = case
    theirs = of_transformers(kind, config)
    model = with_eps(CPVTPyramid(arch).eval())
    if way == 'files':
        theirs.save_pretrained(tmp_path)
        assert not load_weights(model, tmp_path).kept
    else:
        missing, unexpected = model.load_state_dict(theirs.state_dict(), strict=False)
        assert not missing and not unexpected
    image = torch.randn(2, 3, 224, 224)
    found = model(image)
    states = theirs(image, output_hidden_states=True).hidden_states
    assert len(found) == 4
    if arch is PVT:  # whose states are those of all blocks; the last stage has a class token
        ends = [states[sum(DEPTHS[: i + 1]) - 1] for i in range(3)]
        for ours, tokens in zip(found, ends):
            torch.testing.assert_close(ours.flatten(2).transpose(1, 2), tokens)
    else:
        torch.testing.assert_close(list(found), list(states))


@every_case
def test_a_file_is_written_as_it_was_read(case):
    _, kind, config, key = case
    theirs = of_transformers(kind, config).state_dict()
    ours = to_ours(tensors_of(theirs))
    written = to_format(ours, key)
    prefix = '' if next(iter(theirs)).startswith('pvt') else f'{kind.base_model_prefix}.'
    assert {prefix + name for name in theirs} == written.keys()
    for name, value in theirs.items():
        assert torch.equal(value, written[prefix + name]), name
