"""Serve a web page on which anyone can try an exported or a trained model.

    cpvt app MODEL.onnx
    cpvt app retinanet_pvt_v2_b2_coco

The page is also an interface for other programs:

    curl --data-binary @photo.jpg 'http://127.0.0.1:7860/predict?size=600&score_thr=0.5'

answers JSON with `summary`, `warnings`, `picture` (a data URL) and, of a detector, `detections`, or
with an `error` of one line. The parameters are optional.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from ..tooling.command import UserError, imports_of, one_line, run_command


def app(
    model: str,
    *,
    samples: Optional[str] = None,
    backend: Optional[Literal['onnxruntime', 'openvino']] = None,
    host: str = '127.0.0.1',
    port: int = 7860,
) -> None:
    """Serve the page until it is interrupted.

    Args:
        model: a .onnx file of cpvt export, or the name of a trained model (cpvt models), which
            needs torch.
        samples: folder of images to pick from, which everyone who opens the page sees; by
            default the folder with the model's name, or else the model's folder.
        backend: what runs an exported model; by default onnxruntime.
        host: address to listen on; 0.0.0.0 lets other machines in, without a password.
        port: port to listen on; 0 takes a free one.
    """
    from ..predict.exported import SessionModel
    from ..predict.opening import open_model, resolve_model

    with imports_of('cpvt app', extra='app'):
        from ..page.server import Page, Server, check_report, printable, read_samples

    files, _ = resolve_model(model)
    if files.exported is not None:
        check_report(files.exported, backend or 'onnxruntime')
    elif files.trained is None:
        raise UserError(f'{model} is a checkpoint; export it to a .onnx file with cpvt export')
    opened = open_model(files, backend=backend)
    assert isinstance(opened, SessionModel)
    folder = Path(samples) if samples else samples_of(opened.path)
    if not folder.is_dir():
        raise UserError(f'no folder at {folder}')
    page = Page(opened, read_samples(folder))
    try:
        server = Server(page, host, port)
    except (OSError, OverflowError) as error:  # a port above 65535
        raise UserError(f'cannot listen on {host}:{port}: {one_line(error)}') from error
    where = printable(str(folder))
    print(f'{server.url}, with {len(page.samples)} samples of {where}; stop it with Ctrl-C')
    if not server.is_private:
        print('every machine that reaches this one can use the page, without a password')
    sys.stdout.flush()
    server.run([server.listener])


def samples_of(model: Path) -> Path:
    """The folder with the images of a model: the one with its name, or else its own."""
    named = model.with_suffix('')
    if named.is_dir():
        return named
    return model.parent


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(app, argv, 'the page is closed')
