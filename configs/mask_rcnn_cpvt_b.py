# PCPVT-B; published: 44.6 box AP, 40.9 mask AP.
_base_ = 'mask_rcnn_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_base', init_cfg=dict(checkpoint='timm://twins_pcpvt_base.in1k')))
