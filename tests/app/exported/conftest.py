"""Tests of exported models, each in an empty folder."""

from tiny_onnx import model as model
from tiny_onnx import photos as photos
