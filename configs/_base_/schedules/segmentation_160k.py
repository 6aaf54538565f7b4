# 160,000 iterations, 16 images per step (8 GPUs x 2); no weight decay on PEGs and norms.
train_cfg = dict(type='IterBasedTrainLoop', max_iters=160_000, val_interval=16_000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1_500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=1_500, end=160_000)]
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01),
    paramwise_cfg=dict(
        custom_keys=dict(pos_block=dict(decay_mult=0.0), norm=dict(decay_mult=0.0))))
auto_scale_lr = dict(enable=False, base_batch_size=16)
