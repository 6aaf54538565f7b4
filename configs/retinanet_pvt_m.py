# PVT-Medium; published: 41.9 box AP.
_base_ = 'retinanet_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_medium',
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_medium.pth')))
