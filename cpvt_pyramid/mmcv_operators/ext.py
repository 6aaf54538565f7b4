"""What stands for the compiled module `mmcv._ext`: its functions, by their names.

mmcv's functions allocate the tensors of their results, and pass them to be filled. Each function
here has the arguments of the compiled one of the same name, and fills the same tensors with the
same values. float16 and bfloat16 are computed in float32. Imports are absolute, because this file
runs as `mmcv._ext`.
"""

from collections.abc import Callable
from typing import NoReturn

from cpvt_pyramid.mmcv_operators.aggregation import (
    carafe_backward,
    carafe_forward,
    carafe_naive_backward,
    carafe_naive_forward,
    ms_deform_attn_backward,
    ms_deform_attn_forward,
    psamask_backward,
    psamask_forward,
)
from cpvt_pyramid.mmcv_operators.boxes import (
    bbox_overlaps,
    nms,
    nms_match,
    softnms,
)
from cpvt_pyramid.mmcv_operators.convolutions import (
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    masked_col2im_forward,
    masked_im2col_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
)
from cpvt_pyramid.mmcv_operators.losses import (
    sigmoid_focal_loss_backward,
    sigmoid_focal_loss_forward,
    softmax_focal_loss_backward,
    softmax_focal_loss_forward,
)
from cpvt_pyramid.mmcv_operators.missing import raise_missing
from cpvt_pyramid.mmcv_operators.regions import (
    deform_roi_pool_backward,
    deform_roi_pool_forward,
    roi_align_backward,
    roi_align_forward,
    roi_pool_backward,
    roi_pool_forward,
)

PROVIDED = (
    bbox_overlaps,
    carafe_backward,
    carafe_forward,
    carafe_naive_backward,
    carafe_naive_forward,
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    deform_roi_pool_backward,
    deform_roi_pool_forward,
    masked_col2im_forward,
    masked_im2col_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
    ms_deform_attn_backward,
    ms_deform_attn_forward,
    nms,
    nms_match,
    psamask_backward,
    psamask_forward,
    roi_align_backward,
    roi_align_forward,
    roi_pool_backward,
    roi_pool_forward,
    sigmoid_focal_loss_backward,
    sigmoid_focal_loss_forward,
    softmax_focal_loss_backward,
    softmax_focal_loss_forward,
    softnms,
)


def get_compiling_cuda_version() -> str:
    return 'not available'


def get_compiler_version() -> str:
    return 'none: operators of cpvt_pyramid'


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any other operator exists, as mmcv demands when it is imported, and fails when called."""
    if name.startswith('__'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

    def missing(*arguments: object, **options: object) -> NoReturn:
        raise_missing(name)

    return missing


# With `__getattr__`, so that `_ext.py`, which imports all of this, has it, too.
__all__ = [
    *(function.__name__ for function in PROVIDED),
    'get_compiling_cuda_version',
    'get_compiler_version',
    '__getattr__',
]
