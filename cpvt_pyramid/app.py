"""A web page to try an exported model: predictions for an image, alone and in a padded batch.

A second image joins the first in a batch, and the page shows how much that changes the predictions
for the first.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

import numpy as np

from .results.predictions import Detections, Prediction
from .runtime.comparison import HEAD, verdict
from .runtime.images import Source, load_image
from .runtime.predictor import ExportedModel
from .runtime.self_test import verify_session
from .tooling.command import UserError, one_line, optional_package, run_command
from .tooling.inputs import IMAGES, local_path
from .tooling.report import markdown_table

if TYPE_CHECKING:
    import gradio
    from PIL.Image import Image

SIZES = (32, 1333)  # pixels, of the slider


def alone_and_together(
    model: ExportedModel, image: Optional[Source], second: Optional[Source], size: int, score: float
) -> tuple[Optional['Image'], Optional['Image'], str]:
    """Pictures of the predictions for an image alone and in a batch with a second one, and a
    sentence about both.

    size: shorter side of the input, in pixels. score: leave out boxes with a lower score.
    """
    if image is None:
        return None, None, ''
    model, first = model.with_size(size), load_image(image)
    (alone,) = model.predict([first], score)
    found = alone.summary() or 'nothing'
    if second is None:
        return alone.draw(), None, f'{found}.'
    batch = [first, load_image(second)]
    together = model.predict(batch, score)[0]
    height, width = np.max([model.to_input_size(image).shape[:2] for image in batch], axis=0)
    text = (
        f'{found}. In a batch with the second image, padded to {width} x {height}: '
        f'{difference_in_words(alone, together)}.'
    )
    return alone.draw(), together.draw(), text


def self_test(model: ExportedModel) -> str:
    """Whether the file gives the results of PyTorch on this device: a verdict and a table."""
    checks = verify_session(model.path, model.session)
    table = markdown_table(HEAD, [check.cells for check in checks])
    return f'{model.session.device}: {verdict(checks)}\n\n{table}'


def difference_in_words(alone: Prediction, together: Prediction) -> str:
    """How two predictions for an image differ, in words."""
    if not isinstance(alone, Detections):
        changed = int((alone.labels != together.labels).sum())
        return f'{changed} of {alone.labels.size} pixels have another class'
    if not np.array_equal(alone.labels, together.labels):
        return f'other boxes, {len(together)} instead of {len(alone)}'
    pixels, scores = (
        np.abs(getattr(alone, name) - getattr(together, name)).max(initial=0)
        for name in ('boxes', 'scores')
    )
    text = f'the same boxes to within {pixels:.1g} pixels, and scores to within {scores:.1g}'
    if alone.masks is None:
        return text
    return f'{text}; {int((alone.masks != together.masks).sum())} mask pixels differ'


def build_page(model: ExportedModel, samples: Sequence[Path] = ()) -> 'gradio.Blocks':
    """The page, not yet served, with samples to pick from."""
    os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')  # nothing leaves this machine
    gradio = optional_package('gradio', 'the page', "'cpvt_pyramid[app]'")

    def called(function: Callable, *inputs: Any) -> Any:
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter('always', UserWarning)
                result = function(model, *inputs)
        except (UserError, OSError) as error:
            raise gradio.Error(str(error)) from error
        for note in notes:
            gradio.Warning(str(note.message))
        return result

    size = model.resize[0] if model.resize else 512
    detects = model.about['task'] != 'segmentation'
    # Files as they are: gradio would clip values of more than 8 bits.
    given = {'type': 'filepath', 'image_mode': None, 'height': 260}
    drawn = {'interactive': False, 'format': 'png', 'height': 420}
    with gradio.Blocks(title=model.path.name) as page:
        about = f'{model.about.get("arch", "")}, {model.about["task"]}'
        gradio.Markdown(
            f'## {model.path.name}\n{about}. Drop an image or pick a sample. A second image '
            'joins it in a padded batch, which changes nothing.'
        )
        with gradio.Row():
            image = gradio.Image(label='Image', **given)
            second = gradio.Image(label='Second image, in the same batch', **given)
            with gradio.Column():
                side = gradio.Slider(
                    *(min(SIZES[0], size), max(SIZES[1], size), size), step=1,
                    label='Shorter side of the input, in pixels',
                )  # fmt: skip
                score = gradio.Slider(
                    0, 1, model.about['score_thr'], step=0.01, label='Lowest score', visible=detects
                )
                text = gradio.Textbox(label='Result', lines=4)
        with gradio.Row():
            pictures = [gradio.Image(label=label, **drawn) for label in ('Alone', 'In the batch')]
        if names := list(map(str, samples)):
            with gradio.Row():
                for target in (image, second):
                    gradio.Examples(names, target, label=f'{target.label}: samples')
        gradio.on(
            [image.change, second.change, side.release, score.release],
            partial(called, alone_and_together),
            [image, second, side, score],
            [*pictures, text],
            api_name='predict',
        )
        button, found = gradio.Button('Compare this device with PyTorch'), gradio.Markdown()
        button.click(partial(called, self_test), None, found, api_name='verify')
    return page


def serve(
    model: str,
    samples: Optional[str] = None,
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    host: str = '127.0.0.1',
    port: int = 7860,
) -> None:
    """Serve the page until it is interrupted.

    Args:
        model (MODEL): a .onnx file of tools/export.py.
        samples (DIR): folder of images to pick from; by default that of the model.
        backend: what runs the model.
        host: address to listen on; 0.0.0.0 lets other machines in.
        port: port to listen on.
    """
    exported = ExportedModel(local_path(model), backend)
    folder = Path(samples or Path(model).parent)
    if not folder.is_dir():
        raise UserError(f'no folder at {folder}')
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)
    page = build_page(exported, files)
    try:
        page.launch(
            server_name=host, server_port=port, allowed_paths=[str(folder)], footer_links=[]
        )
    except OSError as error:
        raise UserError(f'cannot listen on {host}:{port}: {one_line(error)}') from error


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(serve, argv, 'the page is closed')


if __name__ == '__main__':
    sys.exit(main())
