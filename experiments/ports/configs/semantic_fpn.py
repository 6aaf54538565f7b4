# A small Semantic FPN for digits.
_base_ = '../../../configs/_base_/models/semantic_fpn.py'
model = dict(
    data_preprocessor=dict(size=(160, 160)),
    backbone=dict(
        arch='pcpvt_nano', drop_path_rate=0.0,
        init_cfg=dict(checkpoint='cpvt://pcpvt_nano')),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64),
    decode_head=dict(
        in_channels=[64, 64, 64, 64], channels=64, num_classes=11,
        # Nine in ten pixels are background. Unweighted, the model tends to predict nothing else.
        loss_decode=dict(class_weight=[0.25] + [1.0] * 10)))
