# PVTv2-B5; published: 46.1 box AP in MMDetection, 46.2 in the paper.
_base_ = 'retinanet_pvt_v2_b4.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b5', init_cfg=dict(checkpoint='timm://pvt_v2_b5.in1k')))
