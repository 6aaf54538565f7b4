"""The models: those of configs/, small enough to be trained on a laptop."""

from pathlib import Path

import torch
from mmdet.registry import MODELS as DETECTION
from mmengine.config import Config, ConfigDict
from mmengine.logging import MMLogger
from mmseg.registry import MODELS as SEGMENTATION
from torch import nn

from cpvt_pyramid import ARCHS
from cpvt_pyramid.mm import detection  # noqa: F401 (it registers backbone and data preprocessor)

from .pictures import KEPT

CONFIGS = Path(__file__).parents[2] / 'configs'
ARCH = 'pcpvt_nano'
DIMS = list(ARCHS[ARCH].dims)
RESNET_DIMS = [32, 64, 128, 256]  # half of ResNet-18's
CHANNELS = 64  # of necks and heads
HEADS = 4  # of attention in heads
QUERIES = 30  # a picture has at most a dozen of digits
PROPOSALS = 200


def retinanet() -> ConfigDict:
    """RetinaNet with fewer channels and convolutions, and with smaller anchors."""
    model = Config.fromfile(CONFIGS / '_base_' / 'models' / 'retinanet.py').model
    model.neck.update(in_channels=DIMS, out_channels=CHANNELS, num_outs=4)
    head = dict(in_channels=CHANNELS, feat_channels=CHANNELS, num_classes=len(KEPT))
    model.bbox_head.update(head, stacked_convs=2)
    model.bbox_head.anchor_generator.update(strides=[8, 16, 32, 64])
    return model


def mask_rcnn() -> ConfigDict:
    """Mask R-CNN with fewer channels and proposals, and with smaller anchors."""
    model = Config.fromfile(CONFIGS / '_base_' / 'models' / 'mask_rcnn.py').model
    model.neck.update(in_channels=DIMS, out_channels=CHANNELS, num_outs=4)
    model.rpn_head.update(in_channels=CHANNELS, feat_channels=CHANNELS)
    model.rpn_head.anchor_generator.update(scales=[4], strides=[4, 8, 16, 32])
    roi_head = model.roi_head
    roi_head.bbox_roi_extractor.out_channels = CHANNELS
    roi_head.mask_roi_extractor.out_channels = CHANNELS
    boxes = dict(in_channels=CHANNELS, fc_out_channels=4 * CHANNELS, num_classes=len(KEPT))
    roi_head.bbox_head.update(boxes)
    masks = dict(in_channels=CHANNELS, conv_out_channels=CHANNELS, num_classes=len(KEPT))
    roi_head.mask_head.update(masks, num_convs=2)
    for proposals in (model.train_cfg.rpn_proposal, model.test_cfg.rpn):
        proposals.update(nms_pre=2 * PROPOSALS, max_per_img=PROPOSALS)
    model.train_cfg.rcnn.sampler.num = 64
    return model


def dino() -> ConfigDict:
    """DINO with fewer channels, layers and queries."""
    model = Config.fromfile(CONFIGS / '_base_' / 'models' / 'dino.py').model
    levels = len(DIMS) - 1
    feedforward = dict(embed_dims=CHANNELS, feedforward_channels=4 * CHANNELS)
    model.num_queries = QUERIES
    model.neck.update(in_channels=DIMS[1:], out_channels=CHANNELS, num_outs=levels)
    model.neck.norm_cfg.num_groups = 8
    for part in (model.encoder, model.decoder):
        part.num_layers = 2
        part.layer_cfg.ffn_cfg.update(feedforward)
    sampled = dict(embed_dims=CHANNELS, num_levels=levels)
    model.encoder.layer_cfg.self_attn_cfg.update(sampled)
    model.decoder.layer_cfg.cross_attn_cfg.update(sampled)
    model.decoder.layer_cfg.self_attn_cfg.update(embed_dims=CHANNELS)
    model.positional_encoding.num_feats = CHANNELS // 2
    model.bbox_head.update(embed_dims=CHANNELS, num_classes=len(KEPT))
    model.dn_cfg.group_cfg.num_dn_queries = QUERIES
    model.test_cfg.max_per_img = QUERIES
    return model


