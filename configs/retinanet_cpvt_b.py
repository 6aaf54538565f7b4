# PCPVT-B; published: 44.3 box AP.
_base_ = 'retinanet_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_base', init_cfg=dict(checkpoint='timm://twins_pcpvt_base.in1k')))
