# PCPVT-L; published: 46.4 mIoU.
_base_ = 'semantic_fpn_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_large', init_cfg=dict(checkpoint='timm://twins_pcpvt_large.in1k')))
