# Shared by the detectors: normalization of the pre-trained weights, batches that mark their
# padding, and the backbone.
model = dict(
    data_preprocessor=dict(
        type='ValidRegionDetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32),
    backbone=dict(
        type='CPVTPyramid',
        arch='pcpvt_small',
        drop_path_rate=0.2,
        recompute_gelu=True))
