# As segmentation_160k.py; the learning rate of the head is ten times that of the backbone.
_base_ = 'segmentation_160k.py'
optim_wrapper = dict(
    paramwise_cfg=dict(
        _delete_=True,
        custom_keys=dict(norm=dict(decay_mult=0.0), head=dict(lr_mult=10.0))))
