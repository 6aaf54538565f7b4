"""Self-contained HTML pages with tables, charts and pictures.

The functions fill the macros of templates/parts.html, which escape all texts; `html_page` puts
their results into templates/page.html. Charts are SVG and pictures are data URLs, so that a page is
one file that opens anywhere.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from PIL import Image

from .files import data_url

THUMBNAIL = 480  # pixels, longer side of a picture in a sheet

TEMPLATES = Environment(
    loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
PARTS: Any = TEMPLATES.get_template('parts.html').module


def html_page(title: str, about: str, parts: Sequence[Markup]) -> str:
    page = TEMPLATES.get_template('page.html').render(title=title, about=about, parts=parts)
    return page.encode(errors='replace').decode()  # names of files need not be UTF-8


def html_section(title: str, note: str, *parts: Markup) -> Markup:
    return PARTS.section(title, note, parts)


def side_by_side(*parts: Markup) -> Markup:
    return PARTS.side_by_side(parts)


def scrolling(part: Markup) -> Markup:
    """A part that may be larger than its place."""
    return PARTS.scrolling(part)


def cards(values: Mapping[str, str]) -> Markup:
    """Large numbers with their names."""
    return PARTS.cards(values)


def html_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table that can be sorted by its columns; floats are shown with three digits."""
    texts = [[cell_text(value) for value in row] for row in rows]
    return scrolling(PARTS.table(head, texts))


def cell_text(value: Any) -> str:
    if value is None:
        return '–'
    if not isinstance(value, float):
        return str(value)
    return '–' if math.isnan(value) else f'{value:.3f}'


# Pictures


def wide_picture(picture: Image.Image) -> Markup:
    """A picture in the width of the page."""
    return PARTS.wide_picture(embedded(picture))


def contact_sheet(pictures: Sequence[tuple[Image.Image, str]]) -> Markup:
    """Pictures with captions."""
    return PARTS.contact_sheet([(embedded(picture), caption) for picture, caption in pictures])


def embedded(picture: Image.Image) -> str:
    """The data URL of a picture."""
    file = io.BytesIO()
    picture.convert('RGB').save(file, 'JPEG', quality=85)
    return data_url('image/jpeg', file.getvalue())


def reduced(image: np.ndarray, longest: int = THUMBNAIL) -> tuple[np.ndarray, float]:
    """An image (H, W, 3) whose longer side has at most some pixels, and the factor."""
    factor = min(1.0, longest / max(image.shape[:2]))
    size = [max(round(side * factor), 1) for side in image.shape[1::-1]]
    small = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, reducing_gap=2)
    return np.array(small), factor
