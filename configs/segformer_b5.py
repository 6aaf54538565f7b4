# SegFormer-B5; published: 49.13 mIoU, 50.22 at several scales.
_base_ = 'segformer_b1.py'
model = dict(
    backbone=dict(
        arch='mit_b5',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b5_20220624-658746d9.pth')))
