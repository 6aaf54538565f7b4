# A small ../retinanet_cpvt_s.py that finds trees in aerial photographs (`cpvt demo-data trees`).
#   cpvt train configs/demo/trees_retinanet_cpvt_nano.py
_base_ = '../retinanet_cpvt_s.py'
data_root = '{{ fileDirname }}/../../data/trees'

model = dict(
    backbone=dict(
        arch='pcpvt_nano', drop_path_rate=0.0, init_cfg=dict(checkpoint='cpvt://pcpvt_nano')),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64, num_outs=3,
              add_extra_convs=False),
    bbox_head=dict(
        num_classes=1, in_channels=64, feat_channels=64, stacked_convs=2,
        # Crowns are about as wide as high, and 15 to 75 pixels in nine of ten cases.
        anchor_generator=dict(
            octave_base_scale=3, scales_per_octave=3, ratios=[1.0], strides=[8, 16, 32]),
        reg_decoded_bbox=True,
        loss_bbox=dict(_delete_=True, type='GIoULoss', loss_weight=2.0)),
    train_cfg=dict(assigner=dict(ignore_iof_thr=0.5)),
    test_cfg=dict(nms_pre=3000, nms=dict(iou_threshold=0.4), max_per_img=1000))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=(384, 384), ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(256, 256), allow_negative_crop=True),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(8, 8), keep_empty=False),
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25],
         direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackDetInputs')]
test_pipeline = _base_.test_pipeline
test_pipeline[1] = dict(type='Resize', scale_factor=1.0)
tta_pipeline = _base_.tta_pipeline
tta_pipeline[1]['transforms'][0] = [
    dict(type='Resize', scale_factor=factor) for factor in (0.75, 1.0, 1.25)]
here = dict(data_root=data_root, metainfo=dict(classes=('tree',)))
train_dataloader = dict(
    batch_size=4, num_workers=1,
    dataset=dict(
        **here, ann_file='annotations/instances_train.json', data_prefix=dict(img='train/'),
        filter_cfg=dict(filter_empty_gt=False, min_size=0), pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        **here, ann_file='annotations/instances_val.json', data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = dict(
    num_workers=1,
    dataset=dict(
        **here, ann_file='annotations/instances_test.json', data_prefix=dict(img='test/'),
        pipeline=test_pipeline))
val_evaluator = dict(ann_file=data_root + '/annotations/instances_val.json')
test_evaluator = dict(ann_file=data_root + '/annotations/instances_test.json')

train_cfg = dict(max_epochs=30, val_interval=10)
param_scheduler = [
    dict(type='OneCycleLR', eta_max=7e-4, pct_start=0.15, total_steps=30, by_epoch=True,
         convert_to_iter_based=True)]
optim_wrapper = dict(clip_grad=dict(max_norm=5.0, norm_type=2))
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(logger=dict(interval=33), checkpoint=dict(save_best='coco/bbox_mAP_50'))
