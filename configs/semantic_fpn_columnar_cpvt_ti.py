# Semantic FPN on ADE20K with the columnar CPVT-Ti (arXiv 2102.10882) and the simple feature pyramid
# of ViTDet (arXiv 2203.16527) instead of an FPN. Nothing is published for it; the recipe is that of
# semantic_fpn_cpvt_s.py. No weights are published for CPVT-Ti, so it starts as DeiT-Ti, with PEGs
# that start at zero.
#   tools/dist_train.sh configs/semantic_fpn_columnar_cpvt_ti.py 8
_base_ = 'semantic_fpn_cpvt_s.py'
model = dict(
    backbone=dict(
        _delete_=True,
        type='DenseCPVT', arch='cpvt_tiny', drop_path_rate=0.1, out_channels=256,
        position='learned+peg', peg=dict(after=[0, 1, 2, 3, 4, 5], zero_init=True),
        init_cfg=dict(type='Pretrained', checkpoint='timm://deit_tiny_patch16_224.fb_in1k')),
    neck=None)
