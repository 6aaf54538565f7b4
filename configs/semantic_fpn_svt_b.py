# Twins-SVT-B; published: 45.3 mIoU.
_base_ = 'semantic_fpn_svt_s.py'
model = dict(
    backbone=dict(
        arch='svt_base', init_cfg=dict(checkpoint='timm://twins_svt_base.in1k')),
    neck=dict(in_channels=[96, 192, 384, 768]))
