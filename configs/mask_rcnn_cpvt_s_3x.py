# Mask R-CNN 3x on COCO with PCPVT-S (CPVTv2-S), as published with Twins (arXiv 2104.13840): 46.8
# box AP, 42.6 mask AP. The recipe is that of the published config, which also trains in float16
# (--amp).
#   tools/dist_train.sh configs/mask_rcnn_cpvt_s_3x.py 8
_base_ = [
    '_base_/models/mask_rcnn.py', '_base_/datasets/coco_instance_3x.py',
    '_base_/schedules/detection_3x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
