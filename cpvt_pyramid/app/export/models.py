"""The exportable form of a model. mmdet and mmseg are imported where a model is theirs."""

from typing import Any, Optional

from torch import Tensor, nn

from ...columnar import CPVT, Column
from ...model import CPVTPyramid
from ...tasks.segmentors import SemanticSegmentor
from ..tooling.command import UserError
from .base import Batch, Exportable, Preprocessing


class BackboneGraph(Exportable):
    """The maps (B, C, ceil(H / stride), ceil(W / stride)) of a `CPVTPyramid` or a `DenseCPVT`, zero
    in the padding."""

    task = 'features'
    takes_any_padding = True

    def __init__(self, backbone: Any, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.backbone = backbone
        self.output_names = tuple(f'map_{i}' for i in range(len(backbone.strides)))

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        return dict(zip(self.output_names, self.backbone(*self.preprocess(batch))))

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        return dict(zip(self.output_names, self.backbone(self.normalize(image))))


class ClassifierGraph(Exportable):
    """The logits (B, classes) of the columnar model, a `CPVT`."""

    task, output_names = 'classification', ('logits',)
    takes_any_padding = True

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.model = model

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        return {'logits': self.model(*self.preprocess(batch))}

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        return {'logits': self.model(self.normalize(image))}


def exportable(model: nn.Module, probabilities: bool = False, backbone: bool = False) -> Exportable:
    """The exportable form of a detector, a segmentor, or a backbone.

    Args:
        model: in evaluation mode, with its weights; of MMDetection, MMSegmentation or this
            package.
        probabilities: of a segmentor: return those of all classes instead of labels.
        backbone: of a detector or a segmentor of OpenMMLab: export its backbone alone.

    Raises:
        UserError: a model that cannot be exported, or an option that it does not have.
    """
    kinds = [kind.__name__ for kind in type(model).__mro__]  # without importing their packages
    segments = isinstance(model, SemanticSegmentor) or 'EncoderDecoder' in kinds
    if probabilities and (not segments or backbone):
        raise UserError('--probabilities needs a segmentor; leave it out')
    if isinstance(model, CPVT):
        return ClassifierGraph(model, Preprocessing())
    if isinstance(model, (CPVTPyramid, Column)):
        return BackboneGraph(model, Preprocessing())
    if isinstance(model, SemanticSegmentor):
        from .trained_models import TrainedSegmentor

        return TrainedSegmentor(model, probabilities)
    if kinds[0] == 'MMDetectionRetinaNet':
        from .trained_models import TrainedDetector

        return TrainedDetector(model)
    if backbone:
        from .mm_model import preprocessing_of

        alone = preprocessing_of(model)._replace(divisor=1, marks_padding=True)
        return BackboneGraph(model.get_submodule('backbone'), alone)
    if segments:
        from .mask2former import Mask2FormerSegmentor
        from .mm_segmentors import EncoderDecoder

        is_mask2former = type(model.decode_head).__name__ == 'Mask2FormerHead'
        return (Mask2FormerSegmentor if is_mask2former else EncoderDecoder)(model, probabilities)
    if kinds[0] == 'DINO':
        from .dino import DINO

        return DINO(model)
    if 'RetinaNet' in kinds:
        from .detectors import RetinaNet

        return RetinaNet(model)
    if 'TwoStageDetector' in kinds and 'TwoStagePanopticSegmentor' not in kinds:
        from .two_stage import TwoStage

        return TwoStage(model)
    if 'Mask2Former' in kinds:
        from .mask2former import Mask2Former

        return Mask2Former(model)
    raise UserError(
        f'a {kinds[0]} cannot be exported; only RetinaNet, Faster R-CNN, Mask R-CNN, DINO, '
        'Mask2Former, segmentors of type EncoderDecoder, and the backbones by themselves'
    )
