"""Run an exported detector or segmentor on images, without torch and mm.

For each image NAME it writes a picture, NAME.overlay.png, and the predictions, as tools/infer.py:
  detector              NAME.detections.json, boxes as x1, y1, x2, y2 in pixels
  semantic segmentor    NAME.labels.png, class indices as pixel values
With --format, the predictions are also written for other tools; see docs/results.md.

    cpvt run MODEL.onnx --verify [--backend openvino --device GPU]

runs no images, but compares the model's outputs for the synthetic images in the file with those of
PyTorch on this device. The exit status is 1 if they differ.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from ..results.formats import Named, Output
from ..tooling.command import as_called, one_line, run_command
from ..tooling.files import Format
from ..tooling.report import text_table
from ..tooling.threads import ahead, usable_cores


def predict_files(
    model: str,
    inputs: Sequence[str],
    out_dir: str = 'predictions',
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
    format: Optional[Format] = None,
    size: Optional[int] = None,
    device: Optional[str] = None,
    provider: Optional[str] = None,
    workers: Optional[int] = None,
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
        device: device of OpenVINO, such as GPU; by default CPU.
        provider: execution provider of onnxruntime, such as CUDAExecutionProvider; by default CUDA
            if it is installed.
        workers (N): threads that read, predict, draw and write, each with its share of the cores;
            by default one for each core, of which some wait where memory is short. A GPU has one.

    Returns:
        The exit status: 1 if some inputs could not be read, else 0.
    """
    from tqdm import tqdm

    from ..tooling.inputs import find_inputs, is_video, name_results
    from .images import load_image
    from .predictor import Predictor

    found = find_inputs(inputs, out_dir=out_dir)
    if workers is None:
        workers = min(usable_cores(), math.ceil(len(found) / max(batch_size, 1)))
    device = device or provider
    predictor = Predictor(model, backend, batch_size, score_thr, size, device, workers)
    named, folder = name_results(found, out_dir)
    output = Output(folder, format, predictor.model.kind_of_results, predictor.model.classes)
    output.check(named)

    def write_results(batch: Named) -> tuple[list[tuple[Path, str]], list[str]]:
        """The images that were read, and lines about the others."""
        read, images, skipped = [], [], []
        for path, name in batch:
            try:
                if is_video(path):
                    infer = as_called('python tools/infer.py')
                    raise OSError(f'videos need OpenCV; give the model to {infer}')
                images.append(load_image(path))
                read.append((path, name))
            except OSError as error:
                skipped.append(f'runtime: skipped {path}: {one_line(error)}')
        for (path, name), result in zip(read, predictor(images)):
            result.write(folder, name, str(path))
        return read, skipped

    batches = [named[start : start + batch_size] for start in range(0, len(named), batch_size)]
    done: list[tuple[Path, str]] = []
    with tqdm(total=len(named), unit='image', disable=None) as bar:
        for result in ahead(write_results, batches, predictor.threads):
            read, skipped = result()
            for line in skipped:
                tqdm.write(line, file=sys.stderr)
            done += read
            bar.update(len(read) + len(skipped))
    output.write(done)
    output.report(done, len(named))
    return int(len(done) < len(named))


def verify_model(
    model: str,
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    device: Optional[str] = None,
    provider: Optional[str] = None,
) -> int:
    """Compare a model's outputs with those of PyTorch in its file.

    Args:
        model (MODEL): a .onnx file of tools/export.py.
        backend: what runs the model.
        device: device of OpenVINO, such as GPU; by default CPU.
        provider: execution provider of onnxruntime, such as CUDAExecutionProvider; by default CUDA
            if it is installed.

    Returns:
        The exit status: 1 if the outputs differ, else 0.
    """
    from ..tooling.inputs import local_path
    from .comparison import HEAD, verdict
    from .self_test import verify_session
    from .sessions import open_session

    path = local_path(model)
    session = open_session(path, backend, device or provider)
    checks = verify_session(path, session)
    print(text_table(HEAD, [check.cells for check in checks]))
    print(f'{path}, {session.device}: {verdict(checks)}')
    return int(not all(check.passed for check in checks))


def main(argv: Optional[Sequence[str]] = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    if '--verify' in given:
        return run_command(verify_model, [option for option in given if option != '--verify'])
    return run_command(predict_files, given, 'finished results are in {out_dir}')


if __name__ == '__main__':
    sys.exit(main())
