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
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Union

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from ..images.formats import open_image
from .boxed_images import Box, BoxedImage, write_boxed_images
from .folders import create_once
from .photographs import photographs_of, photographs_section, random_crop

CATEGORIES = ('text', 'title', 'list', 'table', 'figure')
SPLITS = ('train', 'val')
FORMAT = 2  # increased when the same arguments give other files

SIZES = ((480, 640), (460, 650), (650, 460), (640, 480), (720, 405))  # pixels, width and height
MARGIN = (20, 50)  # pixels
COLUMN_GAP = (14, 28)  # pixels
PART_GAP = (8, 18)  # pixels, between the parts of a column
MISSES = 3  # a column ends after this number of parts that do not fit
KINDS = {'text': 0.3, 'title': 0.2, 'list': 0.15, 'table': 0.15, 'figure': 0.2}  # shares
FONT_SIZE = (11, 15)  # pixels
FONTS = (  # of matplotlib: regular and bold
    ('DejaVuSans.ttf', 'DejaVuSans-Bold.ttf'),
    ('DejaVuSerif.ttf', 'DejaVuSerif-Bold.ttf'),
    ('STIXGeneral.ttf', 'STIXGeneralBol.ttf'),
    ('DejaVuSansMono.ttf', 'DejaVuSansMono-Bold.ttf'),
)

Color = tuple[int, int, int]


class Colors(NamedTuple):
    """The colors of a page."""

    paper: Color
    ink: Color
    title: Color


COLORS = (
    Colors((255, 255, 255), (20, 20, 20), (0, 0, 0)),
    Colors((255, 255, 255), (60, 60, 60), (20, 60, 120)),
    Colors((250, 246, 236), (50, 40, 30), (120, 40, 20)),
    Colors((238, 240, 242), (30, 40, 50), (0, 90, 90)),
    Colors((30, 34, 40), (210, 214, 220), (130, 190, 255)),
)


class Style(NamedTuple):
    """How the parts of a page look.

    Attributes:
        regular: font of the text.
        bold: font of a table's head.
        heading: font of titles.
        line: pixels from a line of text to the next.
        is_justified: whether lines of text end at the right border.
    """

    colors: Colors
    regular: ImageFont.FreeTypeFont
    bold: ImageFont.FreeTypeFont
    heading: ImageFont.FreeTypeFont
    line: int
    is_justified: bool


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


# Random choices


def between(rng: np.random.Generator, limits: tuple[int, int]) -> int:
    """A random number from the first to the second."""
    return int(rng.integers(limits[0], limits[1] + 1))


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


def random_sentence(rng: np.random.Generator) -> str:
    return sentences()[rng.integers(len(sentences()))]


def random_title(rng: np.random.Generator) -> str:
    return short_sentences()[rng.integers(len(short_sentences()))]


def random_word(rng: np.random.Generator) -> str:
    return random_title(rng).split()[-1]


# Parts of a page, not wider than asked


