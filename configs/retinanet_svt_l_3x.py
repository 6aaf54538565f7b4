# Twins-SVT-L; no result is published for it at 3x.
_base_ = 'retinanet_svt_s_3x.py'
model = dict(
    backbone=dict(
        arch='svt_large', init_cfg=dict(checkpoint='timm://twins_svt_large.in1k')),
    neck=dict(in_channels=[128, 256, 512, 1024]))
