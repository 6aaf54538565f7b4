# PCPVT-B; published: 44.9 mIoU.
_base_ = 'semantic_fpn_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_base', init_cfg=dict(checkpoint='timm://twins_pcpvt_base.in1k')))
