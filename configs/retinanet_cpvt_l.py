# PCPVT-L; published: 45.1 box AP.
_base_ = 'retinanet_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_large', init_cfg=dict(checkpoint='timm://twins_pcpvt_large.in1k')))
