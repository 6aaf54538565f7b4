"""Predictions for images: models, the files of results, and what draws them.

    from cpvt_pyramid.app.predict import Predictor

    found = Predictor('model.onnx')('photo.jpg')
    found.draw().save('overlay.png')

Exported models run on numpy, Pillow and onnxruntime or OpenVINO, without torch and OpenMMLab.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported on first use: the options of commands, for --help, need nothing of it.
_PUBLIC = {
    'Detections': '..predictions.kinds',
    'LabelMap': '..predictions.kinds',
    'Predictor': '.predictor',
    'UserError': '..tooling.command',
}
if TYPE_CHECKING:
    from ..predictions.kinds import Detections as Detections
    from ..predictions.kinds import LabelMap as LabelMap
    from ..tooling.command import UserError as UserError
    from .predictor import Predictor as Predictor

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
