# PVT-Small; published: 39.8 mIoU.
_base_ = 'semantic_fpn_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_small',
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_small.pth')))
