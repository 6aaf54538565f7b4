# A small ../semantic_fpn_cpvt_s.py that labels the pixels of pages (`cpvt demo-data pages`).
#   cpvt train configs/demo/pages_semantic_fpn_cpvt_nano.py
_base_ = '../semantic_fpn_cpvt_s.py'
data_root = '{{ fileDirname }}/../../data/pages'
classes = ('background', 'text', 'title', 'list', 'table', 'figure')

model = dict(
    data_preprocessor=dict(size=(256, 256)),
    backbone=dict(
        arch='pcpvt_nano', drop_path_rate=0.0, init_cfg=dict(checkpoint='cpvt://pcpvt_nano')),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64),
    decode_head=dict(in_channels=[64, 64, 64, 64], channels=64, num_classes=6))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(384, 288), ratio_range=(0.75, 1.25), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(256, 256)),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(384, 288), keep_ratio=True),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs')]
tta_pipeline = None  # no page is flipped
here = dict(
    type='BaseSegDataset', data_root=data_root, img_suffix='.png', seg_map_suffix='.png',
    metainfo=dict(classes=classes))
train_dataloader = dict(
    batch_size=4, num_workers=1,
    dataset=dict(
        **here, data_prefix=dict(img_path='train', seg_map_path='masks/train'),
        pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        **here, data_prefix=dict(img_path='val', seg_map_path='masks/val'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader

train_cfg = dict(max_iters=800, val_interval=200)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, by_epoch=False, begin=100, end=800)]
optim_wrapper = dict(
    optimizer=dict(lr=2e-3), clip_grad=dict(max_norm=5.0, norm_type=2),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.2))))
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(logger=dict(interval=25), checkpoint=dict(interval=200))
