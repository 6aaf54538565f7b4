# DINO on COCO with PCPVT-S, a detector to use rather than to compare: it has no anchors and no
# non-maximum suppression to tune, and needs 12 epochs. No result is published with this backbone.
# The recipe is DINO's (arXiv 2203.03605), with which ResNet-50 reaches 49.0 box AP in MMDetection,
# except:
#   - A moving average of the weights, over about the last 5,000 steps, is evaluated and saved. It
#     is less noisy than the last weights and costs nothing.
#   - Mixed precision (--amp). BFloat16OptimWrapper works, too: it leaves deformable attention, whose
#     sampling points need more than 8 bits, in float32.
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
