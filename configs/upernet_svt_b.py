# Twins-SVT-B; published: 47.7 mIoU, 48.9 at several scales.
_base_ = 'upernet_svt_s.py'
model = dict(
    backbone=dict(
        arch='svt_base', init_cfg=dict(checkpoint='timm://twins_svt_base.in1k')),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384))
