"""Aerial photographs of trees with hand-drawn boxes, from the package deepforest.

    from cpvt_pyramid.app.demo.trees import make_trees
    make_trees('data/trees')    # as cpvt demo-data trees

The package's wheel is downloaded and read, not installed. There are four photographs. The largest
is cut into overlapping tiles, for training, and a second one of the same forest into six parts, for
validation, because COCO's AP counts at most 100 detections of an image. Those of two other
forests are for tests. In COCO's layout:

    ROOT/annotations/instances_{train,val,test,whole}.json
    ROOT/{train,val,test}/*.png
    ROOT/whole/*.png    the photographs of which the tiles and the parts are
    ROOT/SOURCES.md     the sources, their authors and licences
    ROOT/sample.json    the arguments

The only category is tree, dead or alive. A box that is cut, because a tile or part has only some of
it, is ignored in training and in metrics: it has `iscrowd`, and so counts neither as a tree nor as
background.
"""

import io
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import NamedTuple, Union

import numpy as np
from PIL import Image

from ..images.formats import open_image
from .boxed_images import Box, BoxedImage, write_boxed_images
from .folders import create_once
from .tiles import Window, boxes_inside, disjoint, overlapping
from .wheels import Package, open_wheel

DEEPFOREST = Package(
    'deepforest',
    '2.1.0',
    'deepforest-2.1.0-py3-none-any.whl',
    '8c2798d8e9be7f0004b194fe207b76c1d9fff6e711b3db67b9508dcd5d00ae54',
)
FOLDER = 'deepforest/data'
TILE = 384  # pixels, side of a tile of the training
STEP = 192  # pixels between the corners of tiles, so that most trees are whole in one
PARTS = 2, 3  # rows and columns of the photograph of the validation
FORMAT = 1  # increased when the same arguments give other files


class AerialPhotograph(NamedTuple):
    """A photograph with boxes: its split, the site of NEON, and where that is."""

    split: str
    site: str
    place: str


PHOTOGRAPHS = {
    '2019_YELL_2_528000_4978000_image_crop2': AerialPhotograph(
        'train', 'YELL', 'Yellowstone, Wyoming'
    ),
    '2019_YELL_2_541000_4977000_image_crop': AerialPhotograph(
        'val', 'YELL', 'Yellowstone, Wyoming'
    ),
    'OSBS_029': AerialPhotograph('test', 'OSBS', 'Ordway-Swisher Biological Station, Florida'),
    'SOAP_061': AerialPhotograph('test', 'SOAP', 'Soaproot Saddle, California'),
}


SOURCES = """\
# Sources

The photographs and boxes are those of the Python package deepforest 2.1.0, licence MIT, by Ben
Weinstein and the other authors of DeepForest (https://github.com/weecology/DeepForest).

The photographs are of the National Ecological Observatory Network (NEON), high-resolution
orthorectified camera imagery (DP3.30010.001), 0.1 m per pixel, of the sites YELL, OSBS and SOAP.
NEON is a program sponsored by the U.S. National Science Foundation and operated under cooperative
agreement by Battelle. NEON's data are in the public domain (CC0 1.0); NEON asks to be cited:
https://www.neonscience.org/data-samples/data-policies-citation

| photograph | used for | NEON site |
|---|---|---|
{rows}

Changes: the photographs of training and validation are also cut into tiles and parts.
"""


class Crop(NamedTuple):
    """A photograph, or a tile of one.

    Attributes:
        name: of its file, without suffix.
        image: its pixels.
        boxes: (N, 4), corners x1, y1, x2, y2 in pixels.
        cut: (N,), True where `boxes` is only a part of a tree's box.
    """

    name: str
    image: Image.Image
    boxes: np.ndarray
    cut: np.ndarray


def make_trees(root: Union[Path, str]) -> bool:
    """Create the data set, completely or not at all, unless it exists.

    Args:
        root: folder to create.

    Returns:
        False if the folder has this data set already.

    Raises:
        UserError: the folder has something else, or the package cannot be downloaded.
    """
    return create_once(root, dict(data='trees', format=FORMAT), write_trees)


def write_trees(folder: Path, arguments: dict) -> None:
    """Write the data set into an empty folder."""
    splits: dict[str, list[Crop]] = {'train': [], 'val': [], 'test': [], 'whole': []}
    with open_wheel(DEEPFOREST) as wheel:
        for name, photograph in PHOTOGRAPHS.items():
            image = image_in(wheel, name)
            boxes = boxes_in(wheel, name)
            whole = Crop(name, image, boxes, np.zeros(len(boxes), bool))
            if photograph.split == 'test':
                splits['test'].append(whole)
                continue
            splits['whole'].append(whole)
            if photograph.split == 'train':
                windows = overlapping(image.height, image.width, TILE, STEP)
            else:
                windows = disjoint(image.height, image.width, *PARTS)
            splits[photograph.split] += [crop_of(whole, window) for window in windows]
    for split, parts in splits.items():
        write_crops(folder, split, parts)
    rows = '\n'.join(
        f'| `{name}.png` | {photograph.split} | {photograph.site}: {photograph.place} |'
        for name, photograph in PHOTOGRAPHS.items()
    )
    (folder / 'SOURCES.md').write_text(SOURCES.format(rows=rows), encoding='utf-8')


def image_in(wheel: zipfile.ZipFile, name: str) -> Image.Image:
    """An image of the package, RGB."""
    with open_image(io.BytesIO(wheel.read(f'{FOLDER}/{name}.png'))) as image:
        return image.convert('RGB')


def boxes_in(wheel: zipfile.ZipFile, name: str) -> np.ndarray:
    """(N, 4) corners x1, y1, x2, y2 of the boxes of an image, in pixels, in the file's order."""
    root = ET.fromstring(wheel.read(f'{FOLDER}/{name}.xml'))
    corners = [
        [float(box.findtext(side, '')) for side in ('xmin', 'ymin', 'xmax', 'ymax')]
        for box in root.iter('bndbox')
    ]
    boxes = np.array(corners).reshape(-1, 4)
    boxes[:, :2] -= 1  # Pascal VOC counts pixels from 1, and the last one is inside
    return boxes


def crop_of(whole: Crop, window: Window) -> Crop:
    """What a photograph has in a window."""
    inside = boxes_inside(whole.boxes, window)
    name = f'{window.top:04d}_{window.left:04d}'
    return Crop(name, whole.image.crop(window), inside.boxes, inside.cut)


def write_crops(folder: Path, split: str, parts: list[Crop]) -> None:
    """Write the images and the annotations of one split."""
    boxed_images = []
    for part in parts:
        pairs = zip(part.boxes.tolist(), part.cut.tolist())
        boxes = [Box(0, corners, is_ignored=cut) for corners, cut in pairs]
        boxed_images.append(BoxedImage(part.name, part.image, boxes))
    description = 'Crowns of trees in aerial photographs; see SOURCES.md'
    write_boxed_images(folder, split, boxed_images, ['tree'], description)
