"""PEGs with exchanged borders."""

import json

import pytest
import torch
import torch.nn.functional as F
from support import ROOT

from cpvt_pyramid.position import PosCNN
from experiments.position.border import (
    BORDERS,
    Border,
    BorderedPEG,
    BorderSettings,
    changes_table,
    metrics_table,
    values_of,
)
from experiments.position.runs import RunSettings
from experiments.statistics import estimate

DIM = 6


@pytest.fixture
def peg():
    torch.manual_seed(0)
    peg = BorderedPEG(DIM, Border('zeros'))
    for parameter in peg.parameters():
        torch.nn.init.normal_(parameter)
    return peg


@pytest.mark.parametrize('kind', BORDERS)
@pytest.mark.parametrize('size', [(1, 1), (1, 5), (4, 3)])
def test_borders_are_those_of_other_implementations(peg, kind, size):
    """`nn.Conv2d` on maps that `F.pad` or a loop has extended."""
    x = 3 + torch.randn(2, *size, DIM)
    maps = x.permute(0, 3, 1, 2)
    if kind == 'mean':
        channels = []
        for image in maps:
            extended = [F.pad(c[None], (1, 1, 1, 1), value=float(c.mean())) for c in image]
            channels.append(torch.cat(extended))
        near = torch.stack(channels)
    else:
        near = F.pad(maps, (1, 1, 1, 1), 'constant' if kind == 'zeros' else 'replicate')
    weight, bias = peg.proj[0].weight, peg.proj[0].bias
    expected = maps + F.conv2d(near, weight, bias, groups=DIM)
    peg.around.kind = kind
    torch.testing.assert_close(peg(x).permute(0, 3, 1, 2), expected)


def test_zeros_and_replicated_borders_are_those_of_the_package(peg):
    x = torch.randn(2, 4, 3, DIM)
    for kind, zero_padding in (('zeros', True), ('replicated', False)):
        ours = PosCNN(DIM, zero_padding=zero_padding)
        ours.load_state_dict(peg.state_dict())
        peg.around.kind = kind
        torch.testing.assert_close(peg(x), ours(x))


def test_all_pegs_of_a_model_have_the_border():
    """With zeros it is the lab's model; an exchanged border reaches the answers."""
    peg = (('after', (0, 2)),)
    image = torch.randn(2, 3, 48, 48)
    plain = RunSettings(peg=peg).build().eval()
    model = BorderSettings(peg=peg).build().eval()
    assert list(model.state_dict()) == list(plain.state_dict())
    weights = [0.3 * torch.randn_like(x) for x in plain.state_dict().values()]
    for one in (plain, model):
        one.load_state_dict(dict(zip(one.state_dict(), weights)))
    with torch.no_grad():
        expected = plain(image).readings
        torch.testing.assert_close(model(image).readings, expected)
        model.around.kind = 'mean'
        assert not torch.allclose(model(image).readings, expected, atol=1e-2)
    kinds = {part.around.kind for part in model.modules() if isinstance(part, BorderedPEG)}
    assert kinds == {'mean'}
    assert sum(isinstance(part, BorderedPEG) for part in model.modules()) == 2


def test_the_page_has_what_its_runs_say():
    findings = ROOT / 'experiments/position/findings'
    page = (findings / 'border.md').read_text()
    tests = json.loads((findings / 'border.json').read_text())['data']['tests']
    assert [len(of_seeds) for of_seeds in tests.values()] == [5] * len(BORDERS)
    for table in (metrics_table(tests), changes_table(tests)):
        assert table.markdown() in page
    text = ' '.join(page.split())
    own = estimate(values_of(tests['zeros'], 'zeros', 'position')).show()
    mean = estimate(values_of(tests['zeros'], 'mean', 'position')).show()
    assert f'{own} % of the position tasks with zeros and {mean} % with the mean' in text
