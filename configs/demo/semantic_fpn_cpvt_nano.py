# The demo: ../semantic_fpn_cpvt_s.py made small, on handwritten digits
# (tools/make_sample_dataset.py).
#   python tools/train.py configs/demo/semantic_fpn_cpvt_nano.py
_base_ = '../semantic_fpn_cpvt_s.py'
data_root = '{{ fileDirname }}/../../data/sample/ade/ADEChallengeData2016'
classes = ('background', 'zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight',
           'nine')

model = dict(
    data_preprocessor=dict(size=(160, 160)),
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.0, init_cfg=None),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64),
    decode_head=dict(in_channels=[64, 64, 64, 64], channels=64, num_classes=11))

pixels = dict(type='Resize', scale=(288, 192), keep_ratio=True)
train_pipeline = _base_.train_pipeline
test_pipeline = _base_.test_pipeline
train_pipeline[2] = dict(_base_.train_pipeline[2], scale=(288, 192), ratio_range=(0.8, 1.25))
train_pipeline[3] = dict(type='RandomCrop', crop_size=(160, 160))
train_pipeline.pop(4)  # no flips: a digit has a left and a right
test_pipeline[1] = pixels
here = dict(
    type='BaseSegDataset', data_root=data_root, img_suffix='.jpg', seg_map_suffix='.png',
    reduce_zero_label=True, metainfo=dict(classes=classes))
train_dataloader = dict(batch_size=8, num_workers=2, dataset=dict(**here, pipeline=train_pipeline))
val_dataloader = dict(num_workers=2, dataset=dict(**here, pipeline=test_pipeline))
test_dataloader = val_dataloader

train_cfg = dict(max_iters=1200, val_interval=400)
param_scheduler = [
    dict(type='OneCycleLR', eta_max=1.5e-3, pct_start=0.2, total_steps=1200, by_epoch=False)]
optim_wrapper = dict(clip_grad=dict(max_norm=5.0, norm_type=2))
default_hooks = dict(logger=dict(interval=25), checkpoint=dict(interval=400))
