"""What models predict for an image: detections or segmentation masks."""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional, Union

import numpy as np
from PIL import Image

from ..tooling.command import optional_package
from ..tooling.files import atomic_write
from ..tooling.report import amount
from .drawing import Color, draw_boxes, draw_segmentation, jpeg_of, label_counts
from .records import bounding_box, coco_fields, mask_of, run_lengths

if TYPE_CHECKING:
    import pandas
    import supervision

Kind = Literal['detections', 'labels']  # as in the names of the files of a run
SCORE_THR = 0.3  # of the boxes that are shown, unless the user or the model gives another
NOTEBOOK_SIDE = 1600  # longest side of the picture in a notebook, in pixels
# Label maps compress well at any level. This one takes two thirds of the time of Pillow's default.
LABELS_LEVEL = 1


@dataclass(frozen=True, repr=False, eq=False)
class _Prediction:
    """What the kinds of predictions share. As a sequence, a prediction holds its `items()`. Two are
    equal if all of their values are."""

    image: np.ndarray
    classes: Sequence[str]
    palette: Sequence[Color]

    kind: ClassVar[Kind]

    def _columns(self) -> dict[str, Any]:
        """The columns of `to_pandas`."""
        raise NotImplementedError

    def _picture(self) -> Image.Image:
        """The pixels that are written without loss, if there are any."""
        raise NotImplementedError

    def draw(self, legend: bool = True) -> Image.Image:
        """The image with what was found; see the subclasses."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in fields(self)]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays have none either

    def __len__(self) -> int:
        return len(self._columns()['class'])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.items())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items()[index]

    def __repr__(self) -> str:
        summary = self.summary()
        return f'{type(self).__name__}({len(self)}{": " if summary else ""}{summary})'

    def _repr_png_(self) -> bytes:
        """What notebooks show."""
        picture = self.draw()
        picture.thumbnail((NOTEBOOK_SIDE, NOTEBOOK_SIDE))
        file = io.BytesIO()
        picture.save(file, 'PNG')
        return file.getvalue()

    def summary(self, most: int = 5) -> str:
        """Up to `most` objects with their scores: 'seven 0.79, three 0.55'; of more objects, how
        many there are of each class: '12 tree, 3 house'. Without scores, the classes with their
        share of the image: 'grass 62.0%, road 21.5%, ...'."""
        columns = self._columns()
        classes = columns['class']
        has_scores = 'score' in columns
        if has_scores and len(classes) > most:
            counts = Counter(classes).most_common()
            found = [f'{count} {name}' for name, count in counts]
        else:
            values = columns['score'] if has_scores else columns['area'] / self.image[..., 0].size
            form = '.2f' if has_scores else '.1%'
            order = np.argsort(-values, kind='stable')
            found = [f'{classes[i]} {values[i]:{form}}' for i in order]
        rest = ['...'] if len(found) > most else []
        return ', '.join(found[:most] + rest)

    def to_pandas(self) -> 'pandas.DataFrame':
        """As a `pandas.DataFrame` with a row for each item, and the columns `class`, `area` in
        pixels and, for detections, `score`, `x1`, `y1`, `x2` and `y2`."""
        return optional_package('pandas', 'to_pandas').DataFrame(self._columns())

    def items(self) -> list[dict[str, Any]]:
        """What was found: dicts with `label`, `class`, and some of `box`, `score` and `mask`, in
        COCO's run-length encoding."""
        raise NotImplementedError

    def to_supervision(self) -> 'supervision.Detections':
        """As `supervision.Detections`, with class names under `data['class_name']`; a segmentation
        mask has one mask for each class in the image."""
        supervision = optional_package('supervision', 'to_supervision')
        items = self.items()
        masks = [mask_of(item['mask']) for item in items if 'mask' in item]
        boxes = [item.get('box') or bounding_box(mask_of(item['mask'])) for item in items]
        scores = [item['score'] for item in items if 'score' in item]
        return supervision.Detections(
            xyxy=np.reshape(boxes, (-1, 4)).astype(np.float32),
            mask=np.array(masks) if masks else None,
            confidence=np.array(scores, np.float32) if self.kind == 'detections' else None,
            class_id=np.array([item['label'] for item in items], int),
            data={'class_name': np.array([item['class'] for item in items], str)},
        )

    def to_coco(
        self, image_id: int = 0, category_ids: Optional[Sequence[int]] = None
    ) -> list[dict[str, Any]]:
        """As COCO results, which pycocotools' `loadRes` reads; a segmentation mask as those of the
        stuff segmentation, one for each class in the image. Labels beyond the classes are left out.

        Args:
            image_id: of the image in the data set.
            category_ids: of each class; by default 1, 2, 3, ...
        """
        ids = category_ids or range(1, len(self.classes) + 1)
        return [
            {'image_id': image_id, 'category_id': ids[item['label']], **coco_fields(item)}
            for item in self.items()
            if item['label'] < len(self.classes)
        ]

    def png(self) -> bytes:
        """What NAME.labels.png holds; nothing for detections."""
        if self.kind == 'detections':
            return b''
        file = io.BytesIO()
        self._picture().save(file, 'PNG', compress_level=LABELS_LEVEL)
        return file.getvalue()

    def records(self) -> list[dict[str, Any]]:
        """The items for a JSON file, those of detections with rounded numbers."""
        return self.items()

    def name_of(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)


