"""Encodings with coordinates that are scaled."""

import json
import math

import pytest
import torch
from support import ROOT

from cpvt_pyramid.position import Grid, LearnedPosition
from experiments.position.coordinates import (
    ENCODINGS,
    KINDS,
    NORMALIZED,
    Coordinates,
    CoordinateSettings,
    ScaledGrid,
    ScaledTable,
    accuracy_table,
    kinds_table,
)
from experiments.position.laboratory import PRESETS
from experiments.position.runs import RunSettings
from experiments.position.sizes import canvases, values_of
from experiments.statistics import estimate, paired_difference
from experiments.training import digest

POSITIONS = sorted({variant.position for variant in ENCODINGS.values()})
BOTH = [('column', position) for position in POSITIONS]
BOTH += [('pyramid', position) for position in ('learned', 'rope', 'rope+peg')]
SIDE = 6  # of the training, in tokens


def logits_of(model, image):
    with torch.no_grad():
        return torch.cat(list(model(image).logits.values()), 1)


def picture(model, rows, columns=SIDE):
    """Of this many tokens of the last map."""
    return torch.randn(2, 3, rows * model.cell, columns * model.cell)


def plain_and_scaled(position, rescale=1.0, model='column'):
    """The lab's model and the same with scaled coordinates, with equal weights that matter."""
    plain = RunSettings(model, position).build().eval()
    scaled = CoordinateSettings(model, position, rescale=rescale).build().eval()
    names = dict.fromkeys(scaled.state_dict())
    assert len(names) == len(plain.state_dict())
    torch.manual_seed(1)
    weights = [0.6 * torch.randn_like(x) for x in plain.state_dict().values()]
    for model in (plain, scaled):
        model.load_state_dict(dict(zip(model.state_dict(), weights)))
    return plain, scaled


@pytest.mark.parametrize('model, position', BOTH)
@pytest.mark.parametrize('is_normalized', [False, True])
def test_at_the_size_of_the_training_nothing_changes(model, position, is_normalized):
    plain, scaled = plain_and_scaled(position, model=model)
    scaled.coordinates.normalized = is_normalized
    image = picture(plain, SIDE)
    torch.testing.assert_close(logits_of(scaled, image), logits_of(plain, image))


@pytest.mark.parametrize(
    'model, position',
    [
        ('column', 'rope'),
        ('column', 'rope+peg'),
        ('column', 'alibi'),
        ('pyramid', 'rope'),
        ('pyramid', 'rope+peg'),
    ],
)
def test_counted_coordinates_are_those_of_the_encoding(model, position):
    plain, scaled = plain_and_scaled(position, model=model)
    image = picture(plain, 2 * SIDE)
    counted = logits_of(scaled, image)
    torch.testing.assert_close(counted, logits_of(plain, image))
    scaled.coordinates.normalized = True
    assert (logits_of(scaled, image) - counted).abs().max() > 1e-3


@pytest.mark.parametrize('model', ['column', 'pyramid'])
def test_a_normalized_table_is_interpolated(model):
    plain, scaled = plain_and_scaled('learned', model=model)
    image = picture(plain, 2 * SIDE)
    expected = logits_of(plain, image)
    assert (logits_of(scaled, image) - expected).abs().max() > 1e-2
    scaled.coordinates.normalized = True
    torch.testing.assert_close(logits_of(scaled, image), expected)


def test_a_counted_table_repeats_its_last_entries():
    table = LearnedPosition(4, (6, 6), 'bicubic')
    torch.nn.init.normal_(table.table)
    scaled = ScaledTable(table, Coordinates(1.0)).eval()
    found = scaled(torch.zeros(1, 9, 7, 4))
    torch.testing.assert_close(found[:, :6, :6], table.table)
    torch.testing.assert_close(found[:, 8, :6], table.table[:, 5])
    torch.testing.assert_close(found[:, 8, 6], table.table[:, 5, 5])


def test_normalized_coordinates_by_hand():
    coordinates = Coordinates(1.0)
    assert coordinates.scale(12, SIDE, 1.0) == 1
    coordinates.normalized = True
    grid = ScaledGrid(12, 6)
    grid.row_scale, grid.column_scale = (
        coordinates.scale(12, SIDE, 1.0),
        coordinates.scale(6, SIDE, 1.0),
    )
    rows, columns = grid.centers(1, torch.zeros(1))
    assert rows[:3].tolist() == [-0.25, 0.25, 0.75] and rows[-1] == 5.25
    assert columns.tolist() == [0, 1, 2, 3, 4, 5]
    with_keys, _ = grid.centers(2, torch.zeros(1))  # of cells of 2 x 2 tokens
    assert with_keys[:2].tolist() == [0, 1]
    assert Grid(12, 6).centers(1, torch.zeros(1))[0][1] == 1