def new_drawing(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Transparent paper, and what draws on it."""
    drawing = Image.new('RGBA', (width, height))
    return drawing, ImageDraw.Draw(drawing)


def wrapped_lines(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[list[str]]:
    """The words of each line of a text."""
    lines: list[list[str]] = [[]]
    for word in text.split():
        if lines[-1] and font.getlength(' '.join([*lines[-1], word])) > width:
            lines.append([])
        lines[-1].append(word)
    return lines


def beginning_of(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """As many of its characters as fit."""
    while font.getlength(text) > width:
        text = text[:-1]
    return text


def draw_lines(
    draw: ImageDraw.ImageDraw,
    lines: list[list[str]],
    corner: tuple[int, int],
    width: int,
    style: Style,
) -> None:
    """Draw the lines of a paragraph from its corner, left and top, downwards."""
    left, y = corner
    for line in lines:
        is_stretched = style.is_justified and line is not lines[-1]
        if is_stretched and len(line) > 1:
            lengths = [style.regular.getlength(word) for word in line]
            gap = (width - sum(lengths)) / (len(line) - 1)
            x = float(left)
            for word, length in zip(line, lengths):
                draw.text((x, y), word, style.colors.ink, style.regular)
                x += length + gap
        else:
            draw.text((left, y), ' '.join(line), style.colors.ink, style.regular)
        y += style.line


def draw_paragraph(text: str, style: Style, width: int) -> Image.Image:
    lines = wrapped_lines(text, style.regular, width)
    drawing, draw = new_drawing(width, style.line * (len(lines) + 1))
    draw_lines(draw, lines, (0, 0), width, style)
    return cut_below(drawing)


def ink_box(drawing: Image.Image) -> tuple[int, int, int, int]:
    """Corners x1, y1, x2, y2 of what is not transparent."""
    box = drawing.getbbox()
    assert box is not None, 'an empty drawing'
    return box


def cut_below(drawing: Image.Image) -> Image.Image:
    """A drawing without the empty paper below its ink."""
    return drawing.crop((0, 0, drawing.width, ink_box(drawing)[3]))


def draw_text(rng: np.random.Generator, style: Style, width: int) -> Image.Image:
    """Up to five sentences that follow each other."""
    start = rng.integers(len(sentences()) - 5)
    text = ' '.join(sentences()[start : start + between(rng, (1, 5))])
    return draw_paragraph(text, style, width)


def draw_title(rng: np.random.Generator, style: Style, width: int) -> Image.Image:
    text = random_title(rng)
    if rng.random() < 0.3:
        text = f'{rng.integers(1, 9)}.{rng.integers(1, 9)} {text}'
    lines = wrapped_lines(text, style.heading, width)
    step = round(1.3 * style.heading.size)
    drawing, draw = new_drawing(width, step * (len(lines) + 1))
    for number, line in enumerate(lines):
        draw.text((0, number * step), ' '.join(line), style.colors.title, style.heading)
    return cut_below(drawing)


def draw_list(rng: np.random.Generator, style: Style, width: int) -> Image.Image:
    """Two to six sentences with bullets, dashes, numbers or letters."""
    count = between(rng, (2, 6))
    marks = {
        'bullets': '\u2022' * count,
        'dashes': '\u2013' * count,
        'numbers': [f'{number}.' for number in range(1, count + 1)],
        'letters': [f'{letter})' for letter in 'abcdef'[:count]],
    }
    indent = round(1.8 * style.regular.size)
    items = [
        wrapped_lines(random_sentence(rng), style.regular, width - indent) for _ in range(count)
    ]
    drawing, draw = new_drawing(width, style.line * (sum(map(len, items)) + 1))
    top = 0
    for mark, lines in zip(marks[rng.choice(list(marks))], items):
        draw.text((2, top), mark, style.colors.ink, style.regular)
        draw_lines(draw, lines, (indent, top), width - indent, style)
        top += style.line * len(lines)
    return cut_below(drawing)


def draw_table(rng: np.random.Generator, style: Style, width: int) -> Image.Image:
    """Names in the first column, numbers in the others."""
    rows = between(rng, (3, 9))
    names = round(0.3 * width)  # width of the first column
    most = int(np.clip((width - names) // (4 * style.regular.size), 2, 7))
    columns = between(rng, (2, most))
    edges = [0, *np.linspace(names, width - 1, columns + 1)]
    cell = (width - names) / columns - 6
    height = style.line + between(rng, (1, 5))  # of a row
    drawing, draw = new_drawing(width, height * rows + 1)
    draw_rules(rng, draw, style, edges, [height * row for row in range(rows + 1)])
    decimals = between(rng, (0, 2))
    largest = 10.0 ** between(rng, (0, 3))
    for row in range(rows):
        font = style.bold if row == 0 else style.regular
        y = row * height + (height - style.line) // 2 + 1
        name = beginning_of(random_word(rng).capitalize(), font, names - 6)
        draw.text((3, y), name, style.colors.ink, font)
        for right in edges[2:]:
            number = f'{rng.random() * largest:.{decimals}f}'
            text = beginning_of(random_word(rng) if row == 0 else number, font, cell)
            draw.text((right - 3, y), text, style.colors.ink, font, anchor='ra')
    return drawing


def draw_rules(
    rng: np.random.Generator,
    draw: ImageDraw.ImageDraw,
    style: Style,
    xs: Sequence[float],
    ys: Sequence[float],
) -> None:
    """Draw the lines of a table, or shade every other row.

    Args:
        rng: chooses.
        draw: draws on the table.
        style: of the page.
        xs: where columns begin, and the last one ends.
        ys: where rows begin, and the last one ends.
    """
    left, right = xs[0], xs[-1]
    kind = rng.choice(['grid', 'rows', 'head', 'shade'])
    if kind == 'shade':
        paper, ink = np.array(style.colors.paper), np.array(style.colors.ink)
        shade = tuple((0.85 * paper + 0.15 * ink).astype(int).tolist())
        for top, bottom in list(zip(ys, ys[1:]))[::2]:
            draw.rectangle((left, top, right, bottom - 1), shade)
        return
    for y in (ys[0], ys[1], ys[-1]) if kind == 'head' else ys:
        draw.line((left, y, right, y), style.colors.ink)
    if kind == 'grid':
        for x in xs:
            draw.line((x, ys[0], x, ys[-1]), style.colors.ink)


def draw_photograph(rng: np.random.Generator, split: str, width: int) -> Image.Image:
    photographs = photographs_of(split)
    photograph = photographs[str(rng.choice(list(photographs)))]
    size = width, round(width * rng.uniform(0.4, 0.9))
    return Image.fromarray(random_crop(rng, photograph, size).astype(np.uint8)).convert('RGBA')


def draw_chart(rng: np.random.Generator, style: Style, width: int) -> Image.Image:
    """A chart by matplotlib."""
    dpi = 72
    size = width / dpi, width * rng.uniform(0.5, 0.9) / dpi
    ink = tuple(part / 255 for part in style.colors.ink)
    look: dict = {
        'font.size': rng.uniform(6, 9),
        'text.color': ink,
        'axes.labelcolor': ink,
        'axes.edgecolor': ink,
        'xtick.color': ink,
        'ytick.color': ink,
        'axes.facecolor': 'none',
        'axes.spines.top': rng.random() < 0.5,
        'axes.spines.right': rng.random() < 0.5,
        'axes.grid': rng.random() < 0.4,
        'grid.alpha': 0.4,
    }
    file = io.BytesIO()
    with matplotlib.style.context(look, after_reset=True):
        figure = Figure(size, dpi, facecolor='none', layout='constrained')
        axes = figure.subplots()
        fill_chart(rng, axes)
        if rng.random() < 0.5:
            axes.set_xlabel(random_title(rng))
            axes.set_ylabel(random_word(rng))
        figure.savefig(file, format='png')
    with open_image(file) as image:
        return image.convert('RGBA')


def fill_chart(rng: np.random.Generator, axes: Axes) -> None:
    """Draw random numbers as a chart of a random kind."""
    colors = rng.permutation([f'C{index}' for index in range(10)]).tolist()
    some_colors = colors[: between(rng, (1, 3))]
    count = between(rng, (4, 11))
    kind = rng.choice(['lines', 'bars', 'points', 'histogram', 'image', 'pie'])
    if kind == 'lines':
        for color in some_colors:
            axes.plot(rng.random(count).cumsum(), color=color, marker=rng.choice(['', 'o']))
    elif kind == 'bars':
        axes.bar(np.arange(count), rng.random(count), color=colors[0])
    elif kind == 'points':
        for color in some_colors:
            axes.scatter(rng.normal(size=40), rng.normal(size=40), 8, color=color)
    elif kind == 'histogram':
        axes.hist(rng.normal(size=300), between(rng, (8, 23)), color=colors[0])
    elif kind == 'image':
        axes.imshow(rng.random((6, 8)), cmap=str(rng.choice(['viridis', 'Blues', 'gray'])))
    else:
        axes.pie(rng.uniform(0.2, 1, between(rng, (3, 6))), colors=colors)


# A page


def font_named(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of matplotlib."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), 'fonts/ttf', name), size)


def random_style(rng: np.random.Generator) -> Style:
    size = between(rng, FONT_SIZE)
    regular, bold = FONTS[rng.integers(len(FONTS))]
    heading = FONTS[rng.integers(len(FONTS))][1] if rng.random() < 0.3 else bold
    return Style(
        colors=COLORS[rng.integers(len(COLORS))],
        regular=font_named(regular, size),
        bold=font_named(bold, size),
        heading=font_named(heading, round(size * rng.uniform(1.15, 1.7))),
        line=round(size * rng.uniform(1.25, 1.6)),
        is_justified=rng.random() < 0.4,
    )


def draw_page(rng: np.random.Generator, split: str) -> tuple[Image.Image, list[PagePart]]:
    """A page and its parts; its photographs are of this split."""
    width, height = SIZES[rng.integers(len(SIZES))]
    style = random_style(rng)
    margin = between(rng, MARGIN)
    inside = width - 2 * margin
    top = margin
    parts: list[PagePart] = []
    if rng.random() < 0.5:
        larger = style.heading.font_variant(size=round(1.4 * style.heading.size))
        title = draw_title(rng, style._replace(heading=larger), inside)
        is_centred = rng.random() < 0.4
        left = margin + (inside - ink_box(title)[2]) // 2 if is_centred else margin
        parts.append(PagePart('title', left, top, title))
        top += title.height + style.line
    columns = between(rng, (1, 2 if width < height else 3))
    gap = between(rng, COLUMN_GAP)
    column_width = (inside - (columns - 1) * gap) // columns
    for column in range(columns):
        left = margin + column * (column_width + gap)
        drawn = draw_column(rng, style, split, column_width, height - margin - top)
        parts += [PagePart(category, left, top + y, drawing) for category, y, drawing in drawn]
    page = Image.new('RGB', (width, height), style.colors.paper)
    for part in parts:
        page.paste(part.drawing, (part.left, part.top), part.drawing)
    return page, parts


def draw_column(
    rng: np.random.Generator, style: Style, split: str, width: int, height: int
) -> Iterator[tuple[str, int, Image.Image]]:
    """Categories, places from the top, and drawings, below each other as far as they fit."""
    gap = between(rng, PART_GAP)
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
    rng: np.random.Generator, style: Style, split: str, width: int
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
        title = draw_title(rng, style, width)
        return [('title', title), ('text', draw_text(rng, style, width))]
    if rng.random() < 0.4:
        figure = draw_photograph(rng, split, width)
    else:
        figure = draw_chart(rng, style, width)
    if rng.random() < 0.4:
        return [('figure', figure)]
    caption = f'Figure {rng.integers(1, 9)}. {random_sentence(rng)}'
    return [('figure', figure), ('text', draw_paragraph(caption, style, width))]


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
