# Twins-SVT-L; published: 45.9 box AP, 41.6 mask AP.
_base_ = 'mask_rcnn_svt_s.py'
model = dict(
    backbone=dict(
        arch='svt_large', init_cfg=dict(checkpoint='timm://twins_svt_large.in1k')),
    neck=dict(in_channels=[128, 256, 512, 1024]))
