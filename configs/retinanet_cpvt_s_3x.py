# RetinaNet 3x on COCO with PCPVT-S (CPVTv2-S), as published with Twins (arXiv 2104.13840): 45.2
# box AP. The recipe is that of the published config.
#   tools/dist_train.sh configs/retinanet_cpvt_s_3x.py 8
_base_ = [
    '_base_/models/retinanet.py', '_base_/datasets/coco_detection_3x.py',
    '_base_/schedules/detection_3x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
