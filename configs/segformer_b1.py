# SegFormer-B1; published: 40.97 mIoU, 42.54 at several scales.
_base_ = 'segformer_b0.py'
model = dict(
    backbone=dict(
        arch='mit_b1',
        init_cfg=dict(
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b1_20220624-02e5a6a1.pth')),
    decode_head=dict(in_channels=[64, 128, 320, 512]))
