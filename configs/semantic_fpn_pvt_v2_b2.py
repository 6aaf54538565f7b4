# Semantic FPN on ADE20K with PVTv2-B2 (arXiv 2106.13797); published: 45.2 mIoU. The recipe is
# semantic_fpn_pvt_t.py, that of the first PVT's paper.
#   tools/dist_train.sh configs/semantic_fpn_pvt_v2_b2.py 8
_base_ = 'semantic_fpn_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b2', init_cfg=dict(checkpoint='timm://pvt_v2_b2.in1k')))
