# PVT-Small; published: 40.4 box AP.
_base_ = 'retinanet_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_small',
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_small.pth')))
