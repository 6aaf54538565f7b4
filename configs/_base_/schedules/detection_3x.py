# 36 epochs, the 3x schedule of detection; no weight decay on PEGs and norms. A longer key, such as
# backbone, takes the place of these two in the parameters that have both: see docs/mm.md.
_base_ = 'detection_1x.py'
train_cfg = dict(max_epochs=36)
param_scheduler = [
    _base_.param_scheduler[0],  # the warm-up
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=36, milestones=[27, 33], gamma=0.1)]
optim_wrapper = dict(
    optimizer=dict(weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys=dict(pos_block=dict(decay_mult=0.0), norm=dict(decay_mult=0.0))))
