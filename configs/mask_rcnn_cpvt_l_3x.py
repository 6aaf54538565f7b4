# PCPVT-L; no result is published for it at 3x.
_base_ = 'mask_rcnn_cpvt_s_3x.py'
model = dict(
    backbone=dict(
        arch='pcpvt_large', init_cfg=dict(checkpoint='timm://twins_pcpvt_large.in1k')))
