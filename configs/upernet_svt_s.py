# Twins-SVT-S; published: 46.2 mIoU, 47.1 at several scales.
_base_ = 'upernet_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='svt_small', init_cfg=dict(checkpoint='timm://twins_svt_small.in1k')),
    decode_head=dict(in_channels=[64, 128, 256, 512]),
    auxiliary_head=dict(in_channels=256))
