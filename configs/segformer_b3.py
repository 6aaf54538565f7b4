# SegFormer-B3; published: 47.82 mIoU, 48.81 at several scales.
_base_ = 'segformer_b1.py'
model = dict(
    backbone=dict(
        arch='mit_b3',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b3_20220624-13b1141c.pth')))
