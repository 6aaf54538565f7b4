"""Exported models on numpy, Pillow and onnxruntime or OpenVINO, without torch and OpenMMLab.

from cpvt_pyramid.predict import Predictor

found = Predictor('model.onnx')('photo.jpg')
found.draw().save('overlay.png')

cpvt run model.onnx 'photos/*.jpg' --out-dir predictions
"""

from ..tooling.command import UserError
from .predictions import Detections, LabelMap
from .predictor import Predictor

__all__ = ['Detections', 'LabelMap', 'Predictor', 'UserError']
