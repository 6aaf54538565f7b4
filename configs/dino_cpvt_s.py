# DINO on COCO with PCPVT-S, for a detector to use rather than to compare: no anchors and no
# non-maximum suppression to tune, and 12 epochs do what RetinaNet needs 36 for and more. No result
# is published with this backbone. The recipe is DINO's (arXiv 2203.03605), with which ResNet-50
# reaches 49.0 box AP in MMDetection; what is changed:
#   - the weights that are evaluated and saved are a moving average over the last 5,000 steps or
#     so, which takes the noise of the last ones out at no cost;
#   - --amp, float16, and not bfloat16: deformable attention rounds the places that it samples to
#     the precision of the values, and 8 bits are too few for a place in an image.
#   tools/dist_train.sh configs/dino_cpvt_s.py 8 --amp
_base_ = [
    '_base_/models/dino.py', '_base_/datasets/coco_detection_3x.py',
    '_base_/schedules/detection_1x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
train_dataloader = dict(dataset=dict(filter_cfg=dict(filter_empty_gt=False)))
param_scheduler = [
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=12, milestones=[11], gamma=0.1)]
optim_wrapper = dict(
    clip_grad=dict(max_norm=0.1, norm_type=2),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1))))
default_hooks = dict(ema=dict(type='EMAHook', momentum=2e-4))
