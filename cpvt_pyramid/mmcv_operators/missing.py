"""The error of an operator that is not provided."""

from typing import NoReturn

from . import compile_command

# What uses the operators whose names begin so, and what serves instead of them.
USERS = {
    'active_rotated_filter': 'oriented detectors such as S2ANet',
    'assign_score_withk': 'PAConv',
    'ball_query': 'PointNet++',
    'bezier_align': 'ABCNet',
    'bias_act': 'StyleGAN',
    'box_iou_': 'oriented detectors',
    'border_align': 'BorderDet',
    'chamfer_distance': "Oriented RepPoints' loss",
    'contour_expand': 'PSENet',
    'convex_': 'Oriented RepPoints',
    'correlation': 'optical flow',
    'diff_iou_rotated': 'the rotated IoU loss',
    'dynamic_': 'voxel encoders',
    'filtered_lrelu': 'StyleGAN',
    'furthest_point_sampling': 'PointNet++',
    'fused_bias_leakyrelu': 'StyleGAN',
    'fused_indice_conv': 'sparse convolutions',
    'gather_points': 'PointNet++',
    'get_indice_pairs': 'sparse convolutions',
    'group_points': 'PointNet++',
    'hard_voxelize': 'voxel encoders',
    'indice_': 'sparse convolutions',
    'iou3d': 'detectors in point clouds',
    'knn': 'point clouds',
    'line_nms': 'CLRNet, and compiled only for CUDA',
    'min_area_polygons': 'oriented detectors',
    'nms_': 'oriented detectors',
    'pixel_group': 'PAN',
    'points_in_': 'detectors in point clouds, and oriented ones',
    'prroi_pool': 'trackers',
    'riroi_align_rotated': 'ReDet',
    'roi_align_rotated': 'oriented two-stage detectors',
    'roiaware_pool3d': 'Part-A2',
    'roipoint_pool3d': 'PointRCNN',
    'rotated_feature_align': 'R3Det',
    'stack_': 'detectors in point clouds',
    'sync_bn': "the norm MMSyncBN; PyTorch's, SyncBN, needs no operator of mmcv",
    'three_': 'PointNet++',
    'tin_shift': 'TIN',
    'upfirdn2d': 'StyleGAN',
}


def raise_missing(operator: str) -> NoReturn:
    """
    Args:
        operator: its name in mmcv, and what of it is asked for.
    """
    users = next((users for start, users in USERS.items() if operator.startswith(start)), '')
    used_by = f' (used by {users})' if users else ''
    raise NotImplementedError(
        f"mmcv's operator {operator}{used_by} must be compiled, since torchvision has none: "
        f'with a C++ compiler, run {compile_command()}'
    )
