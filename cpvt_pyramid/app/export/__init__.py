"""Export of whole models, and what is done with exported files: verification and INT8.

base.py, what an exportable model is; resizing.py, resizing and pooling as matrix products; nms.py,
non-maximum suppression with a fixed number of results; labels.py, label maps; whole_model.py, what
detectors and segmentors share; anchors.py, boxes from anchors; segmentors.py, the class of each
pixel; trained_models.py, trained models by name; models.py, backbones, and the choice of the form;
onnx_file.py, capture and translation; onnx_attention.py, attention in blocks of queries;
verification.py, the comparison with PyTorch; files.py, all of this; exporting.py, from what a user
calls a model to the file. These need torch, onnx and onnxruntime and, for detectors, torchvision.
mm_model.py and a file for each kind of OpenMMLab's models (detectors.py, two_stage.py, dino.py,
mm_segmentors.py, mask2former.py) need the mm packages.

Files on exported models need no torch: comparison.py compares outputs, self_test.py with those of
PyTorch that a file carries; batches.py is for `cpvt verify`; quantization.py and accuracy.py are
for `cpvt quantize`.
"""
