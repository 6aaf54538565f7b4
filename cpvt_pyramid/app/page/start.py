"""`cpvt app`: open a model, read its samples, and serve the page."""

import errno
import sys
from pathlib import Path
from typing import Optional

from ..config.shipped import is_config_name
from ..predict.exported import SessionModel
from ..predict.opening import SERVING, open_model, resolve_model
from ..predict.options import ModelOptions
from ..predict.protocol import line_about_threshold
from ..predict.sessions import backend_for
from ..tooling.command import UserError, one_line
from ..tooling.files import full_if_current
from ..tooling.report import amount
from .server import Page, Server, check_report, printable, read_samples


def serve(
    model: str,
    *,
    samples: Optional[str],
    host: str,
    port: int,
    options: ModelOptions,
) -> None:
    """Serve the page until it is interrupted; see `cpvt app` for the arguments."""
    if is_config_name(model):
        command = f'cpvt export {model} CHECKPOINT --out FILE.onnx'
        raise UserError(f'{model} is a config; export its model: {command}')
    if samples and not Path(samples).is_dir():
        what = 'it is a file' if Path(samples).exists() else 'there is none'
        raise UserError(f'--samples must be a folder of images, got {samples}: {what}')
    files, _ = resolve_model(model, accepted=SERVING)
    if files.exported is not None:
        check_report(files.exported, backend_for(files.exported, options))
    elif files.trained is None:
        raise UserError(
            f'{model} must be {SERVING.kinds}; cpvt export makes a .onnx file of a checkpoint'
        )
    opened = open_model(files, options)
    assert isinstance(opened, SessionModel)
    if line := line_about_threshold(options.score_thr, opened):
        print(line)
    folder = Path(samples) if samples else samples_of(opened.path)
    page = Page(opened, read_samples(folder))
    try:
        server = Server(page, host, port)
    except (OSError, OverflowError) as error:  # a port above 65535
        advice = ''
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            advice = '; choose another --port, or --port 0, which takes a free one'
        raise UserError(f'cannot listen on {host}:{port}: {one_line(error)}{advice}') from error
    print(f'{server.url}, {line_about_samples(page, folder)}; stop it with Ctrl-C')
    if not server.is_private:
        print('every machine that reaches this one can use the page, without a password')
    sys.stdout.flush()
    server.run([server.listener])


def line_about_samples(page: Page, folder: Path) -> str:
    where = printable(full_if_current(folder))
    if not page.samples:
        return f'without samples, as there are no images in {where}'
    return f'with {amount(len(page.samples), "sample")} of {where}'


def samples_of(model: Path) -> Path:
    """The folder with the images of a model: the one with its name, or else its own."""
    named = model.with_suffix('')
    if named.is_dir():
        return named
    return model.parent
