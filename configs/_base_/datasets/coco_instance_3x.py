# COCO 2017 as in coco_detection_3x.py, with instance masks.
_base_ = 'coco_detection_3x.py'
train_pipeline = _base_.train_pipeline
train_pipeline[1] = dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
tta_pipeline = None  # MMDetection merges boxes alone
val_evaluator = dict(metric=['bbox', 'segm'])
test_evaluator = val_evaluator
