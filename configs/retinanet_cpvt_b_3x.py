# PCPVT-B; published: 46.4 box AP.
_base_ = 'retinanet_cpvt_s_3x.py'
model = dict(
    backbone=dict(
        arch='pcpvt_base', init_cfg=dict(checkpoint='timm://twins_pcpvt_base.in1k')))
