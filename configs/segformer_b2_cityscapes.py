# SegFormer-B2; published: 81.08 mIoU, 82.18 at several scales.
_base_ = 'segformer_b1_cityscapes.py'
model = dict(
    backbone=dict(
        arch='mit_b2',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b2_20220624-66e8bf70.pth')))
