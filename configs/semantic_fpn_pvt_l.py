# PVT-Large; published: 42.1 mIoU.
_base_ = 'semantic_fpn_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_large',
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_large.pth')))
