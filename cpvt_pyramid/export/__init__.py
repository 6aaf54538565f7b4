"""Export of whole models: one graph for all sizes and batches, verified before it is written.

base.py, what an exportable model is; resizing.py, resizing and pooling as matrix products; nms.py,
non-maximum suppression with a fixed number of results; labels.py, label maps; models.py, backbones,
and the choice of the form; onnx_file.py, capture and translation; verification.py, the comparison
with PyTorch; files.py, all of this. These need torch, onnx and onnxruntime alone, the others the mm
packages: mm_model.py, what detectors and segmentors share, and a file for each kind.
"""

from ..ops.dispatch import require_torch

require_torch((2, 7), 'cpvt_pyramid.export')
