# PVT-Medium; published: 42.0 box AP, 39.0 mask AP.
_base_ = 'mask_rcnn_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_medium',
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_medium.pth')))
