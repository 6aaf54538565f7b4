# PCPVT-L; published: 48.6 mIoU, 49.8 at several scales.
_base_ = 'upernet_cpvt_s.py'
model = dict(
    backbone=dict(
        arch='pcpvt_large', init_cfg=dict(checkpoint='timm://twins_pcpvt_large.in1k')))
