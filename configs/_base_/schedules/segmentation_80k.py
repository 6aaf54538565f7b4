# 80,000 iterations, 32 images per step (8 GPUs x 4).
train_cfg = dict(type='IterBasedTrainLoop', max_iters=80_000, val_interval=8_000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
param_scheduler = [
    dict(type='PolyLR', power=0.9, eta_min=1e-6, by_epoch=False, begin=0, end=80_000)]
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4, weight_decay=1e-4))
auto_scale_lr = dict(enable=False, base_batch_size=32)
