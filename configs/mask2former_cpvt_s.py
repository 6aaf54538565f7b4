# Mask2Former on ADE20K with PCPVT-S, a segmentor to use rather than to compare: it predicts masks
# instead of a class per pixel, and is better than UPerNet with the same backbone (Swin-T in
# MMSegmentation: 48.7 and 44.4 mIoU). No result is published with PCPVT-S. The recipe is that of
# MMSegmentation's config, except:
#   - A moving average of the weights, over about the last 5,000 steps, is evaluated and saved. It
#     is less noisy than the last weights and costs nothing.
#   - Mixed precision (--amp). BFloat16OptimWrapper works, too: it leaves deformable attention, whose
#     sampling points need more than 8 bits, in float32.
#   tools/dist_train.sh configs/mask2former_cpvt_s.py 8 --amp
_base_ = [
    '_base_/models/mask2former.py', '_base_/datasets/ade20k.py',
    '_base_/schedules/segmentation_160k.py', '_base_/runtime_segmentation.py']
custom_imports = dict(imports=[
    'cpvt_pyramid.mm.segmentation', 'cpvt_pyramid.app.training.hooks',
    'mmdet.models'])  # the pixel decoder
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
train_pipeline = _base_.train_pipeline
train_pipeline[2] = dict(
    type='RandomChoiceResize',
    scales=[512 * tenths // 10 for tenths in range(5, 21)],
    resize_type='ResizeShortestEdge',
    max_size=2048)
train_dataloader = dict(batch_size=2, dataset=dict(pipeline=train_pipeline))
param_scheduler = [
    dict(type='PolyLR', power=0.9, eta_min=0.0, by_epoch=False, begin=0, end=160_000)]
optim_wrapper = dict(
    optimizer=dict(lr=1e-4, weight_decay=0.05),
    clip_grad=dict(max_norm=0.01, norm_type=2),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        custom_keys=dict(
            _delete_=True,
            backbone=dict(lr_mult=0.1),
            query_embed=dict(decay_mult=0.0),
            query_feat=dict(decay_mult=0.0),
            level_embed=dict(decay_mult=0.0))))
default_hooks = dict(ema=dict(type='EMAHook', momentum=2e-4))
