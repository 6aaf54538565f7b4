# SegFormer-B4; published: 48.46 mIoU, 49.76 at several scales.
_base_ = 'segformer_b1.py'
model = dict(
    backbone=dict(
        arch='mit_b4',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b4_20220624-d588d980.pth')))
