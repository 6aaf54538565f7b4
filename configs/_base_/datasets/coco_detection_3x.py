# COCO 2017 as in coco_detection.py, with multi-scale training: half of the images are resized, half
# are resized, cropped and resized again (DETR, arXiv 2005.12872, section 4).
_base_ = 'coco_detection.py'
to_any_size = dict(
    type='RandomChoiceResize',
    scales=[(side, 1333) for side in range(480, 801, 32)],
    keep_ratio=True)
to_crop_size = dict(
    type='RandomChoiceResize',
    scales=[(side, 1333) for side in (400, 500, 600)],
    keep_ratio=True)
crop = dict(
    type='RandomCrop',
    crop_type='absolute_range',
    crop_size=(384, 600),
    allow_negative_crop=True)
train_pipeline = [
    *_base_.train_pipeline[:2],
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[[to_any_size], [to_crop_size, crop, to_any_size]]),
    dict(type='PackDetInputs')]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
