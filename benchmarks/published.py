"""What papers report: names and accuracies of backbones, and of the detectors and segmentors that
our configs train.

PCPVT and SVT: Twins, arXiv 2104.13840, tables 1 to 6; PVT: arXiv 2102.12122, section 5; CPVT: arXiv
2102.10882, section 5.
"""

from typing import NamedTuple


class Backbone(NamedTuple):
    """A published architecture."""

    name: str  # in papers
    short: str  # in names of configs
    top1: float  # on ImageNet


class Recipe(NamedTuple):
    """A training recipe and its published results."""

    config: str  # name of the config, with {} for the backbone's
    head: str
    metrics: dict[str, str]  # task by name
    results: dict[str, tuple[float, ...]]  # values of the metrics by arch; empty: not published


BACKBONES = {
    'pcpvt_small': Backbone('PCPVT-S, CPVTv2-S', 'cpvt_s', 81.2),
    'pcpvt_base': Backbone('PCPVT-B, CPVTv2-B', 'cpvt_b', 82.7),
    'pcpvt_large': Backbone('PCPVT-L, CPVTv2-L', 'cpvt_l', 83.1),
    'pvt_tiny': Backbone('PVT-Tiny', 'pvt_t', 75.1),
    'pvt_small': Backbone('PVT-Small', 'pvt_s', 79.8),
    'pvt_medium': Backbone('PVT-Medium', 'pvt_m', 81.2),
    'pvt_large': Backbone('PVT-Large', 'pvt_l', 81.7),
    'svt_small': Backbone('Twins-SVT-S', 'svt_s', 81.7),
    'svt_base': Backbone('Twins-SVT-B', 'svt_b', 83.2),
    'svt_large': Backbone('Twins-SVT-L', 'svt_l', 83.7),
    'cpvt_tiny': Backbone('CPVT-Ti', 'columnar_cpvt_ti', 73.4),
}
# Tasks, as mim calls them.
BOX = 'Object Detection'
MASK = 'Instance Segmentation'
SEMANTIC = 'Semantic Segmentation'
RETINANET_1X = Recipe(
    'retinanet_{}',
    'RetinaNet',
    {'box AP': BOX},
    dict(
        pcpvt_small=(43.0,),
        pcpvt_base=(44.3,),
        pcpvt_large=(45.1,),
        pvt_tiny=(36.7,),
        pvt_small=(40.4,),
        pvt_medium=(41.9,),
        pvt_large=(42.6,),
        svt_small=(43.0,),
        svt_base=(45.3,),
        svt_large=(45.7,),
    ),
)
SEMANTIC_FPN = Recipe(
    'semantic_fpn_{}',
    'Semantic FPN',
    {'mIoU': SEMANTIC},
    dict(
        pcpvt_small=(44.3,),
        pcpvt_base=(44.9,),
        pcpvt_large=(46.4,),
        pvt_tiny=(35.7,),
        pvt_small=(39.8,),
        pvt_medium=(41.6,),
        pvt_large=(42.1,),
        svt_small=(43.2,),
        svt_base=(45.3,),
        svt_large=(46.7,),
        cpvt_tiny=(),
    ),
)
RECIPES = (
    RETINANET_1X,
    Recipe(
        'retinanet_{}_3x',
        'RetinaNet',
        {'box AP': BOX},
        dict(
            pcpvt_small=(45.2,),
            pcpvt_base=(46.4,),
            pcpvt_large=(),
            svt_small=(45.6,),
            svt_base=(46.9,),
            svt_large=(),
        ),
    ),
    Recipe(
        'mask_rcnn_{}',
        'Mask R-CNN',
        {'box AP': BOX, 'mask AP': MASK},
        dict(
            pcpvt_small=(42.9, 40.0),
            pcpvt_base=(44.6, 40.9),
            pcpvt_large=(45.4, 41.5),
            pvt_tiny=(36.7, 35.1),
            pvt_small=(40.4, 37.8),
            pvt_medium=(42.0, 39.0),
            pvt_large=(42.9, 39.5),
            svt_small=(43.4, 40.3),
            svt_base=(45.2, 41.5),
            svt_large=(45.9, 41.6),
        ),
    ),
    Recipe(
        'mask_rcnn_{}_3x',
        'Mask R-CNN',
        {'box AP': BOX, 'mask AP': MASK},
        dict(
            pcpvt_small=(46.8, 42.6),
            pcpvt_base=(47.9, 43.2),
            pcpvt_large=(),
            svt_small=(46.8, 42.6),
            svt_base=(48.0, 43.0),
            svt_large=(),
        ),
    ),
    SEMANTIC_FPN,
    Recipe(
        'upernet_{}',
        'UPerNet',
        {'mIoU': SEMANTIC, 'mIoU(ms+flip)': SEMANTIC},
        dict(
            pcpvt_small=(46.2, 47.5),
            pcpvt_base=(47.1, 48.4),
            pcpvt_large=(48.6, 49.8),
            svt_small=(46.2, 47.1),
            svt_base=(47.7, 48.9),
            svt_large=(48.8, 50.2),
        ),
    ),
    Recipe('dino_{}', 'DINO', {'box AP': BOX}, dict(pcpvt_small=())),
    Recipe('mask2former_{}', 'Mask2Former', {'mIoU': SEMANTIC}, dict(pcpvt_small=())),
)
PAPERS = {  # that introduced the heads; arXiv
    'RetinaNet': '1708.02002',
    'Mask R-CNN': '1703.06870',
    'Semantic FPN': '1901.02446',
    'UPerNet': '1807.10221',
    'DINO': '2203.03605',
    'Mask2Former': '2112.01527',
}


# Columnar classifiers: name in the paper, options, ImageNet top-1 of Ti, S and B
COLUMNS = (
    ('CPVT-{}', dict(peg=dict(after=(0, 1, 2, 3, 4, 5))), (73.4, 80.5, 82.3)),
    ('CPVT-{}-GAP', dict(peg=dict(after=(0, 1, 2, 3, 4, 5)), class_token=False), (74.9, 81.5, '')),
    ('DeiT-{}', dict(position='learned'), (72.2, 79.9, 81.8)),
)
