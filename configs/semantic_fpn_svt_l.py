# Twins-SVT-L; published: 46.7 mIoU.
_base_ = 'semantic_fpn_svt_s.py'
model = dict(
    backbone=dict(
        arch='svt_large', init_cfg=dict(checkpoint='timm://twins_svt_large.in1k')),
    neck=dict(in_channels=[128, 256, 512, 1024]))
