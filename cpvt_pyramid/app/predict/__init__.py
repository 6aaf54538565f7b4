"""Predictions for images: models, the files of results, and what draws them.

    from cpvt_pyramid.app.predict import Predictor

    found = Predictor('model.onnx')('photo.jpg')
    found.draw().save('overlay.png')

Exported models run on numpy, Pillow and onnxruntime or OpenVINO, without torch and OpenMMLab.
"""

from ..predictions.kinds import Detections, LabelMap
from ..tooling.command import UserError
from .predictor import Predictor

__all__ = ['Detections', 'LabelMap', 'Predictor', 'UserError']
