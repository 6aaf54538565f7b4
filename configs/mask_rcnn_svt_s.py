# Twins-SVT-S; published: 43.4 box AP, 40.3 mask AP.
_base_ = 'mask_rcnn_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='svt_small', init_cfg=dict(checkpoint='timm://twins_svt_small.in1k')),
    neck=dict(in_channels=[64, 128, 256, 512]))
