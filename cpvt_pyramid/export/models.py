"""The exportable form of a model. mmdet and mmseg are imported where a model is theirs."""

from torch import nn

from ..columnar import CPVT, Column
from ..pyramid import CPVTPyramid
from ..tooling.command import UserError
from .backbones import BackboneGraph, ClassifierGraph
from .base import Exportable, Preprocessing


def exportable(
    model: nn.Module, raw: bool = False, probabilities: bool = False, backbone: bool = False
) -> Exportable:
    """The exportable form of a detector, a segmentor, or a model of this package.

    Args:
        model: in evaluation mode, with its weights.
        raw: of a detector: return the candidates before non-maximum suppression.
        probabilities: of a segmentor: return those of all classes instead of labels.
        backbone: of a detector or a segmentor: export its backbone alone.

    Raises:
        UserError: a model that cannot be exported, or an option that it does not have.
    """
    kinds = [kind.__name__ for kind in type(model).__mro__]  # without importing their packages
    own = isinstance(model, (CPVTPyramid, Column))
    segments = 'EncoderDecoder' in kinds
    if probabilities and (not segments or backbone):
        raise UserError('--probabilities needs a segmentor; leave it out')
    if raw and (own or segments or backbone):
        raise UserError('--raw needs a detector; leave it out')
    if isinstance(model, CPVT):
        return ClassifierGraph(model, Preprocessing())
    if own:
        return BackboneGraph(model, Preprocessing())
    if backbone:
        from .mm_model import preprocessing_of

        return BackboneGraph(model.backbone, preprocessing_of(model)._replace(divisor=1))
    if segments and type(model.decode_head).__name__ == 'Mask2FormerHead':
        from .mask2former import Mask2FormerSegmentor

        return Mask2FormerSegmentor(model, probabilities)
    if segments:
        from .segmentors import Segmentor

        return Segmentor(model, probabilities)
    if 'RetinaNet' in kinds:
        from .detectors import RetinaNet as Kind
    elif 'TwoStageDetector' in kinds and 'TwoStagePanopticSegmentor' not in kinds:
        from .two_stage import TwoStage as Kind
    elif 'DINO' in kinds:
        from .dino import DINO as Kind
    elif 'Mask2Former' in kinds:
        from .mask2former import Mask2Former as Kind
    else:
        raise UserError(
            f'a {kinds[0]} cannot be exported; only RetinaNet, Faster R-CNN, Mask R-CNN, DINO, '
            'Mask2Former, segmentors of type EncoderDecoder, and the backbones by themselves'
        )
    return Kind(model, raw)
