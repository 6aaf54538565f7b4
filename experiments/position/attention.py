"""What chosen queries attend to, and where the position signal is similar."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from cpvt_pyramid.lab.probes import Subject, attention_weights, images_of, position_similarity
from experiments import figures
from experiments.report import LabAnswer, make_table
from experiments.training import one_thread

from .groups import groups_of, origin_of
from .laboratory import Lab

SIGNAL_IMAGES = 16  # times as many images of the lab's models for the position signal
MOST_LAYERS = 8  # that are drawn
QUERIES = ((0.1, 0.1), (0.5, 0.5), (0.85, 0.7))  # y and x, as shares of the side
PLACES = ((0, 0), (0, 1), (0.5, 0.5), (1, 0), (1, 1))  # whose position signals are compared


class Attended(NamedTuple):
    """What is measured of a model."""

    image: Tensor  # (3, H, W)
    weights: Sequence[Tensor]  # (heads, queries, keys) of each attention for this image
    similarities: Sequence[Tensor]  # (h, w, h, w) of the position signals of each map


def measure_attention(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    groups = groups_of(lab, models, side)
    data = {}
    pictures = []
    rows = []
    for number, group in enumerate(groups):
        # Few images hide a weak signal, and the lab's models are cheap.
        count = group.images * (SIGNAL_IMAGES if group.runs else 1)
        images = images_of('natural', count, group.side, lab.seed)
        with one_thread():
            found = attended(group.subjects[0], images)
        near_far = [near_and_far(similarity) for similarity in found.similarities]
        rows.append([group.name, *(f'{near:.2f} / {far:.2f}' for near, far in near_far)])
        data[group.name] = {
            'similarity': [dict(near=near, far=far) for near, far in near_far],
            'attentions': len(found.weights),
        }
        pictures.append(f'attention-{number}.png')
        draw_attention(lab.folder / pictures[-1], group.name, found)
    most = max(map(len, rows)) - 1
    title = 'Cosine similarity of the position signal: neighbours / opposite ends of the map'
    table = make_table(title, ['', *(f'map {i}' for i in range(most))], rows)
    notes = [
        origin_of(groups) + ' Pictures show the first seed.',
        'Attention: the weights of three queries, averaged over the heads, on a photograph; '
        'attentions within windows are left out. Similarity: of the position signal (the mean '
        f'over {count} photographs at a place, less the mean over places) of five places with all '
        'others, from -1 (blue) to 1 (red).',
    ]
    return LabAnswer('attention', 'What is attended to?', notes, [table], pictures, data)


def attended(subject: Subject, images: Tensor) -> Attended:
    weights = attention_weights(subject, images[:1])
    similarities = [position_similarity(map_) for map_ in subject.maps(images)]
    return Attended(images[0], weights, similarities)


def near_and_far(similarity: Tensor) -> tuple[float, float]:
    """The mean similarity of horizontal and vertical neighbours, and of opposite places."""
    height, width = similarity.shape[:2]
    vertical = []
    horizontal = []
    opposite = []
    for i in range(height):
        for j in range(width):
            if i + 1 < height:
                vertical.append(similarity[i, j, i + 1, j])
            if j + 1 < width:
                horizontal.append(similarity[i, j, i, j + 1])
            other = (height - 1 - i, width - 1 - j)
            if other != (i, j):
                opposite.append(similarity[(i, j, *other)])
    near = torch.stack(vertical + horizontal).mean()
    return float(near), float(torch.stack(opposite).mean())


# The figure: a row for each query with the attentions, then one for each place with the maps


def draw_attention(path: Path, name: str, found: Attended) -> None:
    count = min(len(found.weights), MOST_LAYERS)
    layers = np.linspace(0, len(found.weights) - 1, count).astype(int)
    queries = QUERIES if found.weights else ()
    rows = len(queries) + len(PLACES)
    columns = 1 + max(len(found.similarities), len(layers), 1)
    size = (1.6 * columns + 0.9, 1.65 * rows)
    right = 1 - 0.95 / size[0]
    top = 1 - 0.8 / size[1]
    space = dict(wspace=0.06, hspace=0.2, left=0.01, right=right, bottom=0.01, top=top)
    with figures.figure(path, rows, columns, size, 'none', gridspec_kw=space) as (fig, axes):
        for axis in axes.flat:
            figures.without_axes(axis)
        if queries:
            drawn = draw_queries(axes[: len(queries)], found, layers)
            figures.scale_beside(axes[: len(queries)], drawn, right, 'attention')
        drawn = draw_similarities(axes[len(queries) :], found)
        figures.scale_beside(axes[len(queries) :], drawn, right, 'cosine similarity')
        fig.suptitle(f'{name}: attention of three queries, similarity of the position signal')


def draw_queries(axes: Any, found: Attended, layers: Sequence[int]) -> Any:
    """A row for each query; returns a picture that has the color scale of all."""
    grids = [[query_map(found.weights[i], spot) for i in layers] for spot in QUERIES]
    known = [float(grid.max()) for row in grids for grid in row if grid is not None]
    most = max(known, default=1.0)
    drawn = None
    for (y, x), (first, *others), of_query in zip(QUERIES, axes, grids):
        figures.show_picture(first, found.image)
        side = found.image.shape[1]
        first.plot(x * side, y * side, 'o', ms=7, mfc='none', mec='red', mew=2)
        for axis, grid in zip(others, of_query):
            if grid is not None:
                drawn = axis.imshow(grid, cmap='viridis', vmin=0, vmax=most)
    figures.name_columns(axes[0], ['query', *(f'attention {i}' for i in layers)])
    return drawn


def draw_similarities(axes: Any, found: Attended) -> Any:
    """A row for each place; returns a picture that has the color scale of all."""
    drawn = None
    for place, (first, *others) in zip(PLACES, axes):
        sketch = np.zeros((9, 9))
        sketch[tuple(round(8 * share) for share in place)] = 1
        first.imshow(sketch, cmap='Greys', vmin=-0.15)
        for axis, similarity in zip(others, found.similarities):
            height, width = similarity.shape[:2]
            at = (round(place[0] * (height - 1)), round(place[1] * (width - 1)))
            drawn = axis.imshow(similarity[at], cmap='RdBu_r', vmin=-1, vmax=1)
    titles = ['similarity to', *(f'map {i}' for i in range(len(found.similarities)))]
    figures.name_columns(axes[0], titles)
    return drawn


def query_map(weights: Tensor, spot: tuple[float, float]) -> Optional[Tensor]:
    """(h, w), the attention of the query at a spot, averaged over heads; None if the keys are no
    square map. A class token, if there is one, is left out."""
    mean = weights.mean(0)
    queries, keys = mean.shape
    query_side = math.isqrt(queries)
    key_side = math.isqrt(keys)
    extra_queries = queries - query_side**2
    extra_keys = keys - key_side**2
    if extra_queries > 1 or extra_keys > 1 or key_side < 2:
        return None
    mean = mean[extra_queries:, extra_keys:]
    row, column = (min(query_side - 1, int(share * query_side)) for share in spot)
    return mean[row * query_side + column].view(key_side, key_side)
