# PCPVT-B; published: 47.1 mIoU, 48.4 at several scales.
_base_ = 'upernet_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_base', init_cfg=dict(checkpoint='timm://twins_pcpvt_base.in1k')))
