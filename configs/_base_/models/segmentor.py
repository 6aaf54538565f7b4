# Shared by the segmentors: normalization of the pre-trained weights, batches that mark their
# padding, the backbone, and testing on whole images.
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='ValidRegionSegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512)),
    backbone=dict(
        type='CPVTPyramid',
        arch='pcpvt_small',
        drop_path_rate=0.2,
        recompute_gelu=True),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'))
tta_model = dict(type='SegTTAModel')
