"""Polyphase anchoring: exact under every cyclic shift, and the package's own model without it."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT
from torch import nn

from cpvt_pyramid.layers import Block, GlobalAttention, WindowAttention
from cpvt_pyramid.position import Grid
from cpvt_pyramid.pyramid import CPVTPyramid
from experiments.position import __main__ as tool
from experiments.position import anchoring
from experiments.position.anchoring import (
    FRAME,
    MEASURES,
    PHOTO,
    SHIFT,
    SVT,
    TESTS,
    TIMES,
    TRAININGS,
    Anchored,
    AnchoredBlock,
    Anchoring,
    AnchoringSettings,
    ShiftedClassifier,
    anchors,
    draw_shifts,
    framed,
    roll,
)
from experiments.position.border import Border, BorderedPEG
from experiments.position.fashion import CLASSES, Photos

DIM = 8


def randomize(model):
    """Weights that are random but not tiny."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@settings(deadline=None)  # the machine may be busy
@given(
    cells=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_the_anchor_is_the_phase_with_the_largest_norm(cells, size, seed):
    """Against a loop over all phases."""
    torch.manual_seed(seed)
    x = torch.randn(3, cells[0] * size, cells[1] * size, DIM)
    rows, columns = anchors(x, size)
    for image, row, column in zip(x, rows.tolist(), columns.tolist()):
        norms = {}
        for i in range(size):
            for j in range(size):
                norms[i, j] = float(image[i::size, j::size].double().norm())
        assert norms[row, column] == max(norms.values())


def test_each_image_is_rolled_by_its_own_offset():
    x = torch.randn(3, 6, 4, DIM)
    rows, columns = torch.tensor([0, 5, -2]), torch.tensor([3, -1, 0])
    expected = [
        image.roll((-row, -column), (0, 1))
        for image, row, column in zip(x, rows.tolist(), columns.tolist())
    ]
    assert torch.equal(roll(x, rows, columns), torch.stack(expected))
    assert torch.equal(roll(roll(x, rows, columns), -rows, -columns), x)


@pytest.mark.parametrize('attention', [WindowAttention, GlobalAttention])
@settings(deadline=None)  # the machine may be busy
@given(by=st.tuples(st.integers(-9, 9), st.integers(-9, 9)))
def test_an_anchored_block_moves_with_its_map(attention, by):
    block = Block(DIM, attention(DIM, 2, 3), 2)
    switch = Anchoring()
    anchored = randomize(AnchoredBlock(block, 3, switch))
    x = torch.randn(2, 6, 9, DIM)
    grid = Grid(6, 9)
    with torch.no_grad():
        assert torch.equal(anchored(x, grid), block(x, grid))  # it is off
        switch.turn(True)
        shifted = anchored(x.roll(by, (1, 2)), grid)
        torch.testing.assert_close(shifted, anchored(x, grid).roll(by, (1, 2)))


@pytest.fixture(scope='module')
def model():
    return randomize(ShiftedClassifier())


@torch.no_grad()
def test_an_anchored_classifier_keeps_its_logits(model):
    image = torch.randn(2, 1, FRAME, FRAME)
    shifts = [(1, 0), (0, -3), (5, 2), (13, -29), (FRAME // 2, FRAME - 1)]
    logits = {}
    for is_on in (True, False):
        model.anchoring.turn(is_on)
        logits[is_on] = model(image)
        for by in shifts:
            shifted = model(image.roll(by, (2, 3)))
            if is_on:
                torch.testing.assert_close(shifted, logits[True])
            else:
                assert not torch.allclose(shifted, logits[False], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits[True], logits[False], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_without_anchoring_it_is_the_model_of_the_package(model):
    model.anchoring.turn(False)
    plain = CPVTPyramid(SVT, in_channels=1, out_indices=(0, 1)).eval()
    plain.load_state_dict(
        {name.replace('.part.', '.'): x for name, x in model.backbone.state_dict().items()}
    )
    image = torch.randn(2, 1, FRAME, FRAME)
    torch.testing.assert_close(model.backbone(image), plain(image))
    parts = [part for part in model.modules() if isinstance(part, Anchored)]
    assert [part.size for part in parts] == [4, 2, 4, 4, 4, 2]  # patches, then blocks, by stage
    assert sum(isinstance(part, BorderedPEG) for part in model.modules()) == len(SVT.dims)


def test_a_circular_border_is_that_of_pytorch():
    peg = randomize(BorderedPEG(DIM, Border('circular')))
    reference = nn.Conv2d(DIM, DIM, 3, padding=1, padding_mode='circular', groups=DIM)
    reference.load_state_dict(peg.proj[0].state_dict())
    x = torch.randn(2, 4, 3, DIM)
    maps = x.permute(0, 3, 1, 2)
    torch.testing.assert_close(peg(x).permute(0, 3, 1, 2), maps + reference(maps))


def test_the_gradient_passes_an_anchored_model():
    settings = AnchoringSettings(anchored=True)
    model = settings.build().train()
    model(torch.randn(2, 1, FRAME, FRAME)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.backbone.parameters())


def test_a_photograph_stays_whole_wherever_it_is():
    photos = torch.randint(1, 256, (40, 1, 28, 28), dtype=torch.uint8)
    middle = framed(photos)
    assert middle.shape == (40, 1, FRAME, FRAME) and FRAME - PHOTO == 2 * SHIFT
    inside = middle[..., SHIFT:-SHIFT, SHIFT:-SHIFT]
    assert (inside > 0).any() and int(middle.sum()) == int(inside.sum())
    shifts = draw_shifts(len(photos), np.random.default_rng(0))
    assert shifts.min() == -SHIFT and shifts.max() == SHIFT
    for image, shifted, (down, right) in zip(middle, framed(photos, shifts), shifts):
        top, left = SHIFT + down, SHIFT + right
        photo = shifted[:, top : top + PHOTO, left : left + PHOTO]
        assert torch.equal(photo, image[:, SHIFT:-SHIFT, SHIFT:-SHIFT])
        assert int(shifted.sum()) == int(image.sum())


class BrightestColumn(nn.Module):
    """Answers with the column of the first bright pixel, modulo the classes."""

    def forward(self, image):
        column = (image[:, 0].amax(1) > 0).float().argmax(1)
        return nn.functional.one_hot(column % CLASSES, CLASSES).float()


def test_measures_are_those_of_a_loop():
    photos = Photos(torch.full((20, 1, 28, 28), 255, dtype=torch.uint8), torch.arange(20) % CLASSES)
    found = anchoring.measure(BrightestColumn(), photos, seed=3)
    generator = np.random.default_rng(3)
    answers = []
    for _ in range(TIMES):
        shifts = draw_shifts(20, generator)
        answers.append([(SHIFT + int(right)) % CLASSES for _, right in shifts])
    labels = photos.labels.tolist()
    right = [[a == b for a, b in zip(of_time, labels)] for of_time in answers]
    same = [[a == SHIFT % CLASSES for a in of_time] for of_time in answers]
    assert found == pytest.approx(
        dict(
            accuracy=np.mean([SHIFT % CLASSES == label for label in labels]),
            shifted=np.mean(right),
            worst=np.mean(np.all(right, axis=0)),
            same=np.mean(same),
        )
    )


def test_training_photographs_are_shifted_if_that_is_asked(photographs):
    plain = AnchoringSettings(data=str(photographs), batch=4)
    shifted = AnchoringSettings(data=str(photographs), batch=4, shifted=True)
    images, labels = plain.draw(0)
    moved, same_labels = shifted.draw(0)
    assert torch.equal(labels, same_labels) and images.shape[2:] == (FRAME, FRAME)
    assert not torch.equal(images, moved)
    assert torch.equal(moved, shifted.draw(0)[0])  # a step has always the same ones
    assert not torch.equal(moved, shifted.draw(1)[0])


def test_the_question_is_answered(photographs, tmp_path, capsys):
    words = ['anchoring', '--preset', 'smoke', '--workers', '1', '--data', str(photographs)]
    assert tool.main([*words, '--work-dir', str(tmp_path)]) == 0
    found = json.loads((tmp_path / 'anchoring.json').read_text())
    tests = found['data']['tests']
    assert set(tests) == set(TRAININGS)
    for of_seeds in tests.values():
        assert len(of_seeds) == 2
        for of_seed in of_seeds:
            assert set(of_seed) == set(TESTS)
            assert of_seed[anchoring.ANCHORED]['same'] == 1.0
            assert all(set(of_test) == set(MEASURES) for of_test in of_seed.values())
    assert (tmp_path / 'anchoring.png').is_file()
    trained = {
        (run['settings']['anchored'], run['settings']['shifted'])
        for row in found['data']['runs']
        for run in row['runs']
    }
    assert trained == {(False, False), (False, True), (True, False)}
    assert tool.main(['anchoring', '--preset', 'pyramid']) == 2
    assert '--preset pyramid is not for anchoring' in capsys.readouterr().err


def test_the_page_has_what_its_runs_say():
    findings = ROOT / 'experiments/position/findings'
    page = (findings / 'anchoring.md').read_text()
    tests = json.loads((findings / 'anchoring.json').read_text())['data']['tests']
    assert [len(of_seeds) for of_seeds in tests.values()] == [5] * len(TRAININGS)
    for table in (anchoring.metrics_table(tests), anchoring.changes_table(tests)):
        assert table.markdown() in page
