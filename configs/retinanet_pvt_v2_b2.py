# PVTv2-B2; published: 44.6 box AP.
_base_ = 'retinanet_pvt_v2_b1.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b2', init_cfg=dict(checkpoint='timm://pvt_v2_b2.in1k')))
