"""What papers report: names and accuracies of backbones, and of the detectors and segmentors that
our configs train.

PCPVT and SVT: Twins, arXiv 2104.13840, tables 1 to 6; PVT: arXiv 2102.12122, section 5; CPVT: arXiv
2102.10882, section 5; PVTv2: arXiv 2106.13797, section 4, and MMDetection (RetinaNet); MiT: arXiv
2105.15203, table 6; SegFormer: MMSegmentation. RetinaNet with ResNet-50: MMDetection; with Swin-T:
https://github.com/cheerss/CrossFormer, detection/README.md.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Backbone(NamedTuple):
    """A published architecture."""

    name: str  # in papers
    short: str  # in names of configs
    top1: float  # on ImageNet


class Family(NamedTuple):
    """The architectures of a paper."""

    prefix: str  # of the names of its archs
    name: str
    title: str  # in the README
    authors: str  # the paper, whose authors published the results, unless a recipe says otherwise
    weights: str  # who published the weights of the backbones,
    form: str  # in which format of `cpvt_pyramid.checkpoints.formats`
    licence: str = 'Apache-2.0'  # of the weights


class Recipe(NamedTuple):
    """A training recipe and its published results."""

    config: str  # name of the config, with {} for the backbone's
    head: str
    metrics: dict[str, str]  # task by name
    results: dict[str, tuple[float, ...]]  # values of the metrics by arch; empty: not published
    others: Mapping[str, str] = {}  # by family, who published its results in place of the authors


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
    'pvt_v2_b0': Backbone('PVTv2-B0', 'pvt_v2_b0', 70.5),
    'pvt_v2_b1': Backbone('PVTv2-B1', 'pvt_v2_b1', 78.7),
    'pvt_v2_b2': Backbone('PVTv2-B2', 'pvt_v2_b2', 82.0),
    'pvt_v2_b2_li': Backbone('PVTv2-B2-Li', 'pvt_v2_b2_li', 82.1),
    'pvt_v2_b3': Backbone('PVTv2-B3', 'pvt_v2_b3', 83.1),
    'pvt_v2_b4': Backbone('PVTv2-B4', 'pvt_v2_b4', 83.6),
    'pvt_v2_b5': Backbone('PVTv2-B5', 'pvt_v2_b5', 83.8),
    'mit_b0': Backbone('MiT-B0', 'b0', 70.5),
    'mit_b1': Backbone('MiT-B1', 'b1', 78.7),
    'mit_b2': Backbone('MiT-B2', 'b2', 81.6),
    'mit_b3': Backbone('MiT-B3', 'b3', 83.1),
    'mit_b4': Backbone('MiT-B4', 'b4', 83.6),
    'mit_b5': Backbone('MiT-B5', 'b5', 83.8),
    'cpvt_tiny': Backbone('CPVT-Ti', 'columnar_cpvt_ti', 73.4),
}
FAMILIES = (
    Family('pcpvt_', 'PCPVT', 'PCPVT (Twins), CPVTv2', 'Twins', 'timm', 'ours'),
    Family('svt_', 'SVT', 'Twins-SVT', 'Twins', 'timm', 'ours'),
    Family('pvt_v2_', 'PVTv2', 'PVTv2', 'PVTv2', 'timm', 'timm_pvt_v2'),
    Family('pvt_', 'PVT', 'PVT', 'PVT', "PVT's authors", 'pvt'),
    Family(
        'mit_',
        'MiT',
        'MiT (SegFormer)',
        'SegFormer',
        "MMSegmentation, converted from SegFormer's authors",
        'mm_pvt_v2',
        "NVIDIA's, for research only",
    ),
)


def family_of(arch: str) -> Family:
    """The family of a pyramid; of prefixes that begin alike, the longer one stands first."""
    return next(family for family in FAMILIES if arch.startswith(family.prefix))


def published_by(recipe: Recipe, arch: str) -> str:
    """Who published the results of a recipe with a pyramid: a paper, or a library."""
    family = family_of(arch)
    return recipe.others.get(family.name, family.authors)


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
        pvt_v2_b0=(37.1,),
        pvt_v2_b1=(41.2,),
        pvt_v2_b2=(44.6,),
        pvt_v2_b3=(46.0,),
        pvt_v2_b4=(46.3,),
        pvt_v2_b5=(46.1,),
        svt_small=(43.0,),
        svt_base=(45.3,),
        svt_large=(45.7,),
    ),
    others={'PVTv2': 'MMDetection'},
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
        pvt_v2_b2=(45.2,),
        svt_small=(43.2,),
        svt_base=(45.3,),
        svt_large=(46.7,),
        cpvt_tiny=(),
    ),
)
_MIOU = {'mIoU': SEMANTIC, 'mIoU(ms+flip)': SEMANTIC}
_BY_MMSEG = {'MiT': 'MMSegmentation'}
SEGFORMER = Recipe(
    'segformer_{}',
    'SegFormer',
    _MIOU,
    dict(
        mit_b0=(37.41, 38.34),
        mit_b1=(40.97, 42.54),
        mit_b2=(45.58, 47.03),
        mit_b3=(47.82, 48.81),
        mit_b4=(48.46, 49.76),
        mit_b5=(49.13, 50.22),
    ),
    _BY_MMSEG,
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
            pvt_v2_b2=(45.3, 41.2),
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
        _MIOU,
        dict(
            pcpvt_small=(46.2, 47.5),
            pcpvt_base=(47.1, 48.4),
            pcpvt_large=(48.6, 49.8),
            svt_small=(46.2, 47.1),
            svt_base=(47.7, 48.9),
            svt_large=(48.8, 50.2),
        ),
    ),
    SEGFORMER,
    Recipe('segformer_{}_640', 'SegFormer', _MIOU, dict(mit_b5=(49.62, 50.36)), _BY_MMSEG),
    Recipe(
        'segformer_{}_cityscapes',
        'SegFormer',
        _MIOU,
        dict(
            mit_b0=(76.54, 78.22),
            mit_b1=(78.56, 79.73),
            mit_b2=(81.08, 82.18),
            mit_b3=(81.94, 83.14),
            mit_b4=(81.89, 83.38),
            mit_b5=(82.25, 83.48),
        ),
        _BY_MMSEG,
    ),
    Recipe('dino_{}', 'DINO', {'box AP': BOX}, dict(pcpvt_small=())),
    Recipe('mask2former_{}', 'Mask2Former', {'mIoU': SEMANTIC}, dict(pcpvt_small=())),
)
PAPERS = {  # that introduced the heads; arXiv
    'RetinaNet': '1708.02002',
    'Mask R-CNN': '1703.06870',
    'Semantic FPN': '1901.02446',
    'UPerNet': '1807.10221',
    'SegFormer': '2105.15203',
    'DINO': '2203.03605',
    'Mask2Former': '2112.01527',
}


class Compared(NamedTuple):
    """RetinaNet with a backbone that is not ours."""

    backbone: str
    config: str  # in MMDetection's folder of configs
    box_ap: float  # COCO, 1x schedule
    source: str


# Swin-T with the recipe of PVT's and Twins' tables; MMDetection publishes no result of its config.
COMPARED = (
    Compared('ResNet-50', 'retinanet/retinanet_r50_fpn_1x_coco.py', 36.5, 'MMDetection'),
    Compared('Swin-T', 'swin/retinanet_swin-t-p4-w7_fpn_1x_coco.py', 41.5, 'cited in CrossFormer'),
)


# Columnar classifiers: name in the paper, options, ImageNet top-1 of Ti, S and B
COLUMNS = (
    ('CPVT-{}', dict(peg=dict(after=(0, 1, 2, 3, 4, 5))), (73.4, 80.5, 82.3)),
    ('CPVT-{}-GAP', dict(peg=dict(after=(0, 1, 2, 3, 4, 5)), class_token=False), (74.9, 81.5, '')),
    ('DeiT-{}', dict(position='learned'), (72.2, 79.9, 81.8)),
)
