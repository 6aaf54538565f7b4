# RetinaNet 1x on COCO with PCPVT-S (CPVTv2-S), as published with Twins (arXiv 2104.13840): 43.0
# box AP.
#   tools/dist_train.sh configs/retinanet_cpvt_s.py 8
_base_ = [
    '_base_/models/retinanet.py', '_base_/datasets/coco_detection.py',
    '_base_/schedules/detection_1x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
