# Twins-SVT-S; published: 43.0 box AP.
_base_ = 'retinanet_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='svt_small', init_cfg=dict(checkpoint='timm://twins_svt_small.in1k')),
    neck=dict(in_channels=[64, 128, 256, 512]))
