# A small RetinaNet for digits.
_base_ = '../../../configs/_base_/models/retinanet.py'
model = dict(
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.0, init_cfg=None),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64, num_outs=4),
    bbox_head=dict(
        num_classes=10, in_channels=64, feat_channels=64, stacked_convs=2,
        anchor_generator=dict(strides=[8, 16, 32, 64])))
