"""`cpvt test MODEL DATA`: run any model on annotated images, and say how good it is."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..images.rasters import ReadError
from ..predict.automatic_tiles import with_tiles
from ..predict.opening import ModelFiles, open_model
from ..predict.protocol import Model, Prepared, TooLarge, predict_all
from ..predict.sessions import SessionError
from ..predictions.kinds import Prediction
from ..tooling.command import UserError, one_line
from ..tooling.files import write_text
from ..tooling.pages import html_page
from ..tooling.progress import progress
from .report.common import WORST
from .truth import Truth, read_truth


class EvaluationOptions(NamedTuple):
    """See the arguments of `cpvt test`."""

    split: Optional[str] = None
    report: Optional[Path] = None
    device: Optional[str] = None
    backend: Optional[str] = None
    dtype: str = 'float32'
    batch_size: int = 1
    tile: Optional[int] = None
    overlap: Optional[int] = None
    cfg_options: Sequence[str] = ()


def evaluate_model(files: ModelFiles, source: Path, options: EvaluationOptions) -> dict[str, float]:
    """Evaluate a model on data, print its metrics in percent, and return them.

    Raises:
        UserError: the model or the data cannot be read, or do not fit each other.
    """
    opened = open_model(
        files,
        device=options.device,
        score_thr=0.0,
        backend=options.backend,
        dtype=options.dtype,
        cfg_options=options.cfg_options,
    )
    model = with_tiles(opened, options.tile, options.overlap, progress)
    truth = read_truth(source, model.kind, model.classes, model.palette, options.split)
    for line in truth.about:
        print(line)
    found = predictions_for(model, truth, options.batch_size)
    analysis = truth.analyse(found, WORST if options.report else 0)
    metrics = metrics_in(analysis.numbers)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f'{name:{width}}  {value:.2f}')
    if options.report is not None:
        shown = files.exported or files.trained or files.checkpoint
        write_text(
            options.report, html_page(f'{shown}: {source}', truth.about[0], analysis.sections)
        )
        print(options.report)
    return metrics


def predictions_for(
    model: Model, truth: Truth, batch_size: int
) -> Iterator[tuple[Path, Prediction]]:
    """The predictions of a model for the images of a data set, in their order."""

    def prepared() -> Iterator[Prepared]:
        for path in truth.images:
            try:
                yield model.prepare(model.read(path))
            except (ReadError, TooLarge) as error:
                raise UserError(f'{path}: {one_line(error)}') from error

    paths = iter(truth.images)
    results = predict_all(model.predict, prepared(), batch_size, model.threads)
    with progress(len(truth.images), 'images') as update:
        try:
            for found in results:
                yield next(paths), found
                update(1)
        except (SessionError, TooLarge) as error:
            raise UserError(f'the model fails on {next(paths)}: {one_line(error)}') from error


def metrics_in(numbers: dict[str, Any]) -> dict[str, float]:
    """The averages of an analysis, in percent."""
    metrics = {}
    for kind, values in numbers.items():
        prefix = 'masks: ' if kind == 'segm' else ''
        for name, value in values.items():
            if isinstance(value, float):
                metrics[f'{prefix}{name}'] = math.nan if math.isnan(value) else 100 * value
    return metrics
