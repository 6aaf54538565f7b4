# SegFormer-B5 with crops of 640 x 640; published: 49.62 mIoU, 50.36 at several scales.
_base_ = 'segformer_b5.py'
model = dict(data_preprocessor=dict(size=(640, 640)))
train_pipeline = _base_.train_pipeline
train_pipeline[2] = dict(
    type='RandomResize', scale=(2048, 640), ratio_range=(0.5, 2.0), keep_ratio=True)
train_pipeline[3] = dict(type='RandomCrop', crop_size=(640, 640), cat_max_ratio=0.75)
test_pipeline = _base_.test_pipeline
test_pipeline[1] = dict(type='Resize', scale=(2048, 640), keep_ratio=True)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
