# A small ../retinanet_cpvt_s.py on handwritten digits (`cpvt demo-data digits`).
#   cpvt train configs/demo/retinanet_cpvt_nano.py
_base_ = '../retinanet_cpvt_s.py'
data_root = '{{ fileDirname }}/../../data/sample/coco'
digits = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')

model = dict(
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.0, init_cfg=None),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64, num_outs=4),
    bbox_head=dict(
        num_classes=10, in_channels=64, feat_channels=64, stacked_convs=2,
        anchor_generator=dict(strides=[8, 16, 32, 64])))

pixels = dict(type='Resize', scale=(256, 160), keep_ratio=True)
jitter = dict(type='RandomResize', scale=(256, 160), ratio_range=(0.8, 1.2), keep_ratio=True)
train_pipeline = _base_.train_pipeline
test_pipeline = _base_.test_pipeline
train_pipeline[2] = jitter
train_pipeline.pop(3)  # no flips: mirrored digits are not digits
test_pipeline[1] = pixels
here = dict(data_root=data_root, metainfo=dict(classes=digits))
train_dataloader = dict(batch_size=8, dataset=dict(**here, pipeline=train_pipeline))
val_dataloader = dict(batch_size=8, dataset=dict(**here, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + '/annotations/instances_val2017.json')
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=8, val_interval=2)
param_scheduler = [
    dict(type='OneCycleLR', eta_max=1.5e-3, pct_start=0.2, total_steps=8, by_epoch=True,
         convert_to_iter_based=True)]
optim_wrapper = dict(clip_grad=dict(max_norm=5.0, norm_type=2))
auto_scale_lr = dict(base_batch_size=8)
default_hooks = dict(logger=dict(interval=25))
