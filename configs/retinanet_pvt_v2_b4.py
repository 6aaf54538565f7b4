# PVTv2-B4; published: 46.3 box AP in MMDetection, 46.1 in the paper.
# Batch and learning rate are those of the published config.
_base_ = 'retinanet_pvt_v2_b1.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b4', init_cfg=dict(checkpoint='timm://pvt_v2_b4.in1k')))
train_dataloader = dict(batch_size=1)
optim_wrapper = dict(optimizer=dict(lr=1e-4 / 1.4))
auto_scale_lr = dict(base_batch_size=8)
