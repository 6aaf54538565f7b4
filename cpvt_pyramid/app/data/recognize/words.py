"""The words by which names of files and folders are understood."""

import re

WORD = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
IMAGE_WORDS = set(
    'image images img imgs jpeg jpg png rgb sat photo photos picture pictures input inputs '
    'leftimg8bit jpegimages'.split()
)
MASK_WORDS = set(
    'mask masks gt groundtruth ground truth seg segmentation segmentations segmap semantic semseg '
    'labelids labeltrainids gtfine gtcoarse lbl target targets label labels annotation annotations '
    'annot ann anns segmentationclass segmentationclassraw'.split()
)
KIND_WORDS = IMAGE_WORDS | MASK_WORDS | {'xml', 'xmls', 'txt', 'class', 'dir', 'bbox', 'boxes'}
TRIED = 20  # files of a folder whose beginnings are looked at
SHOWN = 4
