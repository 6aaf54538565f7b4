# Mask2Former on ADE20K with PCPVT-S, for a segmentor to use rather than to compare: it predicts a
# mask for each thing instead of a class for each pixel, and is ahead of UPerNet with the same
# backbone (Swin-T in MMSegmentation: 48.7 to 44.4 mIoU). No result is published with PCPVT-S. The
# recipe is that of MMSegmentation's config; what is changed:
#   - the weights that are evaluated and saved are a moving average over the last 5,000 steps or
#     so, which takes the noise of the last ones out at no cost;
#   - --amp, float16, and not bfloat16: deformable attention rounds the places that it samples to
#     the precision of the values, and 8 bits are too few for a place in an image.
#   tools/dist_train.sh configs/mask2former_cpvt_s.py 8 --amp
_base_ = [
    '_base_/models/mask2former.py', '_base_/datasets/ade20k.py',
    '_base_/schedules/segmentation_160k.py', '_base_/runtime_segmentation.py']
custom_imports = dict(imports=['cpvt_pyramid.mm.segmentation', 'mmdet.models'])  # the pixel decoder
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
