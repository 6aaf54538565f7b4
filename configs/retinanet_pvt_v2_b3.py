# PVTv2-B3; published: 46.0 box AP in MMDetection, 45.9 in the paper.
_base_ = 'retinanet_pvt_v2_b1.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b3', init_cfg=dict(checkpoint='timm://pvt_v2_b3.in1k')))
