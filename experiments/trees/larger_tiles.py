"""Test detectors of trees on larger tiles than the crops of their training, by position encoding.

    cpvt demo-data trees
    python -m experiments.trees --arms distilled learned rope rope+peg
    python -m experiments.trees.larger_tiles

A photograph of Yellowstone that was not trained on is cut into tiles of one, two and four times the
side of the training crops. Coordinates of RoPE and of the learned table count tokens, as in the
training, or are scaled to the length of a crop; the weights are the same. Prints and writes a table
with the AP50 and one with what scaling changes, and a figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from cpvt_pyramid.tooling.command import UserError, check_at_least, prepare_for_torch, run_command
from cpvt_pyramid.tooling.files import make_folder, write_text
from cpvt_pyramid.tooling.threads import usable_cores

from .runs import CROP, runs_of

prepare_for_torch()  # before torch is imported

TILES = (CROP, 2 * CROP, 4 * CROP)  # sides in pixels; each divides the next
COUNTED, NORMALIZED = 'counted', 'normalized'
KINDS = (COUNTED, NORMALIZED)
PEG = 'distilled'  # the arm that has no coordinates
ENCODINGS = {  # by arm of the training
    PEG: 'PEG',
    'learned': 'learned table',
    'rope': 'RoPE',
    'rope+peg': 'RoPE and PEG',
}
PHOTOGRAPH = 'Yellowstone'

# AP50 of each run, by arm, kind of coordinates and name of the tiles
Results = dict[str, list[dict[str, dict[str, float]]]]


def larger_tiles(*, work_dir: str = 'work_dirs/trees_seeds', workers: Optional[int] = None) -> None:
    """Test all that is trained, and print the tables.

    Args:
        work_dir: folder of the trainings, and of the results
        workers: tests at the same time, of one thread each (default: the number of cores)
    """
    check_at_least('--workers', workers, 1)
    folder = make_folder(work_dir)
    runs = {arm: runs_of(arm, folder) for arm in ENCODINGS}
    seeds = {arm: [run.name.rsplit('-')[-1] for run in of_arm] for arm, of_arm in runs.items()}
    if any(of_arm != seeds[PEG] for of_arm in seeds.values()):
        found = ', '.join(f'{arm}: {" ".join(of_arm)}' for arm, of_arm in seeds.items())
        raise UserError(f'all encodings need the same seeds, but {folder} has {found}')

    from experiments.parallel import groups_in_parallel

    jobs = {arm: [(measure, (run,)) for run in of_arm] for arm, of_arm in runs.items()}
    results = groups_in_parallel(jobs, workers or usable_cores(), 'tests')
    text = '\n\n'.join(table.markdown() for table in tables(results))
    draw(results, folder / 'larger_tiles.png')
    write_text(folder / 'larger_tiles.md', text + '\n')
    write_text(folder / 'larger_tiles.json', json.dumps(results, indent=1) + '\n')
    print(text)
    print(f'\n{folder / "larger_tiles.md"}; figure: {folder / "larger_tiles.png"}')


def measure(run: Path) -> dict[str, dict[str, float]]:
    """The AP50 of a finished training for each kind of coordinates and each of `TILES`."""
    import torch
    from mmdet.apis import init_detector
    from mmengine.config import Config

    from cpvt_pyramid.predict.images import load_image
    from experiments.position.coordinates import Coordinates, scale_coordinates

    from .runs import PHOTOGRAPHS, files_of, load_truth

    torch.set_num_threads(1)
    config, checkpoint = files_of(run)
    cfg = Config.fromfile(str(config))
    model = init_detector(cfg, checkpoint, device='cpu')
    coordinates = Coordinates(rescale=1)
    scale_coordinates(model.backbone, coordinates, CROP)
    root = Path(cfg.data_root)
    split, file = PHOTOGRAPHS[PHOTOGRAPH]
    photograph = load_image(root / split / file)
    truth = whole_trees(load_truth(root, split), file)
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        coordinates.normalized = kind == NORMALIZED
        found[kind] = {}
        for tile in TILES:
            found[kind][tile_name(tile)] = precision_of(model, photograph, truth, tile)
    return found


def precision_of(model: Any, photograph: Any, truth: Any, tile: int) -> float:
    """The AP50 in a photograph that is cut into tiles of this side.

    Args:
        model: a detector.
        photograph: (H, W, 3).
        truth: of `whole_trees`.
        tile: the side.
    """
    import numpy as np

    from benchmarks.models.detections import detect

    from .runs import precision

    boxes = []
    scores = []
    for top, left in corners(tile):
        part = photograph[top : top + tile, left : left + tile]
        found, score = detect(model, part)
        boxes.append(found + np.array([left, top, left, top]))
        scores.append(score)
    [image_id] = truth.imgs
    all_found = np.concatenate(boxes), np.concatenate(scores)
    return precision(truth, {image_id: all_found})['AP50']


def corners(tile: int) -> list[tuple[int, int]]:
    """Top and left of the tiles of this side in the largest tile."""
    steps = range(0, TILES[-1], tile)
    return [(top, left) for top in steps for left in steps]


def whole_trees(truth: Any, file: str) -> Any:
    """The annotations of the largest tile, from those of a split.

    Trees that the border of a smallest tile cuts count neither as found nor as missed, whatever
    the tiles are, so that only what a detector sees around a tree differs.
    """
    import contextlib
    import io

    from pycocotools.coco import COCO

    [image] = [one for one in truth.dataset['images'] if one['file_name'] == file]
    kept = []
    for annotation in truth.imgToAnns[image['id']]:
        left, top, width, height = annotation['bbox']
        if left >= TILES[-1] or top >= TILES[-1]:
            continue
        right, bottom = left + width, top + height
        is_whole = (
            left // CROP == (right - 1) // CROP
            and top // CROP == (bottom - 1) // CROP
            and right <= TILES[-1]
            and bottom <= TILES[-1]
        )
        kept.append({**annotation, 'iscrowd': 0 if is_whole else 1})
    found = COCO()
    found.dataset = dict(
        images=[image], annotations=kept, categories=truth.dataset['categories'], info={}
    )
    with contextlib.redirect_stdout(io.StringIO()):
        found.createIndex()
    return found


# Tables and figure


def rows_of(results: Results) -> dict[str, tuple[str, str]]:
    """Names of rows, with their arm and kind of coordinates; a PEG has none."""
    rows = {}
    for arm in results:
        if arm == PEG:
            rows[ENCODINGS[arm]] = arm, COUNTED
            continue
        for kind in KINDS:
            rows[f'{ENCODINGS[arm]}: {kind}'] = arm, kind
    return rows


def values_of(results: Results, arm: str, kind: str, tile: int) -> list[float]:
    return [run[kind][tile_name(tile)] for run in results[arm]]


def tables(results: Results) -> list:
    """The AP50; and its change on larger tiles, and by normalized coordinates, paired by seed, with
    p values that are adjusted for the number of differences of a table (Holm)."""
    from experiments.report import Table, paired_table
    from experiments.statistics import estimate

    sizes = [tile_name(tile) for tile in TILES]
    rows = []
    changes = {}
    for name, (arm, kind) in rows_of(results).items():
        cells = [estimate(values_of(results, arm, kind, tile)).show() for tile in TILES]
        rows.append([name, *cells, str(len(results[arm]))])
        at_first = values_of(results, arm, kind, TILES[0])
        changes[name] = [(values_of(results, arm, kind, tile), at_first) for tile in TILES[1:]]
    gains = {}
    for arm, name in ENCODINGS.items():
        if arm != PEG:
            gains[name] = [
                (values_of(results, arm, NORMALIZED, tile), values_of(results, arm, COUNTED, tile))
                for tile in TILES[1:]
            ]
    return [
        Table('AP50 in %, by side of the tiles', ['', *sizes, 'seeds'], rows),
        paired_table(f'Change from tiles of {sizes[0]}', sizes[1:], changes),
        paired_table('Normalized less counted coordinates', sizes[1:], gains),
    ]


def tile_name(tile: int) -> str:
    return f'{tile} px'


def draw(results: Results, path: Path) -> None:
    """AP50 against the side of the tiles: a line for each encoding, dashed with normalized
    coordinates."""
    import numpy as np

    from experiments import figures

    colors = {arm: f'C{i}' for i, arm in enumerate(ENCODINGS)}
    with figures.figure(path, 1, 1, (7.5, 4.4)) as (fig, axes):
        [axis] = axes.flat
        lines = []
        for name, (arm, kind) in rows_of(results).items():
            columns = [values_of(results, arm, kind, tile) for tile in TILES]
            style = '--' if kind == NORMALIZED else '-'
            values = 100 * np.transpose(columns)
            look = dict(color=colors[arm], ls=style, marker='o', label=name)
            lines += figures.curve(axis, TILES, values, **look)
        figures.of_sizes(axis, TILES)
        axis.set_xlabel('side of the tiles, pixels')
        axis.set_ylabel('AP50, %')
        axis.set_ylim(bottom=0)
        figures.legend_below(fig, lines, 3)
        fig.suptitle(f'Detectors of trees, trained on crops of {CROP} pixels')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(larger_tiles, argv)


if __name__ == '__main__':
    sys.exit(main())