@dataclass(frozen=True, repr=False, eq=False)
class Detections(_Prediction):
    """Objects in an image, best first, in pixels of the image.

    `found[0]` is a dict, as are the values of `for item in found`; `found[:5]`, `found[[0, 3]]` and
    `found[found.labels == 2]` are `Detections`.

    Args:
        image: (H, W, 3) RGB uint8.
        classes: names.
        palette: a colour per class, RGB from 0 to 255.
        boxes: (N, 4) float32, x1, y1, x2, y2.
        scores: (N,) float32, 0 to 1.
        labels: (N,), indices into `classes`.
        masks: (N, H, W) boolean, or None if the model has none.
        limit: the most boxes that the model returns for an image or a tile; None: none is known.
        fullest: of an image that was divided into tiles, the number of boxes in the tile that has
            most.

    Examples:
        >>> found = Predictor('examples/trees.onnx')('examples/trees/florida.jpg')
        >>> sure = found.above(0.5)
        >>> sure[0]['class'], round(sure[0]['score'], 2)
        ('tree', 0.64)
        >>> sure.draw().save('overlay.png')
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: Optional[np.ndarray] = None
    limit: Optional[int] = None
    fullest: Optional[int] = None

    kind: ClassVar[Kind] = 'detections'

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def is_full(self) -> bool:
        """Whether these are as many boxes as the model returns, so that objects may be missing."""
        most = len(self) if self.fullest is None else self.fullest
        return self.limit is not None and most >= self.limit

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, np.integer)):
            return self[[index]].items()[0]
        return replace(
            self,
            boxes=self.boxes[index],
            scores=self.scores[index],
            labels=self.labels[index],
            masks=None if self.masks is None else self.masks[index],
            limit=self.limit if self.fullest is None else None,  # of tiles: unknown in a part
        )

    def above(self, score: float) -> 'Detections':
        """Those with at least this score."""
        return self[self.scores >= score]

    def _columns(self) -> dict[str, Any]:
        x1, y1, x2, y2 = self.boxes.T
        area = (x2 - x1) * (y2 - y1) if self.masks is None else self.masks.sum((1, 2))
        names = [self.name_of(label) for label in self.labels]
        columns = {'class': names, 'score': self.scores, 'x1': x1, 'y1': y1, 'x2': x2, 'y2': y2}
        return columns | {'area': area}

    def draw(self, legend: bool = True) -> Image.Image:
        """The image with boxes, masks, names and scores; small images are enlarged."""
        return draw_boxes(
            self.image,
            self.boxes,
            self.labels,
            self.scores,
            self.classes,
            self.palette,
            masks=self.masks,
        )

    def items(self) -> list[dict[str, Any]]:
        """The objects, as dicts."""
        items = []
        for i, label in enumerate(self.labels.tolist()):
            item = {
                'box': self.boxes[i].tolist(),
                'label': label,
                'class': self.name_of(label),
                'score': float(self.scores[i]),
            }
            if self.masks is not None:
                item['mask'] = run_lengths(self.masks[i])
            items.append(item)
        return items

    def records(self) -> list[dict[str, Any]]:
        """What NAME.detections.json holds: the items with rounded numbers."""
        return [
            item | {'box': [round(v, 2) for v in item['box']], 'score': round(item['score'], 4)}
            for item in self.items()
        ]


@dataclass(frozen=True, repr=False, eq=False)
class LabelMap(_Prediction):
    """The class of each pixel of an image. As a sequence, it holds a dict for each class in it.

    Args:
        image: see `Detections`.
        classes: see `Detections`.
        palette: see `Detections`.
        labels: (H, W), indices into `classes`.

    Examples:
        >>> import numpy as np
        >>> image = np.zeros((2, 3, 3), np.uint8)
        >>> labels = np.array([[0, 0, 1], [0, 1, 1]])
        >>> found = LabelMap(image, ('sky', 'tree'), ((0, 0, 255), (0, 255, 0)), labels)
        >>> found[1]['class']
        'tree'
    """

    labels: np.ndarray

    kind: ClassVar[Kind] = 'labels'

    def _columns(self) -> dict[str, Any]:
        labels, area = label_counts(self.labels)
        return {'class': [self.name_of(label) for label in labels], 'area': area}

    def draw(self, legend: bool = True) -> Image.Image:
        """The image with its classes tinted, above a legend; small images are enlarged."""
        return draw_segmentation(self.image, self.labels, self.classes, self.palette, legend)

    def items(self) -> list[dict[str, Any]]:
        """The classes in the image, as dicts."""
        return [
            {'label': i, 'class': self.name_of(i), 'mask': run_lengths(self.labels == i)}
            for i in np.unique(self.labels).tolist()
        ]

    def _picture(self) -> Image.Image:
        """The values are class indices. Viewers show them in the colours of the classes, or in grey
        if there are more than 256."""
        if len(self.classes) > 256:
            return Image.fromarray(self.labels.astype(np.uint16))
        picture = Image.fromarray(self.labels.astype(np.uint8)).convert('P')
        picture.putpalette([int(v) for color in self.palette for v in color])
        return picture


Prediction = Union[Detections, LabelMap]


def line_about_limit(images: str, limit: int) -> str:
    """That the predictions for images are full, see `Detections`."""
    boxes = amount(limit, 'box', 'boxes')
    return f"{images} reached the model's limit of {boxes}, so that objects may be missing"


def save_overlay(picture: Image.Image, path: Path) -> None:
    with atomic_write(path) as file:
        file.write_bytes(jpeg_of(picture))
