# RetinaNet 1x on COCO with PVT-Tiny, version 1 (arXiv 2102.12122): 36.7 box AP. The recipe is that
# of the published config.
#   tools/dist_train.sh configs/retinanet_pvt_t.py 8
_base_ = [
    '_base_/models/retinanet.py', '_base_/datasets/coco_detection.py',
    '_base_/schedules/detection_1x.py', '_base_/runtime_detection.py']
model = dict(
    backbone=dict(
        arch='pvt_tiny', drop_path_rate=0.1,
        init_cfg=dict(
            type='Pretrained',
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_tiny.pth')))
