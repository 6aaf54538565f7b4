"""Pictures, questions, and what a bag of patches can answer."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations, permutations, product

import numpy as np
import pytest
import torch

from experiments.position.models import CELL, LabModel
from experiments.position.scenes import INKS, LEFTMOST, OTHER, draw_scenes, material
from experiments.position.tasks import TASKS, answers_of, ceilings


def slow_answers(places: Sequence, digits: tuple, grid: tuple) -> dict:
    """The answers of one picture, in plain Python; `places` are (row, column) of A, B and C."""
    (ra, ca), (rb, _), _ = places
    distances = [math.dist(places[i], places[j]) for i, j in ((0, 1), (1, 2), (2, 0))]
    return {
        'leftmost': digits[min(range(3), key=lambda i: places[i][1])],
        'topmost': digits[min(range(3), key=lambda i: places[i][0])],
        'above': int(ra < rb),
        'quadrant': 2 * (ra >= grid[0] / 2) + (ca >= grid[1] / 2),
        'pattern': distances.index(min(distances)),
        'control': max(digits),
    }


def slow_scenes(grid: tuple, digits: list[tuple]):
    cells = list(product(range(grid[0]), range(grid[1])))
    for places in permutations(cells, 3):
        rows, columns = zip(*places)
        if len({*rows}) < 3 or len({*columns}) < 3:
            continue
        if 2 * rows[0] + 1 == grid[0] or 2 * columns[0] + 1 == grid[1]:
            continue
        gaps = sorted(math.dist(a, b) for a, b in combinations(places, 2))
        if gaps[0] != gaps[1]:
            yield from product([places], digits)


@pytest.mark.parametrize('grid', [(4, 4), (3, 5)])
def test_ceiling_of_a_bag_by_brute_force(grid):
    """Every bag of cells with its most frequent answer, counted picture by picture."""
    counts = defaultdict(lambda: defaultdict(Counter))
    for places, digits in slow_scenes(grid, list(permutations((1, 4, 5, 8), 3))):
        for name, label in slow_answers(places, digits, grid).items():
            counts[name][digits][label] += 1  # digits by ink: the bag
    found = ceilings(grid)
    for name, bags in counts.items():
        best = np.mean([max(labels.values()) / labels.total() for labels in bags.values()])
        assert found[name] == pytest.approx(best), name


def test_too_few_cells():
    with pytest.raises(ValueError, match='at least 3 x 3 cells, got 2 x 8'):
        draw_scenes('test', 1, 3, (2, 8))


def test_pictures_are_what_their_labels_say():
    scenes = draw_scenes('train', 50, 3, cell=16)
    labels, inside = answers_of(scenes), 0
    for i in range(50):
        places = list(zip(scenes.rows[i].tolist(), scenes.columns[i].tolist()))
        slow = slow_answers(places, tuple(scenes.digits[i].tolist()), scenes.grid)
        assert {name: int(labels[name][i]) for name in TASKS} == slow
        for digit, ink in enumerate(INKS):
            x1, y1, x2, y2 = scenes.boxes[i, digit].tolist()
            kinds = scenes.pixels[i, y1:y2, x1:x2]
            wanted = LEFTMOST if scenes.columns[i].argmin() == digit else OTHER
            assert set(kinds.unique().tolist()) <= {0, wanted}
            inked = scenes.image[i, :, y1:y2, x1:x2][:, kinds == wanted].mean(1)
            assert inked.argmax() == int(np.argmax(ink))
            inside += (kinds > 0).sum()
    assert (scenes.pixels > 0).sum() == inside


def test_splits_share_nothing():
    # Some plain dark crops look alike, whatever they are from; scans do not.
    scans = [material(split, 8)[1].flatten(1) for split in ('train', 'tuning', 'test')]
    assert all(torch.cdist(a, b).min() > 0.3 for a, b in combinations(scans, 2))
    assert sum(map(len, scans)) == 1797


@pytest.mark.parametrize('class_token', [True, False])
def test_without_position_a_model_sees_a_bag(class_token):
    """Permuted cells: the same classifications. With a PEG they change."""
    torch.manual_seed(0)
    image = draw_scenes('test', 2, 0, (3, 4), CELL).image
    cells = image.view(2, 3, 3, CELL, 4, CELL).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    mixed = cells[:, torch.randperm(12)].view(2, 3, 4, 3, CELL, CELL).permute(0, 3, 1, 4, 2, 5)
    mixed = mixed.reshape(image.shape)
    differences = {}
    for position in ('none', 'peg'):
        model = LabModel(position, class_token=class_token).eval()
        with torch.no_grad():
            a, b = model(image).logits['leftmost'], model(mixed).logits['leftmost']
        differences[position] = (a - b).abs().max()
    assert differences['none'] < 1e-5 < 1e-4 < differences['peg']
