# Twins-SVT-L; published: 48.8 mIoU, 50.2 at several scales.
# Drop path is 0.3 here, as in the published config.
_base_ = 'upernet_svt_s.py'
model = dict(
    backbone=dict(
        arch='svt_large', drop_path_rate=0.3,
        init_cfg=dict(checkpoint='timm://twins_svt_large.in1k')),
    decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512))
