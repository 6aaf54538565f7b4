"""The models of shipped configs at a tiny size, with random weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

import mmdet
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from support import ROOT
from torch import nn

from tests.models.ports import randomize

TINY = dict(dims=[8, 16, 32, 32], heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2), depths=(2, 1, 1, 1))
DIMS = TINY['dims']
NECK = dict(in_channels=DIMS, out_channels=16)


def layers(count: int, **attentions: dict) -> dict:
    """Changes to layers of a transformer."""
    attentions = {f'{name}_attn_cfg': dict(embed_dims=32, **x) for name, x in attentions.items()}
    feed_forward = dict(embed_dims=32, feedforward_channels=32)
    return dict(num_layers=count, layer_cfg=dict(attentions, ffn_cfg=feed_forward))


def small(config: str, **changes: Any) -> nn.Module:
    """The model of a config, tiny and with random weights; changes are by dotted names."""
    cfg = Config.fromfile(ROOT / 'configs' / f'{config}.py')
    scope = cfg.get('default_scope', 'mmdet')
    init_default_scope(scope)
    import_module(f'cpvt_pyramid.mm.{"detection" if scope == "mmdet" else "segmentation"}')
    cfg.model.backbone.update(arch=TINY, init_cfg=None)
    cfg.merge_from_dict({f'model.{key}': value for key, value in changes.items()})
    return randomize(MODELS.build(cfg.model), seed=1).eval()


def retinanet(**changes: Any) -> nn.Module:
    head = dict(in_channels=16, feat_channels=16, stacked_convs=1, num_classes=5)
    # Cells in the padding have equal scores, in no particular order: less than the threshold.
    test_cfg = dict(score_thr=0.95, nms_pre=500, max_per_img=60)
    return small('retinanet_cpvt_s', neck=NECK, bbox_head=head, test_cfg=test_cfg, **changes)


def semantic_fpn(**changes: Any) -> nn.Module:
    head = dict(in_channels=[16] * 4, channels=16, num_classes=5)
    return small('semantic_fpn_cpvt_s', neck=NECK, decode_head=head, **changes)


def upernet() -> nn.Module:
    head = dict(in_channels=DIMS, channels=16, num_classes=5)
    attention = ('WindowAttention', 'GlobalAttention')
    arch = dict(TINY, attention=attention, window=7)
    changes = {'backbone.arch': arch, 'auxiliary_head': None}
    return small('upernet_svt_s', decode_head=head, **changes)


def mask_rcnn(levels: int = 4, extractor: str = 'SingleRoIExtractor') -> nn.Module:
    """With maps of the first stages."""
    strides = [4, 8, 16, 32, 64]
    regions = dict(type=extractor, out_channels=16, featmap_strides=strides[:levels])
    masks = dict(in_channels=16, conv_out_channels=16, num_convs=1, num_classes=5)
    changes = {
        'backbone.out_indices': range(levels),
        'neck': dict(in_channels=DIMS[:levels], out_channels=16, num_outs=levels + 1),
        'rpn_head': dict(in_channels=16, feat_channels=16),
        'rpn_head.anchor_generator.strides': strides[: levels + 1],
        'roi_head': dict(bbox_roi_extractor=regions, mask_roi_extractor=regions, mask_head=masks),
        'roi_head.bbox_head': dict(in_channels=16, fc_out_channels=32, num_classes=5),
        'test_cfg.rpn': dict(nms_pre=100, max_per_img=60),
        'test_cfg.rcnn': dict(max_per_img=20, score_thr=0.1),
    }
    return small('mask_rcnn_cpvt_s', **changes)


def dino(levels: int = 4, kind: str = 'DINO') -> nn.Module:
    """With maps of the last stages and one more."""
    stages, maps = range(5 - levels, 4), dict(num_levels=levels)
    changes = {
        'type': kind,
        'num_queries': 30,
        'num_feature_levels': levels,
        'backbone.out_indices': stages,
        'neck': dict(in_channels=[DIMS[i] for i in stages], out_channels=32, num_outs=levels),
        'neck.norm_cfg': dict(type='GN', num_groups=4),
        'encoder': layers(1, self=maps),
        'decoder': layers(levels // 2, self={}, cross=maps),
        'positional_encoding.num_feats': 16,
        'bbox_head': dict(embed_dims=32, num_classes=7),
        'test_cfg.max_per_img': 50,
    }
    return small('dino_cpvt_s', **changes)


def foreign_model(package: Any, config: str, **changes: Any) -> nn.Module:
    """The model of a config of mmdet or mmseg, with our backbone and their data preprocessor."""
    path = Path(package.__file__).parent / '.mim/configs' / config
    backbone = dict(_delete_=True, type='CPVTPyramid', arch=TINY)
    return small(str(path), backbone=backbone, **changes)


def mask2former_head(count: int) -> dict:
    return dict(
        in_channels=DIMS,
        feat_channels=32,
        out_channels=32,
        num_queries=10,
        pixel_decoder=dict(
            norm_cfg=dict(num_groups=4),
            encoder=layers(1, self={}),
            positional_encoding=dict(num_feats=16),
        ),
        positional_encoding=dict(num_feats=16),
        transformer_decoder=layers(count, self={}, cross={}),
    )


def mask2former_segmentor(count: int = 3, **changes: Any) -> nn.Module:
    import mmdet.models  # noqa: F401 registers the pixel decoder

    classes = dict(num_classes=7, loss_cls=dict(class_weight=[1.0] * 8))
    head = mask2former_head(count) | classes
    return small('mask2former_cpvt_s', decode_head=head, **changes)


def mask2former_detector(count: int = 3, name: str = '', **more: Any) -> nn.Module:
    """MMDetection's own config with our backbone."""
    configs = Path(mmdet.__file__).parent / '.mim/configs/mask2former'
    changes = {
        'data_preprocessor': dict(type='ValidRegionDetDataPreprocessor', batch_augments=None),
        'backbone': dict(_delete_=True, type='CPVTPyramid', arch=TINY),
        'panoptic_head': mask2former_head(count),
        'test_cfg.max_per_image': 20,
        **more,
    }
    return small(str(configs / f'mask2former_r50_8xb2-lsj-50e_coco{name}'), **changes)
