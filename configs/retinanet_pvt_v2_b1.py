# PVTv2-B1; published: 41.2 box AP.
_base_ = 'retinanet_pvt_v2_b0.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b1', init_cfg=dict(checkpoint='timm://pvt_v2_b1.in1k')),
    neck=dict(in_channels=[64, 128, 320, 512]))
