# PCPVT-L; published: 45.4 box AP, 41.5 mask AP.
_base_ = 'mask_rcnn_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_large', init_cfg=dict(checkpoint='timm://twins_pcpvt_large.in1k')))
