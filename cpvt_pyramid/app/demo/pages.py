"""Pages of documents with exact boxes and masks of texts, titles, lists, tables and figures.

    from cpvt_pyramid.app.demo.pages import make_pages
    make_pages('data/pages')    # as cpvt demo-data pages

The pages are drawn: sentences of this package's documentation, tables of random numbers, charts,
and photographs of scikit-image. They are portrait or landscape, with one to three columns. Each
part of a page is drawn alone on transparent paper before it is put on the page, so that its box is
that of its own ink. Boxes do not overlap, and the mask of a part is its filled box.

    ROOT/annotations/instances_{train,val}.json    boxes and polygons, as in COCO
    ROOT/{train,val}/*.png
    ROOT/masks/{train,val}/*.png    label maps: 0 is background, 1 to 5 are the categories
    ROOT/masks/classes.txt          the names of 0 to 5
    ROOT/SOURCES.md     the sources, their authors and licences
    ROOT/sample.json    the arguments

The categories are those of PubLayNet (arXiv 1908.07836), where the caption of a figure is text. The
same arguments give the same files, if the packages are the same, and a smaller set is the beginning
of a larger one with the same seed.
"""

import io
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Union

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from ..images.formats import open_image
from .boxed_images import Box, BoxedImage, write_boxed_images
from .folders import create_once
from .photographs import photographs_of, photographs_section, random_crop

CATEGORIES = ('text', 'title', 'list', 'table', 'figure')
SPLITS = ('train', 'val')
FORMAT = 3  # increased when the same arguments give other files

SIZES = ((480, 640), (460, 650), (650, 460), (640, 480), (720, 405))  # pixels, width and height
KINDS = {'text': 0.3, 'title': 0.2, 'list': 0.15, 'table': 0.15, 'figure': 0.2}  # shares
FONTS = (  # of matplotlib: regular and bold
    ('DejaVuSans.ttf', 'DejaVuSans-Bold.ttf'),
    ('DejaVuSerif.ttf', 'DejaVuSerif-Bold.ttf'),
    ('STIXGeneral.ttf', 'STIXGeneralBol.ttf'),
    ('DejaVuSansMono.ttf', 'DejaVuSansMono-Bold.ttf'),
)
COLORS = (  # paper, ink, titles
    ((255, 255, 255), (20, 20, 20), (0, 0, 0)),
    ((255, 255, 255), (60, 60, 60), (20, 60, 120)),
    ((250, 246, 236), (50, 40, 30), (120, 40, 20)),
    ((238, 240, 242), (30, 40, 50), (0, 90, 90)),
    ((30, 34, 40), (210, 214, 220), (130, 190, 255)),
)
MISSES = 3  # a column ends after this number of parts that do not fit

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont


class Style(NamedTuple):
    """How the parts of a page look; `bold` is the font of titles and of a table's head."""

    paper: Color
    ink: Color
    title: Color
    regular: Font
    bold: Font


class PagePart(NamedTuple):
    """A part of a page: its category, its corner on the page, and it on transparent paper."""

    category: str
    left: int
    top: int
    drawing: Image.Image

    def box(self) -> list[float]:
        """Corners x1, y1, x2, y2 of its ink on the page."""
        x1, y1, x2, y2 = ink_box(self.drawing)
        return [self.left + x1, self.top + y1, self.left + x2, self.top + y2]


def ink_box(drawing: Image.Image) -> tuple[int, int, int, int]:
    """Corners x1, y1, x2, y2 of what is not transparent."""
    box = drawing.getbbox()
    assert box is not None, 'an empty drawing'
    return box


