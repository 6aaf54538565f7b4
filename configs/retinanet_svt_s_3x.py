# Twins-SVT-S; published: 45.6 box AP.
_base_ = 'retinanet_cpvt_s_3x.py'
model = dict(
    backbone=dict(
        arch='svt_small', init_cfg=dict(checkpoint='timm://twins_svt_small.in1k')),
    neck=dict(in_channels=[64, 128, 256, 512]))
