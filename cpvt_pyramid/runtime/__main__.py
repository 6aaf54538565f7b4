"""Run an exported detector or segmentor on images, without torch and mm.

For each image NAME it writes a picture, NAME.overlay.png, and the predictions, as tools/infer.py:
  detector              NAME.detections.json, boxes as x1, y1, x2, y2 in pixels
  semantic segmentor    NAME.labels.png, class indices as pixel values
With --format, the predictions are also written for other tools; see docs/results.md.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, Optional

import numpy as np

from ..results.formats import Output
from ..tooling.command import as_called, one_line, run_command
from ..tooling.files import Format


def predict_files(
    model: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
    size: Optional[int] = None,
) -> int:
    """Run an exported model on images.

    Args:
        model (MODEL): a .onnx file of tools/export.py, or a checkpoint of a training where torch
            and mm are installed.
        inputs (INPUT): an image, a folder with its subfolders, a quoted pattern such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir (DIR): folder for the results.
        backend: what runs the model.
        batch_size (N): images at a time.
        score_thr (SCORE): leave out boxes with a lower score; by default the model's threshold.
        format: write the predictions in this format, too.
        size (PIXELS): shorter side of the model's input; by default that of the training.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from tqdm import tqdm

    from ..tooling.inputs import find_inputs, is_video, name_results
    from .images import load_image
    from .predictor import Predictor

    predictor = Predictor(model, backend, batch_size, score_thr, size)
    named, folder = name_results(find_inputs(inputs, out_dir=out_dir), out_dir)
    output = Output(folder, format, predictor.model.kind_of_results, predictor.model.classes)
    output.check(named)

    def read() -> Iterator[tuple[Path, str, np.ndarray]]:
        for path, name in tqdm(named, unit='image', disable=None):
            try:
                if is_video(path):
                    infer = as_called('python tools/infer.py')
                    raise OSError(f'videos need OpenCV; give the model to {infer}')
                yield path, name, load_image(path)
            except OSError as error:
                tqdm.write(f'runtime: skipped {path}: {one_line(error)}', file=sys.stderr)

    done, images = [], read()
    while batch := list(islice(images, batch_size)):
        results = predictor([image for _, _, image in batch])
        for (path, name, _), result in zip(batch, results):
            result.write(folder, name, str(path))
            done.append((path, name))
    output.write(done)
    output.report(done, len(named))
    return int(len(done) < len(named))


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(predict_files, argv, 'finished results are in {out_dir}')


if __name__ == '__main__':
    sys.exit(main())
