# SegFormer-B5; published: 82.25 mIoU, 83.48 at several scales.
_base_ = 'segformer_b1_cityscapes.py'
model = dict(
    backbone=dict(
        arch='mit_b5',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b5_20220624-658746d9.pth')))
