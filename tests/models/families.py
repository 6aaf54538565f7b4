"""Tiny detectors and segmentors of MMDetection and MMSegmentation with our backbone.

A row of FAMILIES is a config that mmdet or mmseg ships. `build` changes what a user of our backbone
would change: the backbone, the data preprocessor and, where the config is not for a ResNet, the
channels. It also makes the model small: fewer channels, classes, queries, layers and boxes.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

import cpvt_pyramid.mm.detection
import cpvt_pyramid.mm.segmentation  # noqa: F401 (the registered data preprocessors)
from tests.models.ports import randomize
from tests.models.samples import BOXES, random_data

SHRINK = 8  # divides all channels: those of a ResNet-50 become 32, 64, 128, 256
CHANNELS = (32, 64, 128, 256)
ARCH = dict(dims=CHANNELS, heads=(1, 2, 4, 8), mlp_ratios=(2, 2, 2, 2), depths=(2, 1, 1, 1))
# Height and width, in pixels, of an image and of a larger one. Alone, the image is padded at the
# bottom and not at the right.
SIZES = ((75, 128), (130, 180))
CLASSES = 19
# Numbers in a config that are not channels, at most.
LIMITS = dict(
    num_classes=CLASSES,
    num_layers=3,
    stacked_convs=2,
    num_convs=2,
    num_queries=20,
    num_proposals=20,
    num_dn_queries=10,
    nms_pre=100,
    max_per_img=20,
    num=64,
    num_points=144,
)


class Family(NamedTuple):
    """A detector or segmentor."""

    config: str  # below the configs of its package; in FAMILIES, with the package and `.py`
    options: dict[str, Any] = {}  # changed after shrinking; keys as in mm's `--cfg-options`
    out_indices: tuple[int, ...] = (0, 1, 2, 3)  # maps that neck or head take
    sizes: tuple[tuple[int, int], tuple[int, int]] = SIZES
    shrink: int = SHRINK
    preprocessor: str = ''  # the config's own, if ours cannot take its place


# Maps, and options of configs that were written for another pyramid than a ResNet's.
THREE, LAST = (1, 2, 3), (3,)
_ALL = {'neck.in_channels': list(CHANNELS)}
_LAST_THREE = {'neck.in_channels': list(CHANNELS[1:])}
_LAST = {'decode_head.in_channels': CHANNELS[3]}
_ALL_OF_HEAD = {'decode_head.in_channels': list(CHANNELS)}
_SETR = _LAST | {f'auxiliary_head.{i}.in_channels': CHANNELS[i] for i in range(3)}
# Heads whose code says 32 groups, and DETRs whose code says 256 channels.
_GROUPS = {'bbox_head.norm_cfg': dict(type='GN', num_groups=4, requires_grad=True)}
_EMBED = {'bbox_head.embed_dims': 256 // SHRINK}
_ONE = {'bbox_head.num_feat_levels': 1}

DETECTORS = {
    # one stage, anchors
    'RetinaNet': Family('retinanet/retinanet_r50_fpn_1x_coco'),
    'GHM': Family('ghm/retinanet_r50_fpn_ghm-1x_coco'),
    'PISA RetinaNet': Family('pisa/retinanet-r50_fpn_pisa_1x_coco'),
    'FreeAnchor': Family('free_anchor/freeanchor_r50_fpn_1x_coco'),
    'FSAF': Family('fsaf/fsaf_r50_fpn_1x_coco'),
    'SABL RetinaNet': Family('sabl/sabl-retinanet_r50_fpn_1x_coco'),
    'SABL RetinaNet, GN': Family('sabl/sabl-retinanet_r50-gn_fpn_1x_coco'),
    'Libra RetinaNet': Family('libra_rcnn/libra-retinanet_r50_fpn_1x_coco'),
    'NAS-FPN': Family('nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco'),
    'FPG': Family('fpg/retinanet_r50_fpg_crop640_50e_coco'),
    'ATSS': Family('atss/atss_r50_fpn_1x_coco', _GROUPS),
    'DyHead': Family('dyhead/atss_r50_fpn_dyhead_1x_coco', _GROUPS),
    'GFL': Family('gfl/gfl_r50_fpn_1x_coco', _GROUPS),
    'PAA': Family('paa/paa_r50_fpn_1x_coco', _GROUPS),
    'TOOD': Family('tood/tood_r50_fpn_1x_coco', _GROUPS),
    'DDOD': Family('ddod/ddod_r50_fpn_1x_coco', _GROUPS, sizes=((300, 384), (400, 450))),
    'YOLOF': Family('yolof/yolof_r50-c5_8xb8-1x_coco', out_indices=LAST),
    'YOLOv3': Family(
        'yolo/yolov3_d53_8xb8-ms-608-273e_coco', {'neck.in_channels': [256, 128, 64]}, THREE
    ),
    # one stage, points
    'FCOS': Family('fcos/fcos_r50-caffe_fpn_gn-head_1x_coco', _GROUPS),
    'FCOS, center': Family(
        'fcos/fcos_r50-dcn-caffe_fpn_gn-head-center-normbbox-centeronreg-giou_1x_coco', _GROUPS
    ),
    'NAS-FCOS': Family('nas_fcos/nas-fcos_r50-caffe_fpn_nashead-gn-head_4xb4-1x_coco'),
    'VFNet': Family('vfnet/vfnet_r50_fpn_1x_coco', _GROUPS),
    'VFNet, DCN': Family('vfnet/vfnet_r50-mdconv-c3-c5_fpn_ms-2x_coco', _GROUPS),
    'AutoAssign': Family('autoassign/autoassign_r50-caffe_fpn_1x_coco', _GROUPS),
    'FoveaBox': Family('foveabox/fovea_r50_fpn_4xb4-1x_coco'),
    'FoveaBox, aligned': Family('foveabox/fovea_r50_fpn_gn-head-align_4xb4-2x_coco'),
    'RepPoints': Family('reppoints/reppoints-moment_r50_fpn-gn_head-gn_1x_coco'),
    'CenterNet': Family(
        'centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco',
        {'neck.in_channels': 256, 'bbox_head.in_channels': 64},
        out_indices=LAST,
    ),
    'CenterNet, updated': Family('centernet/centernet-update_r50-caffe_fpn_ms-1x_coco', _GROUPS),
    'CornerNet': Family('cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco', _ONE, (0,)),
    'CentripetalNet': Family(
        'centripetalnet/centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco', _ONE, (0,)
    ),
    'YOLOX': Family('yolox/yolox_s_8xb8-300e_coco', _LAST_THREE, out_indices=THREE),
    'RTMDet': Family('rtmdet/rtmdet_s_8xb32-300e_coco', _LAST_THREE, out_indices=THREE),
    # one stage, masks
    'RTMDet-Ins': Family(
        'rtmdet/rtmdet-ins_s_8xb32-300e_coco',
        _LAST_THREE | {'data_preprocessor.pad_mask': True},
        out_indices=THREE,
    ),
    'YOLACT': Family('yolact/yolact_r50_1xb8-55e_coco', sizes=((96, 128), (96, 128))),
    'SOLO': Family('solo/solo_r50_fpn_1x_coco'),
    'Decoupled SOLO': Family('solo/decoupled-solo_r50_fpn_1x_coco'),
    'Decoupled SOLO, light': Family('solo/decoupled-solo-light_r50_fpn_3x_coco'),
    'SOLOv2': Family('solov2/solov2_r50_fpn_1x_coco'),
    'SOLOv2, DCN': Family('solov2/solov2_r101-dcn_fpn_ms-3x_coco'),
    'CondInst': Family('condinst/condinst_r50_fpn_ms-poly-90k_coco_instance', _GROUPS),
    'BoxInst': Family(
        'boxinst/boxinst_r50_fpn_ms-90k_coco', _GROUPS, preprocessor='BoxInstDataPreprocessor'
    ),
    # two stages
    'RPN': Family('rpn/rpn_r50_fpn_1x_coco'),
    'Faster R-CNN': Family('faster_rcnn/faster-rcnn_r50_fpn_1x_coco'),
    'Faster R-CNN, C5': Family(
        'faster_rcnn/faster-rcnn_r50-caffe-dc5_1x_coco',
        {
            'roi_head.bbox_roi_extractor.featmap_strides': [32],
            'rpn_head.anchor_generator.strides': [32],
        },
        out_indices=LAST,
    ),
    'Faster R-CNN, GN and WS': Family('gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco'),
    'PAFPN': Family('pafpn/faster-rcnn_r50_pafpn_1x_coco'),
    'HRFPN': Family('hrnet/faster-rcnn_hrnetv2p-w18-1x_coco', _ALL),
    'Libra Faster R-CNN': Family('libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco'),
    'Cascade RPN': Family('cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco'),
    'PISA Faster R-CNN': Family('pisa/faster-rcnn_r50_fpn_pisa_1x_coco'),
    'GRoIE': Family('groie/faste-rcnn_r50_fpn_groie_1x_coco'),
    'Double-Head R-CNN': Family('double_heads/dh-faster-rcnn_r50_fpn_1x_coco'),
    'Dynamic R-CNN': Family('dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_coco'),
    'SABL Faster R-CNN': Family('sabl/sabl-faster-rcnn_r50_fpn_1x_coco'),
    'CrowdDet': Family('crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman'),
    'Grid R-CNN': Family('grid_rcnn/grid-rcnn_r50_fpn_gn-head_2x_coco'),
    'Cascade R-CNN': Family('cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco'),
    'SABL Cascade R-CNN': Family('sabl/sabl-cascade-rcnn_r50_fpn_1x_coco'),
    'Cascade Mask R-CNN': Family('cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco'),
    'Mask R-CNN': Family('mask_rcnn/mask-rcnn_r50_fpn_1x_coco'),
    'Mask R-CNN, GN': Family('gn/mask-rcnn_r50_fpn_gn-all_2x_coco'),
    'Mask R-CNN, 4 convolutions': Family(
        'strong_baselines/mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-50e_coco'
    ),
    'Mask Scoring R-CNN': Family('ms_rcnn/ms-rcnn_r50_fpn_1x_coco'),
    'PointRend': Family('point_rend/point-rend_r50-caffe_fpn_ms-1x_coco'),
    'Seesaw': Family('seesaw_loss/mask-rcnn_r50_fpn_seesaw-loss-normed-mask_random-ms-2x_lvis-v1'),
    'HTC': Family('htc/htc_r50_fpn_1x_coco'),
    'SCNet': Family('scnet/scnet_r50_fpn_1x_coco'),
    'Panoptic FPN': Family('panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco'),
    # queries
    'Sparse R-CNN': Family('sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco'),
    'QueryInst': Family('queryinst/queryinst_r50_fpn_1x_coco'),
    'DETR': Family('detr/detr_r50_8xb2-150e_coco', out_indices=LAST),
    'Conditional DETR': Family(
        'conditional_detr/conditional-detr_r50_8xb2-50e_coco',
        {'neck.in_channels': [CHANNELS[3]]},
        out_indices=LAST,
        shrink=1,
    ),
    'DAB-DETR': Family('dab_detr/dab-detr_r50_8xb2-50e_coco', out_indices=LAST),
    'Deformable DETR': Family(
        'deformable_detr/deformable-detr_r50_16xb2-50e_coco', _EMBED, out_indices=THREE
    ),
    'Deformable DETR, two stages': Family(
        'deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco',
        _LAST_THREE,
        THREE,
        shrink=1,
    ),
    'DINO': Family('dino/dino-4scale_r50_8xb2-12e_coco', _EMBED, out_indices=THREE),
    'DDQ': Family('ddq/ddq-detr-4scale_r50_8xb2-12e_coco', _EMBED, out_indices=THREE),
    'MaskFormer': Family('maskformer/maskformer_r50_ms-16xb1-75e_coco'),
    'Mask2Former': Family('mask2former/mask2former_r50_8xb2-lsj-50e_coco'),
    'Mask2Former, panoptic': Family('mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic'),
}

SEGMENTORS = {
    'FCN': Family('fcn/fcn_r50-d8_4xb4-80k_ade20k-512x512'),
    'PSPNet': Family('pspnet/pspnet_r50-d8_4xb4-80k_ade20k-512x512'),
    'UPerNet': Family('upernet/upernet_r50_4xb4-80k_ade20k-512x512'),
    'UPerNet, multi-level neck': Family(
        'vit/vit_vit-b16_mln_upernet_8xb2-80k_ade20k-512x512',
        _ALL | {'neck.scales': [1, 1, 1, 1]},
    ),
    'Semantic FPN': Family('sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512'),
    'ANN': Family('ann/ann_r50-d8_4xb4-80k_ade20k-512x512'),
    'APCNet': Family('apcnet/apcnet_r50-d8_4xb4-80k_ade20k-512x512'),
    'CCNet': Family('ccnet/ccnet_r50-d8_4xb4-80k_ade20k-512x512'),
    'DANet': Family('danet/danet_r50-d8_4xb4-80k_ade20k-512x512'),
    'DeepLabV3': Family('deeplabv3/deeplabv3_r50-d8_4xb4-80k_ade20k-512x512'),
    'DeepLabV3+': Family('deeplabv3plus/deeplabv3plus_r50-d8_4xb4-80k_ade20k-512x512'),
    'DMNet': Family('dmnet/dmnet_r50-d8_4xb4-80k_ade20k-512x512'),
    'DNLNet': Family('dnlnet/dnl_r50-d8_4xb4-80k_ade20k-512x512'),
    'EMANet': Family('emanet/emanet_r50-d8_4xb2-80k_cityscapes-512x1024'),
    'EncNet': Family('encnet/encnet_r50-d8_4xb4-80k_ade20k-512x512'),
    'FastFCN, PSP': Family('fastfcn/fastfcn_r50-d32_jpu_psp_4xb4-80k_ade20k-512x512', {}, THREE),
    'FastFCN, ASPP': Family('fastfcn/fastfcn_r50-d32_jpu_aspp_4xb4-80k_ade20k-512x512', {}, THREE),
    'FastFCN, EncNet': Family('fastfcn/fastfcn_r50-d32_jpu_enc_4xb4-80k_ade20k-512x512', {}, THREE),
    'Fast-SCNN head': Family(
        'fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024',
        _LAST | {f'auxiliary_head.{i}.in_channels': CHANNELS[2 - i] for i in range(2)},
    ),
    'GCNet': Family('gcnet/gcnet_r50-d8_4xb4-80k_ade20k-512x512'),
    'ICNet neck': Family(
        'icnet/icnet_r50-d8_4xb2-80k_cityscapes-832x832',
        {'neck.in_channels': CHANNELS[1:]},
        out_indices=THREE,
    ),
    'ISANet': Family('isanet/isanet_r50-d8_4xb4-80k_ade20k-512x512'),
    'K-Net': Family('knet/knet-s3_r50-d8_fcn_8xb2-adamw-80k_ade20k-512x512'),
    'K-Net, UPerNet': Family('knet/knet-s3_r50-d8_upernet_8xb2-adamw-80k_ade20k-512x512'),
    'Mask2Former (segmentation)': Family('mask2former/mask2former_r50_8xb2-160k_ade20k-512x512'),
    'MaskFormer (segmentation)': Family('maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512'),
    'MaskFormer, UPerNet': Family(
        'maskformer/maskformer_swin-t_upernet_8xb2-160k_ade20k-512x512', _ALL_OF_HEAD
    ),
    'Non-local': Family('nonlocal_net/nonlocal_r50-d8_4xb4-80k_ade20k-512x512'),
    'OCRNet': Family(
        'ocrnet/ocrnet_hr18_4xb4-80k_ade20k-512x512',
        {f'decode_head.{i}.in_channels': list(CHANNELS) for i in (0, 1)}
        | {'decode_head.0.channels': sum(CHANNELS)},
    ),
    'OCRNet, one map': Family(
        'ocrnet/ocrnet_r101-d8_8xb2-40k_cityscapes-512x1024',
        {'decode_head.0.in_channels': CHANNELS[3], 'decode_head.0.in_index': 3},
    ),
    'PointRend (segmentation)': Family('point_rend/pointrend_r50_4xb4-160k_ade20k-512x512'),
    'PSANet': Family('psanet/psanet_r50-d8_4xb4-80k_ade20k-512x512'),
    'SegFormer': Family('segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512', _ALL_OF_HEAD),
    'Segmenter': Family('segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512', _LAST),
    'Segmenter, linear': Family(
        'segmenter/segmenter_vit-s_fcn_8xb1-160k_ade20k-512x512',
        _LAST | {'decode_head.channels': CHANNELS[3]},
    ),
    'SETR, naive': Family('setr/setr_vit-l_naive_8xb2-160k_ade20k-512x512', _SETR),
    'SETR, PUP': Family('setr/setr_vit-l_pup_8xb2-160k_ade20k-512x512', _SETR),
    'SegNeXt head': Family(
        'segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512',
        {'decode_head.in_channels': list(CHANNELS[1:])},
    ),
    'STDC head': Family(
        'stdc/stdc1_4xb12-80k_cityscapes-512x1024',
        _LAST | {f'auxiliary_head.{i}.in_channels': CHANNELS[2 - i] for i in range(3)},
    ),
}

for package, families in (('mmdet', DETECTORS), ('mmseg', SEGMENTORS)):
    for name, family in families.items():
        families[name] = family._replace(config=f'{package}/{family.config}.py')
FAMILIES = {**DETECTORS, **SEGMENTORS}


CANNOT = {
    'GA-RetinaNet, GA-Faster R-CNN, GA-RPN': 'their masked convolution has no CPU kernel.',
    'CARAFE': 'its operator has no CPU kernel.',
    'Faster R-CNN with deformable RoI pooling': 'its operator has no CPU kernel.',
    'SSD, PISA SSD': 'prediction fails in mmdet 3.5.1: `SSDHead` has no `loss_cls`.',
    'Faster R-CNN, C4': 'its head is the last stage of a ResNet.',
    'TridentNet, DetectoRS': 'their convolutions or their neck are parts of a ResNet.',
    'LAD, LD': 'they distil a ResNet, which they build themselves.',
    'Grounding DINO, GLIP': 'they download a language model.',
    'SETR-MLA, DPT': 'they take four maps of one size.',
    'LR-ASPP': 'it averages 49 x 49 cells, more than maps at stride 32 have.',
    'BiSeNet, DDRNet, PIDNet, SAN, VPD': 'their heads are parts of their backbone.',
}

# Configs


def model_config(family: Family) -> ConfigDict:
    """The shrunk `model` of a config, with our backbone and data preprocessor."""
    cfg = read(family.config).model
    cfg = ConfigDict(shrink(cfg.to_dict(), family.shrink))
    cfg.backbone = dict(type='CPVTPyramid', arch=ARCH, out_indices=family.out_indices)
    cfg.pop('pretrained', None)
    data = cfg.data_preprocessor
    data.pop('batch_augments', None)  # to sizes of their own
    if family.config.startswith('mmseg'):
        data.update(type='ValidRegionSegDataPreProcessor', size=None, size_divisor=32)
        data.test_cfg = dict(size_divisor=32)
    else:
        data.pad_size_divisor = max(data.get('pad_size_divisor', 1), 32)
        data.type = family.preprocessor or 'ValidRegionDetDataPreprocessor'
    whole = Config(dict(model=cfg))
    whole.merge_from_dict({f'model.{key}': value for key, value in family.options.items()})
    return whole.model


@cache
def read(config: str) -> Config:
    """A config of a package, see `Family`."""
    package, path = config.split('/', 1)
    # By path: mmengine installs a package called mmsegmentation for `mmseg::...`.
    [root] = importlib.util.find_spec(package).submodule_search_locations
    return Config.fromfile(Path(root) / '.mim/configs' / path)


def shrink(config: Any, divisor: int, key: str = '') -> Any:
    """A config with fewer channels, layers, queries, classes and boxes."""
    if isinstance(config, dict):
        return {k: shrink(v, divisor, k) for k, v in config.items() if k != 'init_cfg'}
    if isinstance(config, (list, tuple)):
        if key == 'class_weight' and len(config) == 151:  # of ADE20K and of no object
            return [*config[:CLASSES], config[-1]]
        if key == 'num_grids':  # of SOLO
            return [side // 4 for side in config]
        return type(config)(shrink(value, divisor, key) for value in config)
    if isinstance(config, str):
        return 'BN' if config in ('SyncBN', 'MMSyncBN') else config  # which needs GPUs
    if isinstance(config, bool) or not isinstance(config, (int, float)):
        return config
    if 'channel' in key or key in ('embed_dims', 'embed_dim', 'num_feats', 'rfp_inplanes'):
        return config // divisor if config >= 32 else config
    # Random numbers that follow the order of values in memory.
    if 'drop' in key and key != 'dropout_ratio':
        return min(config, 0.0)
    if key == 'num_groups':  # of a GroupNorm
        return min(config, 4)
    if key == 'score_thr':  # nothing is sure for a model with random weights
        return 0.0
    return min(config, LIMITS.get(key, config))


def build(family: Family) -> nn.Module:
    """The model, with random weights that are not tiny, in evaluation mode."""
    init_default_scope(family.config.split('/')[0])
    model = randomize(MODELS.build(model_config(family)))
    for name, module in model.named_modules():
        if name.endswith('init_proposal_bboxes'):  # centre and size: the whole image
            module.weight.data.copy_(torch.tensor([0.5, 0.5, 1, 1]))
        # Boxes that are refined again and again stay near.
        if name.endswith('fc_reg') and isinstance(module, nn.Linear):
            module.weight.data *= 0.05
    for key in ('epoch', 'iter'):  # which TOOD and BoxInst ask for
        MessageHub.get_current_instance().update_info(key, 0)
    return model.eval()


# Data


def batch(family: Family, model: nn.Module, count: int = 2, padded: bool = True) -> dict:
    """What the data preprocessor makes of the first images, with their annotations; unless padded,
    of images of one size."""
    sizes = family.sizes
    if not padded:
        sizes = [[math.ceil(side / 128) * 128 for side in sizes[0]]] * 2
    segmentor = family.config.startswith('mmseg')
    steps = read(family.config).train_pipeline
    masks = not segmentor and any(s.get('with_mask') or 'Panoptic' in s.type for s in steps)
    data = random_data(segmentor, sizes[:count], classes=CLASSES, masks=masks)
    for sample in data['data_samples']:  # CornerNet's
        sample.set_metainfo(dict(border=np.zeros(4, np.float32)))
    # In training mode, because mmseg stacks images of different sizes there only.
    return model.data_preprocessor(data, training=True)


# Outputs


class Output(NamedTuple):
    """A tensor that a part of a model returns."""

    part: str  # backbone, neck or head
    name: str  # of the module, with the index of its call and of the tensor
    tensor: Tensor


def outputs(model: nn.Module, data: dict) -> list[Output]:
    """The maps of backbone and neck, and what the heads return before anything is selected.

    RoI heads are given fixed boxes, and auxiliary heads run, too.
    """
    torch.manual_seed(0)  # SegNeXt's head starts from random matrices
    with torch.no_grad(), recorded(model) as found, fixed_proposals(model):
        samples = copy.deepcopy(data['data_samples'])
        if not hasattr(model, 'decode_head'):
            model._forward(data['inputs'], samples)
            return found
        maps = model.extract_feat(data['inputs'])
        metas = [dict(img_shape=data['inputs'].shape[2:])] * len(samples)
        with mock.patch.object(model, 'extract_feat', lambda _: maps):
            logits = model.encode_decode(data['inputs'], metas)
        found.append(Output('head', 'logits', logits))
        auxiliary = getattr(model, 'auxiliary_head', None)
        for head in auxiliary if isinstance(auxiliary, nn.ModuleList) else [auxiliary]:
            if head is not None:
                head.forward(maps)
    return found


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Output]]:
    """Copies of what the parts of a model return while it runs."""
    found = []
    calls = Counter()
    stack = ExitStack()
    for name, module in model.named_modules():
        part = name if name in ('backbone', 'neck') else 'head'
        kind = type(module).__name__
        if part == 'head' and not kind.endswith(('Head', 'Protonet')):
            continue
        if 'RoIHead' in kind or kind == 'PointHead':  # which has no output but at chosen points
            continue

        def forward(*args, module=module, name=name, part=part, **options):
            returned = type(module).forward(module, *args, **options)
            calls[name] += 1
            tensors = [x for x in tree_flatten(returned)[0] if isinstance(x, Tensor)]
            floats = [x for x in tensors if x.is_floating_point()]
            for i, x in enumerate(floats):
                found.append(Output(part, f'{name} {calls[name]} {i}', x.detach().clone()))
            return returned

        # Heads call each other's `forward`, which runs no hooks.
        stack.enter_context(mock.patch.object(module, 'forward', forward))
    with stack:
        yield found


@contextmanager
def fixed_proposals(model: nn.Module) -> Iterator[None]:
    """Whatever the RPN finds, its proposals are BOXES."""

    def proposals(*args: Any, batch_img_metas: list, **options: Any) -> list[InstanceData]:
        boxes = torch.tensor(BOXES, dtype=torch.float32)
        ones = torch.ones(len(boxes))
        found = dict(bboxes=boxes, scores=ones, labels=torch.zeros(len(boxes), dtype=torch.long))
        return [InstanceData(**found) for _ in batch_img_metas]

    with ExitStack() as stack:
        for module in getattr(model, 'rpn_head', nn.Identity()).modules():
            if hasattr(module, 'predict_by_feat'):
                stack.enter_context(mock.patch.object(module, 'predict_by_feat', proposals))
        yield


# Drift


class Drift(NamedTuple):
    """How far an image's outputs are from its own when it is batched with another image.

    Each is the largest over all cells, boxes or queries: the length of the change as a share of the
    mean length.
    """

    backbone: float
    neck: float
    head: float


def drift(family: Family, model: nn.Module, one_size: bool = False) -> Drift:
    """Of the family's first image, in a batch with its second, larger one; or with one whose padded
    size is the same."""
    if one_size:
        height, width = (math.ceil(side / 32) * 32 for side in family.sizes[0])
        family = family._replace(sizes=(family.sizes[0], (height, width - 28)))
    single = batch(family, model, 1)
    pair = batch(family, model, 2)
    precision = next(model.parameters()).dtype
    for data in (single, pair):
        data['inputs'] = data['inputs'].to(precision)
    small = single['inputs'].shape[-2:]
    large = pair['inputs'].shape[-2:]
    assert small == large or not one_size
    alone = outputs(model, single)
    joint = {output.name: output.tensor for output in outputs(model, pair)}
    farthest = dict(backbone=0.0, neck=0.0, head=0.0)
    for part, name, tensor in alone:
        far = distance(tensor, joint[name], family.sizes[0], small, large)
        farthest[part] = max(farthest[part], far)
    return Drift(**farthest)


def distance(
    alone: Tensor, joint: Tensor, image: Sequence[int], small: Sequence[int], large: Sequence[int]
) -> float:
    """Drift of a tensor whose cells, boxes or queries of the first image come first in the batch.

    Given are height and width of the first image, outside of which nothing is compared, of the
    batch of this image alone, and of the batch of both.
    """
    differing = [i for i, (a, b) in enumerate(zip(alone.shape, joint.shape)) if a != b]
    if len(differing) in (1, 3):  # that of the batch, and not only height and width
        joint = joint.narrow(differing[0], 0, alone.shape[differing[0]])
    channels = -1
    if alone.shape != joint.shape:
        first, stride = grid_of(alone.shape, small, joint.shape, large)
        for i, side in enumerate(image, first):
            cells = min(math.ceil(side / stride), alone.shape[i], joint.shape[i])
            alone = alone.narrow(i, 0, cells)
            joint = joint.narrow(i, 0, cells)
        channels = first - 1 if first > 1 else -1
    lengths = alone.nan_to_num(posinf=0, neginf=0).norm(dim=channels)
    change = (joint - alone).nan_to_num(nan=0).norm(dim=channels)  # nan: of equal infinities
    return float(change.max() / lengths.mean())


def grid_of(
    alone: Sequence[int], small: Sequence[int], joint: Sequence[int], large: Sequence[int]
) -> tuple[int, float]:
    """Which dimension of maps is their height, the next being their width, and their stride; from
    the shapes of maps of smaller and of larger images, and the sizes of these."""
    for first in range(1, len(alone) - 1):
        if alone[:first] + alone[first + 2 :] != joint[:first] + joint[first + 2 :]:
            continue
        cells = (*alone[first : first + 2], *joint[first : first + 2])
        for stride in (2.0**power for power in range(-2, 9)):
            sides = [side / stride for side in (*small, *large)]
            if all(c in (math.floor(s), math.ceil(s)) for c, s in zip(cells, sides)):
                return first, stride
    raise ValueError(f'{tuple(alone)} and {tuple(joint)} are no maps of {small} and {large} pixels')


@contextmanager
def made_contiguous(model: nn.Module) -> Iterator[None]:
    """While it runs, every module's output is contiguous."""

    def contiguous(_module: nn.Module, _inputs: tuple, output: Any) -> Any:
        return tree_map_only(Tensor, Tensor.contiguous, output)

    with ExitStack() as stack:
        for module in model.modules():
            if module is not model:
                stack.enter_context(module.register_forward_hook(contiguous))
        yield
