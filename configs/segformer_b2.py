# SegFormer-B2; published: 45.58 mIoU, 47.03 at several scales.
_base_ = 'segformer_b1.py'
model = dict(
    backbone=dict(
        arch='mit_b2',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b2_20220624-66e8bf70.pth')))