# Texts


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of this package's documentation; no word has more than 16 letters, so that it fits
    into a column."""
    text = Path(__file__).with_name('sentences.txt').read_text(encoding='utf-8')
    return tuple(text.splitlines())


@cache
def short_sentences() -> tuple[str, ...]:
    """Those of six words at most, without the full stop."""
    return tuple(text[:-1] for text in sentences() if len(text.split()) <= 6)


def random_sentence(rng: Generator) -> str:
    return sentences()[rng.integers(len(sentences()))]


def random_title(rng: Generator) -> str:
    return short_sentences()[rng.integers(len(short_sentences()))]


def wrapped_lines(text: str, font: Font, width: float) -> list[str]:
    """The lines of a paragraph."""
    lines: list[str] = []
    for word in text.split():
        longer = f'{lines[-1]} {word}' if lines else ''
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def line_height(font: Font) -> int:
    return round(1.4 * font.size)


# Parts of a page, not wider than asked


def draw_paragraphs(
    texts: list[str], font: Font, color: Color, width: int, marks: str = ''
) -> Image.Image:
    """Texts below each other; each has a mark in front of it, if there are any."""
    indent = round(1.8 * font.size) if marks else 0
    paragraphs = [wrapped_lines(text, font, width - indent) for text in texts]
    step = line_height(font)
    drawing = Image.new('RGBA', (width, step * (sum(map(len, paragraphs)) + 1)))
    draw = ImageDraw.Draw(drawing)
    y = 0
    for number, lines in enumerate(paragraphs):
        if marks:
            draw.text((2, y), marks[number], color, font)
        for line in lines:
            draw.text((indent, y), line, color, font)
            y += step
    return drawing.crop((0, 0, width, ink_box(drawing)[3]))


def draw_text(rng: Generator, style: Style, width: int) -> Image.Image:
    """Up to five sentences that follow each other."""
    start = rng.integers(len(sentences()) - 5)
    text = ' '.join(sentences()[start : start + rng.integers(1, 6)])
    return draw_paragraphs([text], style.regular, style.ink, width)


def draw_title(rng: Generator, style: Style, width: int, scale: float = 1.0) -> Image.Image:
    font = style.bold.font_variant(size=round(1.4 * scale * style.bold.size))
    return draw_paragraphs([random_title(rng)], font, style.title, width)


def draw_list(rng: Generator, style: Style, width: int) -> Image.Image:
    """Two to six sentences with bullets, dashes, numbers or letters."""
    count = int(rng.integers(2, 7))
    marks = str(rng.choice(['\u2022' * 6, '\u2013' * 6, '123456', 'abcdef']))
    texts = [random_sentence(rng) for _ in range(count)]
    return draw_paragraphs(texts, style.regular, style.ink, width, marks)


def draw_table(rng: Generator, style: Style, width: int) -> Image.Image:
    """Names in the first column, numbers in the others; with lines, or every other row shaded."""
    rows = int(rng.integers(3, 10))
    most = int(width // (5 * style.regular.size))
    columns = int(rng.integers(3, max(most, 3) + 1))
    column = width // columns
    height = line_height(style.regular) + 2  # of a row
    drawing = Image.new('RGBA', (width, height * rows + 1))
    draw = ImageDraw.Draw(drawing)
    is_shaded = rng.random() < 0.4
    for row in range(rows + 1):
        y = row * height
        if not is_shaded:
            draw.line((0, y, columns * column - 1, y), style.ink)
        elif row % 2 == 0 and row < rows:
            draw.rectangle((0, y, columns * column - 1, y + height), (*style.ink, 40))
    for row in range(rows):
        font = style.bold if row == 0 else style.regular
        for index in range(columns):
            is_word = row == 0 or index == 0
            text = random_title(rng).split()[-1] if is_word else f'{rng.random() * 100:.1f}'
            while font.getlength(text) > column - 6:
                text = text[:-1]
            right = (index + 1) * column - 4
            draw.text((right, row * height + 2), text, style.ink, font, anchor='ra')
    return drawing


def draw_figure(rng: Generator, style: Style, split: str, width: int) -> Image.Image:
    """A photograph of this split, or a chart by matplotlib."""
    size = width, round(width * rng.uniform(0.5, 0.9))
    if rng.random() < 0.4:
        photographs = photographs_of(split)
        photograph = photographs[str(rng.choice(list(photographs)))]
        crop = random_crop(rng, photograph, size).astype(np.uint8)
        return Image.fromarray(crop).convert('RGBA')
    ink = tuple(part / 255 for part in style.ink)
    look = dict.fromkeys(('text.color', 'axes.edgecolor', 'xtick.color', 'ytick.color'), ink)
    file = io.BytesIO()
    with matplotlib.style.context({**look, 'axes.facecolor': 'none'}, after_reset=True):
        figure = Figure((size[0] / 72, size[1] / 72), 72, facecolor='none', layout='constrained')
        axes = figure.subplots()
        axes.tick_params(labelsize=7)
        count = int(rng.integers(4, 12))
        colors = rng.permutation([f'C{index}' for index in range(10)]).tolist()
        kind = rng.choice(['lines', 'bars', 'points', 'pie'])
        if kind == 'lines':
            for color in colors[: rng.integers(1, 4)]:
                axes.plot(rng.random(count).cumsum(), color=color)
        elif kind == 'bars':
            axes.bar(np.arange(count), rng.random(count), color=colors[0])
        elif kind == 'points':
            axes.scatter(rng.normal(size=80), rng.normal(size=80), 8, color=colors[0])
        else:
            axes.pie(rng.uniform(0.2, 1, count), colors=colors)
        figure.savefig(file, format='png')
    with open_image(file) as image:
        return image.convert('RGBA')


# A page


def random_style(rng: Generator) -> Style:
    size = int(rng.integers(11, 16))
    folder = Path(matplotlib.get_data_path(), 'fonts/ttf')
    regular, bold = (
        ImageFont.truetype(folder / name, size) for name in FONTS[rng.integers(len(FONTS))]
    )
    return Style(*COLORS[rng.integers(len(COLORS))], regular, bold)


def draw_page(rng: Generator, split: str) -> tuple[Image.Image, list[PagePart]]:
    """A page and its parts; its photographs are of this split."""
    width, height = SIZES[rng.integers(len(SIZES))]
    style = random_style(rng)
    margin = int(rng.integers(20, 51))
    inside = width - 2 * margin
    top = margin
    parts: list[PagePart] = []
    if rng.random() < 0.5:
        title = draw_title(rng, style, inside, scale=1.4)
        parts.append(PagePart('title', margin, top, title))
        top += title.height + line_height(style.regular)
    columns = int(rng.integers(1, 3 if width < height else 4))
    gap = int(rng.integers(14, 29))
    column_width = (inside - (columns - 1) * gap) // columns
    for column in range(columns):
        left = margin + column * (column_width + gap)
        drawn = draw_column(rng, style, split, column_width, height - margin - top)
        parts += [PagePart(category, left, top + y, drawing) for category, y, drawing in drawn]
    page = Image.new('RGB', (width, height), style.paper)
    for part in parts:
        page.paste(part.drawing, (part.left, part.top), part.drawing)
    return page, parts


def draw_column(
    rng: Generator, style: Style, split: str, width: int, height: int
) -> Iterator[tuple[str, int, Image.Image]]:
    """Categories, places from the top, and drawings, below each other as far as they fit."""
    gap = int(rng.integers(8, 19))
    top = 0
    misses = 0
    while misses < MISSES:
        drawn = draw_parts(rng, style, split, width)
        needed = sum(drawing.height for _, drawing in drawn) + gap * (len(drawn) - 1)
        if top + needed > height:
            misses += 1
            continue
        for category, drawing in drawn:
            yield category, top, drawing
            top += drawing.height + gap


def draw_parts(
    rng: Generator, style: Style, split: str, width: int
) -> list[tuple[str, Image.Image]]:
    """A text, a list, a table, a title with a text, or a figure with or without a caption."""
    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    if kind == 'text':
        return [('text', draw_text(rng, style, width))]
    if kind == 'list':
        return [('list', draw_list(rng, style, width))]
    if kind == 'table':
        return [('table', draw_table(rng, style, width))]
    if kind == 'title':
        return [('title', draw_title(rng, style, width)), ('text', draw_text(rng, style, width))]
    figure = draw_figure(rng, style, split, width)
    if rng.random() < 0.4:
        return [('figure', figure)]
    caption = [f'Figure {rng.integers(1, 9)}. {random_sentence(rng)}']
    return [('figure', figure), ('text', draw_paragraphs(caption, style.regular, style.ink, width))]


# The data set


def make_pages(root: Union[Path, str], train: int = 400, val: int = 50, seed: int = 0) -> bool:
    """Create the data set, completely or not at all, unless it exists.

    Args:
        root: folder to create.
        train: number of training pages.
        val: number of validation pages.
        seed: another seed gives another data set.

    Returns:
        False if the folder has this data set already.

    Raises:
        UserError: the folder has something else.
    """
    arguments = dict(data='pages', format=FORMAT, train=train, val=val, seed=seed)
    return create_once(root, arguments, write_pages)


def write_pages(folder: Path, arguments: dict) -> None:
    """Write the data set into an empty folder, with a progress bar on stderr."""
    for split in SPLITS:
        drawn = draw_pages(split, arguments)
        drawn = tqdm(drawn, f'{split:5}', arguments[split], unit='page', file=sys.stderr)
        description = 'Parts of pages; see SOURCES.md'
        write_boxed_images(folder, split, drawn, CATEGORIES, description, are_rectangles=True)
    names = ''.join(f'{name}\n' for name in ('background', *CATEGORIES))
    (folder / 'masks/classes.txt').write_text(names)
    (folder / 'SOURCES.md').write_text(sources_of_pages(arguments), encoding='utf-8')


def draw_pages(split: str, arguments: dict) -> Iterator[BoxedImage]:
    """Draw the pages of a split."""
    for number in range(1, arguments[split] + 1):
        # A generator for each page, so that pages do not depend on each other.
        rng = np.random.default_rng((arguments['seed'], SPLITS.index(split), number))
        page, parts = draw_page(rng, split)
        boxes = [Box(CATEGORIES.index(part.category), part.box()) for part in parts]
        yield BoxedImage(f'{number:04d}', page, boxes)


def sources_of_pages(arguments: dict) -> str:
    """The text of SOURCES.md."""
    return f"""\
# Sources

Created by cpvt demo-data pages with the arguments {json.dumps(arguments)}.
The images may be used under the terms of their sources.

{photographs_section()}
## Text: the documentation of cpvt_pyramid

Licence: Apache-2.0. The sentences are in random order.

## Fonts and charts: matplotlib, https://matplotlib.org

The fonts are DejaVu and STIX. The numbers are random.
"""
