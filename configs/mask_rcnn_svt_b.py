# Twins-SVT-B; published: 45.2 box AP, 41.5 mask AP.
_base_ = 'mask_rcnn_svt_s.py'
model = dict(
    backbone=dict(
        arch='svt_base', init_cfg=dict(checkpoint='timm://twins_svt_base.in1k')),
    neck=dict(in_channels=[96, 192, 384, 768]))
