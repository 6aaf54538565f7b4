# Mask R-CNN 1x on COCO with PVTv2-B2 (arXiv 2106.13797): 45.3 box AP, 41.2 mask AP. The recipe is
# that of the published config: the learning rate is twice RetinaNet's.
#   tools/dist_train.sh configs/mask_rcnn_pvt_v2_b2.py 8
_base_ = 'mask_rcnn_pvt_t.py'
model = dict(
    backbone=dict(
        arch='pvt_v2_b2', init_cfg=dict(checkpoint='timm://pvt_v2_b2.in1k')))
