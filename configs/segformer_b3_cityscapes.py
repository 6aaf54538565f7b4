# SegFormer-B3; published: 81.94 mIoU, 83.14 at several scales.
_base_ = 'segformer_b1_cityscapes.py'
model = dict(
    backbone=dict(
        arch='mit_b3',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b3_20220624-13b1141c.pth')))