def semantic_fpn() -> ConfigDict:
    """Semantic FPN with fewer channels."""
    model = Config.fromfile(CONFIGS / '_base_' / 'models' / 'semantic_fpn.py').model
    classes = 1 + len(KEPT)
    model.neck.update(in_channels=DIMS, out_channels=CHANNELS)
    head = dict(in_channels=[CHANNELS] * 4, channels=CHANNELS, num_classes=classes)
    model.decode_head.update(head)
    # Nine in ten pixels are background. Unweighted, the model tends to predict nothing else.
    model.decode_head.loss_decode.class_weight = [0.25] + [1.0] * len(KEPT)
    return model


def mask2former() -> ConfigDict:
    """Mask2Former with fewer channels, layers, queries and sampled points."""
    model = Config.fromfile(CONFIGS / '_base_' / 'models' / 'mask2former.py').model
    head = model.decode_head
    classes = 1 + len(KEPT)
    layer = dict(embed_dims=CHANNELS, num_heads=HEADS)
    feedforward = dict(embed_dims=CHANNELS, feedforward_channels=4 * CHANNELS)
    head.update(
        in_channels=DIMS,
        feat_channels=CHANNELS,
        out_channels=CHANNELS,
        num_classes=classes,
        num_queries=QUERIES,
    )
    encoder = head.pixel_decoder.encoder
    encoder.num_layers = 2
    encoder.layer_cfg.self_attn_cfg.update(layer)
    encoder.layer_cfg.ffn_cfg.update(feedforward)
    decoder = head.transformer_decoder
    decoder.num_layers = 3
    decoder.layer_cfg.self_attn_cfg.update(layer)
    decoder.layer_cfg.cross_attn_cfg.update(layer)
    decoder.layer_cfg.ffn_cfg.update(feedforward)
    head.pixel_decoder.norm_cfg.num_groups = 8
    head.pixel_decoder.positional_encoding.num_feats = CHANNELS // 2
    head.positional_encoding.num_feats = CHANNELS // 2
    head.loss_cls.class_weight = [1.0] * classes + [0.1]
    head.train_cfg.num_points = 1024
    return model


DETECTORS = {'RetinaNet': retinanet, 'Mask R-CNN': mask_rcnn, 'DINO': dino}
SEGMENTORS = {'Semantic FPN': semantic_fpn, 'Mask2Former': mask2former}


def build(name: str, backbone: str, seed: int) -> nn.Module:
    """An untrained model.

    Args:
        name: of `DETECTORS` or `SEGMENTORS`.
        backbone: 'cpvt', with the weights of the package, or 'resnet', with random weights.
        seed: of all other weights.
    """
    torch.manual_seed(seed)
    is_detector = name in DETECTORS
    config = (DETECTORS if is_detector else SEGMENTORS)[name]()
    pretrained = dict(type='Pretrained', checkpoint='cpvt://pcpvt_nano')
    config.backbone.update(arch=ARCH, drop_path_rate=0.0, init_cfg=pretrained)
    if backbone == 'resnet':
        base = RESNET_DIMS[0]
        config.backbone = dict(type='mmdet.ResNet', depth=18, base_channels=base, norm_eval=False)
        config.neck.in_channels = RESNET_DIMS
    # That of mmsegmentation refuses batches of several sizes.
    config.data_preprocessor = Config.fromfile(
        CONFIGS / '_base_' / 'models' / 'detector.py'
    ).model.data_preprocessor
    if name == 'Mask R-CNN':
        config.data_preprocessor.pad_mask = True
    registry = DETECTION if is_detector else SEGMENTATION
    MMLogger.get_current_instance().setLevel('WARNING')  # not each parameter that is set
    model = registry.build(config)
    model.init_weights()
    return model
