# Semantic FPN on ADE20K with PCPVT-S (CPVTv2-S), as published with Twins (arXiv 2104.13840): 44.3
# mIoU. The recipe is that of the published config; the paper says 16 images per step and weight
# decay 5e-4.
#   tools/dist_train.sh configs/semantic_fpn_cpvt_s.py 8
_base_ = [
    '_base_/models/semantic_fpn.py', '_base_/datasets/ade20k.py',
    '_base_/schedules/segmentation_80k.py', '_base_/runtime_segmentation.py']
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
