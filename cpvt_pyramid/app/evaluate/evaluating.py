"""`cpvt test MODEL DATA`: run any model on annotated images, and say how good it is."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from ..predict.automatic_tiles import with_tiles
from ..predict.opening import ModelFiles, open_model
from ..predict.options import RunOptions
from ..predict.protocol import Model, line_about_threshold
from ..predict.running import predicted_images, with_workers
from ..predictions.kinds import Prediction
from ..tooling.command import UserError
from ..tooling.files import write_text
from ..tooling.pages import html_page
from ..tooling.progress import progress
from .report.common import WORST
from .truth import Truth, read_truth


def evaluate_model(
    files: ModelFiles,
    source: Path,
    options: RunOptions,
    split: Optional[str] = None,
    report: Optional[Path] = None,
) -> dict[str, float]:
    """Evaluate a model on data, print its metrics in percent, and return them.

    Args:
        files: of the model.
        source: a data.yaml or a folder.
        options: how the model is run. By default, boxes of all scores count.
        split: of the data; see `read_truth`.
        report: an HTML page to write.

    Raises:
        UserError: the model or the data cannot be read, or do not fit each other.
    """
    score_thr = 0.0 if options.score_thr is None else options.score_thr
    options = with_workers(options)
    threads = max(options.workers or 0, 1)
    opened = open_model(files, replace(options, score_thr=score_thr), threads=threads)
    if line := line_about_threshold(options.score_thr, opened):
        print(line)
    model = with_tiles(opened, options.tile, options.overlap, progress)
    truth = read_truth(source, model.kind, model.classes, model.palette, split)
    for line in truth.about:
        print(line)
    found = predictions_for(model, truth, options)
    analysis = truth.analyse(found, WORST if report else 0)
    metrics = metrics_in(analysis.numbers)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f'{name:{width}}  {value:.2f}')
    if report is not None:
        title = f'{files.shown}: {source}'
        write_text(report, html_page(title, truth.about[0], analysis.sections))
        print(report)
    return metrics


def predictions_for(
    model: Model, truth: Truth, options: RunOptions
) -> Iterator[tuple[Path, Prediction]]:
    """The predictions of a model for the images of a data set."""
    named = [(path, path.name) for path in truth.images]
    with progress(len(named), 'images') as update:
        for (path, _), found in predicted_images(model, named, options, fail):
            yield path, found
            update(1)


def fail(path: Path, reason: str) -> None:
    raise UserError(f'{path}: {reason}')


def metrics_in(numbers: dict[str, Any]) -> dict[str, float]:
    """The averages of an analysis, in percent."""
    metrics = {}
    for kind, values in numbers.items():
        prefix = 'masks: ' if kind == 'segm' else ''
        for name, value in values.items():
            if isinstance(value, float):
                metrics[f'{prefix}{name}'] = math.nan if math.isnan(value) else 100 * value
    return metrics
