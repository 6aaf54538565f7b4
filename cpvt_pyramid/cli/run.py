"""Run an exported detector or segmentor on images, without torch and mm.

For each image NAME it writes a picture, NAME.overlay.jpg, and the predictions, as cpvt infer:

- detector: NAME.detections.json, boxes as x1, y1, x2, y2 in pixels
- semantic segmentor: NAME.labels.png, class indices as pixel values

With --format, the predictions are also written for other tools; see docs/results.md.
`cpvt verify MODEL.onnx` tells whether a model gives the results of PyTorch on this device.
"""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

import numpy as np

from ..results.formats import Output
from ..tooling.command import one_line, program_name, run_command
from ..tooling.files import Format
from ..tooling.threads import map_in_threads, usable_cores

PROGRESS = (
    '{percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]'
)


def run(
    model: str,
    inputs: Sequence[str],
    *,
    out_dir: str = 'predictions',
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
    size: Optional[int] = None,
    device: Optional[str] = None,
    provider: Optional[str] = None,
    workers: Optional[int] = None,
    no_pictures: bool = False,
) -> int:
    """Run an exported model on images.

    Args:
        model: a .onnx file of cpvt export, or a checkpoint of a training where torch
            and mm are installed.
        inputs: an image, a folder with its subfolders, a quoted pattern such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir: folder for the results.
        backend: what runs the model.
        batch_size: images that pass the model together, if their padded sizes are equal.
        score_thr: leave out boxes with a lower score; by default the model's threshold.
        format: write the predictions in this format, too.
        size: shorter side of the model's input; by default that of the training.
        device: device of OpenVINO, such as GPU; by default CPU.
        provider: execution provider of onnxruntime, such as CUDAExecutionProvider; by default CUDA
            if it is installed.
        workers: threads that read, predict, draw and write, each with its share of the cores;
            by default one for each core, of which some wait where memory is short. A GPU has one.
        no_pictures: write no NAME.overlay.jpg, which takes longer than a small model.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from tqdm import tqdm

    from ..runtime.images import load_image
    from ..runtime.predictor import Predictor
    from ..tooling.inputs import find_inputs, is_video, name_results

    found = find_inputs(inputs, out_dir=out_dir)
    if workers is None:
        workers = min(usable_cores(), math.ceil(len(found) / max(batch_size, 1)))
    device = device or provider
    predictor = Predictor(model, backend, batch_size, score_thr, size, device, workers)
    named, folder = name_results(found, out_dir)
    output = Output(folder, format, predictor.model.kind_of_results, predictor.model.classes)
    output.check(named)

    def read(path: Path) -> np.ndarray:
        if is_video(path):
            raise OSError('videos need OpenCV; give the model to cpvt infer')
        return load_image(path)

    def write_results(batch: list[tuple[Path, str]]) -> list[Optional[str]]:
        """For each image, why it was skipped, or None."""
        images: list[np.ndarray] = []
        names: list[tuple[Path, str]] = []
        outcomes: list[Optional[str]] = []
        for path, name in batch:
            try:
                images.append(read(path))
                names.append((path, name))
                outcomes.append(None)
            except OSError as error:
                outcomes.append(one_line(error))
        for (path, name), result in zip(names, predictor.predict_together(images)):
            result.write(folder, name, str(path), pictures=not no_pictures)
        return outcomes

    def batch_key(entry: tuple[Path, str]) -> Optional[tuple[int, int]]:
        return predictor.batch_key(entry[0])

    done: list[tuple[Path, str]] = []
    start = time.monotonic()
    outcomes = map_in_threads(write_results, named, batch_key, batch_size, predictor.threads)
    with tqdm(total=len(named), unit=' images', disable=None, bar_format=PROGRESS) as bar:
        for entry, reason in zip(named, outcomes):
            if reason is None:
                done.append(entry)
            else:
                line = f'{program_name(run)}: skipped {entry[0]}: {reason}'
                tqdm.write(line, file=sys.stderr)
            bar.update()
    seconds = time.monotonic() - start
    output.write(done)
    output.report(done, len(named))
    if done:
        print(f'{len(done) / seconds:.3g} images per second, reading and writing included')
    return int(len(done) < len(named))


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(run, argv, 'finished results are in {out_dir}')
