# A small ../semantic_fpn_cpvt_s.py on handwritten digits (`cpvt demo-data digits`).
#   cpvt train configs/demo/semantic_fpn_cpvt_nano.py
_base_ = '../semantic_fpn_cpvt_s.py'
data_root = '{{ fileDirname }}/../../data/sample/ade/ADEChallengeData2016'
classes = ('background', 'zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight',
           'nine')

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

pixels = dict(type='Resize', scale=(256, 160), keep_ratio=True)
train_pipeline = _base_.train_pipeline
test_pipeline = _base_.test_pipeline
train_pipeline[2] = dict(_base_.train_pipeline[2], scale=(256, 160), ratio_range=(0.8, 1.25))
train_pipeline[3] = dict(type='RandomCrop', crop_size=(160, 160))
del train_pipeline[4:6]  # no flips (mirrored digits are not digits), no distortion of colors
test_pipeline[1] = pixels
here = dict(
    type='BaseSegDataset', data_root=data_root, img_suffix='.jpg', seg_map_suffix='.png',
    reduce_zero_label=True, metainfo=dict(classes=classes))
train_dataloader = dict(batch_size=8, num_workers=2, dataset=dict(**here, pipeline=train_pipeline))
val_dataloader = dict(num_workers=2, dataset=dict(**here, pipeline=test_pipeline))
test_dataloader = val_dataloader

train_cfg = dict(max_iters=2400, val_interval=300)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, by_epoch=False, begin=100, end=2400)]
optim_wrapper = dict(
    optimizer=dict(lr=2e-3), clip_grad=dict(max_norm=5.0, norm_type=2),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.2))))
auto_scale_lr = dict(base_batch_size=8)
default_hooks = dict(logger=dict(interval=25), checkpoint=dict(interval=300))
