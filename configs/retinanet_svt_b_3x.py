# Twins-SVT-B; published: 46.9 box AP.
_base_ = 'retinanet_svt_s_3x.py'
model = dict(
    backbone=dict(
        arch='svt_base', init_cfg=dict(checkpoint='timm://twins_svt_base.in1k')),
    neck=dict(in_channels=[96, 192, 384, 768]))
