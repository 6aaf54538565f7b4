# The demo: a small ../retinanet_cpvt_s.py that finds the parts of a page (`cpvt demo-data pages`).
#   cpvt train configs/demo/pages_retinanet_cpvt_nano.py
_base_ = '../retinanet_cpvt_s.py'
data_root = '{{ fileDirname }}/../../data/pages'
classes = ('text', 'title', 'list', 'table', 'figure')

model = dict(
    backbone=dict(
        arch='pcpvt_nano', drop_path_rate=0.0, init_cfg=dict(checkpoint='cpvt://pcpvt_nano')),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64, num_outs=4),
    bbox_head=dict(
        num_classes=5, in_channels=64, feat_channels=64, stacked_convs=2,
        # A line of text is ten times as wide as high.
        anchor_generator=dict(
            scales_per_octave=2, ratios=[0.1, 0.35, 1.0], strides=[8, 16, 32, 64]),
        reg_decoded_bbox=True,
        loss_bbox=dict(_delete_=True, type='GIoULoss', loss_weight=2.0)),
    test_cfg=dict(nms=dict(iou_threshold=0.3)))  # parts do not overlap

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=(384, 288), ratio_range=(0.75, 1.25), keep_ratio=True),
    dict(type='PackDetInputs')]
test_pipeline = _base_.test_pipeline
test_pipeline[1] = dict(type='Resize', scale=(384, 288), keep_ratio=True)
tta_pipeline = None  # no page is flipped
here = dict(data_root=data_root, metainfo=dict(classes=classes))
train_dataloader = dict(
    batch_size=2, num_workers=1,
    dataset=dict(
        **here, ann_file='annotations/instances_train.json', data_prefix=dict(img='train/'),
        pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        **here, ann_file='annotations/instances_val.json', data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + '/annotations/instances_val.json')
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=8, val_interval=4)
param_scheduler = [
    dict(type='OneCycleLR', eta_max=7e-4, pct_start=0.15, total_steps=8, by_epoch=True,
         convert_to_iter_based=True)]
optim_wrapper = dict(clip_grad=dict(max_norm=5.0, norm_type=2))
auto_scale_lr = dict(base_batch_size=2)
default_hooks = dict(logger=dict(interval=25))
