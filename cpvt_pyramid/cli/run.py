"""Run an exported detector or segmentor on images, without torch and OpenMMLab.

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
from typing import Literal, Optional

from ..tooling.command import program_name, run_command
from ..tooling.files import Format
from ..tooling.threads import usable_cores


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
            and OpenMMLab are installed.
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
            by default one for each core, of which some wait where memory is short. A GPU serves
            one at a time.
        no_pictures: write no NAME.overlay.jpg, to be faster with a small model.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from tqdm import tqdm

    from ..predict.files import write_predictions
    from ..predict.formats import Output
    from ..predict.predictor import Predictor
    from ..tooling.inputs import Named, find_inputs, name_results
    from ..tooling.progress import progress

    found = find_inputs(inputs, out_dir=out_dir)
    if workers is None:
        batches = math.ceil(len(found) / max(batch_size, 1))
        workers = min(usable_cores(), batches)
    predictor = Predictor(model, backend, batch_size, score_thr, size, device or provider, workers)
    named, folder = name_results(found, out_dir)
    output = Output(folder, format, predictor.model.kind_of_results, predictor.model.classes)
    output.check(named)

    done: list[Named] = []
    start = time.monotonic()
    with progress(len(named), 'images') as update:

        def report(entry: Named, reason: Optional[str]) -> None:
            if reason is None:
                done.append(entry)
            else:
                line = f'{program_name(run)}: skipped {entry[0]}: {reason}'
                tqdm.write(line, file=sys.stderr)
            update(1)

        write_predictions(predictor, named, folder, not no_pictures, report)
    seconds = time.monotonic() - start
    output.write(done)
    output.report(done, len(named))
    if done:
        print(f'{len(done) / seconds:.3g} images per second, reading and writing included')
    return int(len(done) < len(named))


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(run, argv, 'finished results are in {out_dir}')
