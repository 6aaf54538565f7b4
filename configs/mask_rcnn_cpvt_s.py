# Mask R-CNN 1x on COCO with PCPVT-S (CPVTv2-S), as published with Twins (arXiv 2104.13840): 42.9
# box AP, 40.0 mask AP. The learning rate is twice RetinaNet's, as in the published config.
#   tools/dist_train.sh configs/mask_rcnn_cpvt_s.py 8
_base_ = [
    '_base_/models/mask_rcnn.py', '_base_/datasets/coco_instance.py',
    '_base_/schedules/detection_1x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='timm://twins_pcpvt_small.in1k')))
optim_wrapper = dict(optimizer=dict(lr=2e-4))