def test_fire_is_relative_to_the_training():
    _, scaled = plain_and_scaled('fire')
    encoding = scaled.backbone.blocks[0].attn.position
    encoding.c.data.fill_(0.5)
    lengths = torch.tensor([12])
    counted = encoding.relative_offsets(12, lengths)
    assert counted.shape == (1, 23)
    torch.testing.assert_close(
        counted[0, -1].item(), math.log(0.5 * 11 + 1) / math.log(0.5 * 6 + 1)
    )
    scaled.coordinates.normalized = True
    halved = encoding.relative_offsets(12, lengths)[0, -1].item()
    torch.testing.assert_close(halved, math.log(0.5 * 5.5 + 1) / math.log(0.5 * 6 + 1))


@pytest.mark.parametrize('position', POSITIONS)
def test_rescaling_is_random_in_training_alone(position):
    _, scaled = plain_and_scaled(position, rescale=2.0)
    image = picture(scaled, SIDE)
    assert torch.equal(logits_of(scaled, image), logits_of(scaled, image))
    scaled.train()
    assert (logits_of(scaled, image) - logits_of(scaled, image)).abs().max() > 1e-4


def test_factors_are_uniform_in_octaves():
    torch.manual_seed(0)
    drawn = torch.tensor([Coordinates(2.0).draw(True) for _ in range(2000)]).log2()
    assert -1 <= drawn.min() < -0.98 and 0.98 < drawn.max() <= 1
    assert abs(float(drawn.mean())) < 0.05
    assert Coordinates(2.0).draw(False) == 1 and Coordinates(1.0).draw(True) == 1


def test_runs_have_names_of_their_own():
    plain = RunSettings(position='rope')
    names = {digest(CoordinateSettings(position='rope', rescale=r), '') for r in (1.0, 2.0)}
    assert len(names | {digest(plain, '')}) == 3


SHOWN = ('canvas 0.5', 'canvas 1', 'canvas 2', 'canvas 4', 'zoom 0.5', 'zoom 2', 'zoom 4')


def assert_accuracies(tests, page):
    """The rows of a page, from five seeds."""
    for metric in ('position', 'control'):
        for name, seeds in tests.items():
            for kind in KINDS:
                values = [values_of(seeds, f'{kind} {size}', metric) for size in SHOWN]
                cells = ' | '.join(estimate(of_size).show() for of_size in values)
                assert f'| {name}: {kind} | {cells} | 5 |' in page


def test_the_page_has_what_its_runs_say():
    findings = ROOT / 'experiments/position/findings'
    page = (findings / 'coordinates.md').read_text()
    tests = json.loads((findings / 'coordinates.json').read_text())['data']['tests']
    assert len(tests) == 2 * len(ENCODINGS)
    assert_accuracies(tests, page)
    rope = [values_of(tests['RoPE'], f'{kind} canvas 4', 'position') for kind in KINDS]
    counted, normalized = rope
    difference = paired_difference(normalized, counted).show().removeprefix('+')
    text = ' '.join(page.split())
    assert f'{difference} points more with the same weights (p < 0.001)' in text
    assert f'answers {estimate(counted).show()} % with counted coordinates' in text


def test_the_page_of_pyramids_has_what_its_runs_say():
    findings = ROOT / 'experiments/position/findings'
    page = (findings / 'pyramid_coordinates.md').read_text()
    tests = json.loads((findings / 'pyramid_coordinates.json').read_text())['data']['tests']
    assert set(tests) == set(PRESETS['pyramid'].coordinates)
    assert_accuracies(tests, page)
    found = {}
    for name in ('RoPE', 'RoPE and PEG'):
        for kind in KINDS:
            found[name, kind] = values_of(tests[name], f'{kind} canvas 4', 'position')
    text = ' '.join(page.split())
    assert f'{estimate(found["RoPE", KINDS[0]]).show()} % with counted coordinates' in text
    assert f'{estimate(found["RoPE", KINDS[1]]).show()} % with normalized ones' in text
    cost = paired_difference(found['RoPE', KINDS[1]], found['RoPE and PEG', KINDS[1]])
    assert f'{cost.show()} points less than without' in text


def test_the_page_of_longer_training_has_what_its_runs_say():
    findings = ROOT / 'experiments/position/findings'
    page = (findings / 'longer_coordinates.md').read_text()
    tests = json.loads((findings / 'longer_coordinates.json').read_text())['data']['tests']
    preset = PRESETS['full']
    assert set(tests) == set(preset.coordinates)
    shown = [
        *canvases(preset.scales),
        *(f'zoom {scale:g}' for scale in preset.scales if scale != 1),
    ]
    for metric in ('position', 'control'):
        assert accuracy_table(tests, shown, metric).markdown() in page
    sizes = [size for size in shown if size != 'canvas 1']
    assert kinds_table(tests, sizes).markdown() in page
    found = {}
    for name in tests:
        for kind in KINDS:
            found[name, kind] = values_of(tests[name], f'{kind} canvas 4', 'position')
    gain = paired_difference(found['RoPE', NORMALIZED], found['FIRE', NORMALIZED])
    assert f'{gain.show()} more than FIRE'.lstrip('+') in ' '.join(page.split())
