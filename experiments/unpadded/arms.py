"""What is compared. Importing this file imports neither torch nor mm."""

from typing import NamedTuple

# Width and height of the landscape images, and how often they are drawn; portrait ones are turned.
# All sides are multiples of 32, so that an image alone is not padded.
SIZES = ((192, 128), (128, 128), (128, 64))
SHARES = (0.5, 0.25, 0.25)
BATCHES = (2, 8)  # images, of a padded batch


class Arm(NamedTuple):
    """What is trained.

    Attributes:
        model: the name of the detector or segmentor.
        backbone: 'cpvt' or 'resnet'.
        metric: 'AP', of a detector, COCO's (arXiv 1405.0312), or 'mIoU', of a segmentor.
    """

    model: str
    backbone: str
    metric: str


ARMS = {
    'RetinaNet': Arm('RetinaNet', 'cpvt', 'AP'),
    'Mask R-CNN': Arm('Mask R-CNN', 'cpvt', 'AP'),
    'DINO': Arm('DINO', 'cpvt', 'AP'),
    'Semantic FPN': Arm('Semantic FPN', 'cpvt', 'mIoU'),
    'Mask2Former': Arm('Mask2Former', 'cpvt', 'mIoU'),
    'RetinaNet, ResNet-18': Arm('RetinaNet', 'resnet', 'AP'),
}


class Folder(NamedTuple):
    """Images of a test, in random order. Their sides are multiples of 32, so that an image alone is
    not padded.

    Attributes:
        title: in the tables.
        sizes: width and height of landscape images.
        shares: of the images that have these sizes.
        portrait: share of the images that are turned.
    """

    title: str
    sizes: tuple[tuple[int, int], ...]
    shares: tuple[float, ...]
    portrait: float


FOLDERS = {
    'mixed': Folder('Mixed images', SIZES, SHARES, 0.5),
    'camera': Folder('Images of a camera', ((192, 128), (160, 128)), (0.5, 0.5), 0.25),
}
