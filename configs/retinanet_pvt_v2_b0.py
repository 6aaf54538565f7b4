# RetinaNet 1x on COCO with PVTv2-B0 (arXiv 2106.13797): 37.1 box AP. The recipe and the result are
# those of MMDetection's config; the paper has 37.2.
#   tools/dist_train.sh configs/retinanet_pvt_v2_b0.py 8
_base_ = [
    '_base_/models/retinanet.py', '_base_/datasets/coco_detection.py',
    '_base_/schedules/detection_1x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        arch='pvt_v2_b0', drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='timm://pvt_v2_b0.in1k')),
    neck=dict(in_channels=[32, 64, 160, 256]))
