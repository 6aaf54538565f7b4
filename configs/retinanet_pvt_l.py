# PVT-Large; published: 42.6 box AP.
# Batch and learning rate are those of the published config; the paper says 16 images per step.
_base_ = 'retinanet_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_large',
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_large.pth')))
train_dataloader = dict(batch_size=1)
optim_wrapper = dict(optimizer=dict(lr=1e-4 / 1.4))
auto_scale_lr = dict(base_batch_size=8)
