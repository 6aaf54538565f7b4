# PCPVT-B; published: 47.9 box AP, 43.2 mask AP.
_base_ = 'mask_rcnn_cpvt_s_3x.py'
model = dict(
    backbone=dict(
        arch='pcpvt_base', init_cfg=dict(checkpoint='timm://twins_pcpvt_base.in1k')))
