# Cityscapes, 19 classes, in CITYSCAPES_ROOT, or data/cityscapes next to configs/:
#   leftImg8bit/{train,val}/CITY/*_leftImg8bit.png
#   gtFine/{train,val}/CITY/*_gtFine_labelTrainIds.png
data_root = '{{$CITYSCAPES_ROOT:{{ fileDirname }}/../../../data/cityscapes}}'

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(2048, 1024), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(1024, 1024), cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(2048, 1024), keep_ratio=True),
    dict(type='LoadAnnotations'),  # after Resize: labels keep their size
    dict(type='PackSegInputs')]
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale_factor=ratio, keep_ratio=True)
             for ratio in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)],
            [dict(type='RandomFlip', prob=0.0, direction='horizontal'),
             dict(type='RandomFlip', prob=1.0, direction='horizontal')],
            [dict(type='LoadAnnotations')],
            [dict(type='PackSegInputs')]])]

train_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='CityscapesDataset',
        data_root=data_root,
        data_prefix=dict(img_path='leftImg8bit/train', seg_map_path='gtFine/train'),
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CityscapesDataset',
        data_root=data_root,
        data_prefix=dict(img_path='leftImg8bit/val', seg_map_path='gtFine/val'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader

val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
