"""A web page to try an exported model: drop an image, and see what the model finds in it.

The page is also an interface for other programs:

    curl --data-binary @photo.jpg 'http://127.0.0.1:7860/predict?shorter_side=600&score_thr=0.5'

answers JSON with `summary`, `warnings`, `picture` (a data URL) and, of a detector, `detections`, or
with an `error` of one line. The parameters are optional. The page needs `pip install '.[app]'`.
"""

# No address is the path of a file. The server sends the files of `page/` and small pictures of the
# samples, all of which it holds in memory, and the results of predictions. Uploads are temporary
# files that no address leads to.
#
# What a request may cost is bounded: the bytes of an upload, the pixels of an image, of the model's
# input and of the picture in the answer. uvicorn limits the number of requests at the same time.

import json
import math
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import uvicorn
from anyio import Lock
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...padding.batching import padded_size
from ..images.formats import IMAGE_ENDINGS
from ..images.reading import load_image, size_of
from ..predict.automatic_tiles import tiling_for, with_tiles
from ..predict.exported import SessionModel
from ..predict.options import check_score_thr
from ..predict.protocol import check_has_scores, line_about_threshold
from ..predictions.drawing import jpeg_of
from ..predictions.kinds import Detections, LabelMap, Prediction, line_about_limit
from ..tooling.command import IGNORED_WARNINGS, UserError, one_line
from ..tooling.files import data_url

SIZES = (32, 1024)  # pixels, of the slider
SAMPLES = 24
SAMPLE_SIDE = 240  # pixels, longest side of a sample's small picture
UPLOAD_BYTES = 64 * 2**20
REQUESTS = 32  # at the same time, and connections; one more is refused
IMAGE_PIXELS = 64 * 2**20  # of an image: phones have up to 50 million
INPUT_PIXELS = 2**20  # of the model's input, unless the model's own size or its tiles have more
PICTURE_PIXELS = 4 * 2**20  # of the picture in the answer; larger images are reduced
PICTURE_SIDE = 8192
CLOSING_SECONDS = 3  # for the answers that are under way when the server is stopped
PRIVATE_HOSTS = ('localhost', '127.0.0.1', '[::1]', '[')  # '[': IPv6, as Starlette 0 reads it
WITHOUT_TILES = 'a shorter side of the input takes them as a whole'
HEADERS = {
    'Content-Security-Policy': (
        "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'"
    ),
    'X-Frame-Options': 'DENY',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
}


class Sample(NamedTuple):
    """An image to pick from. It is read when the server starts, and never again."""

    name: str
    content: bytes  # of its file
    small: bytes  # a JPEG


class Page:
    """A model and samples, as the page asks for them.

    Args:
        model: makes the predictions.
        samples: images to pick from.
    """

    def __init__(self, model: SessionModel, samples: Sequence[Sample] = ()) -> None:
        self.model = model
        self.samples = samples
        self.tiles_done = 0  # of the prediction that is made now
        self.tiles = 0  # all of it; 0: the image is not divided

    def about(self) -> dict[str, Any]:
        """What the page shows before there is an image."""
        about = self.model.about
        detects = self.model.kind == 'detections'
        return {
            'name': printable(self.model.path.name),
            'arch': about.get('arch'),
            'task': about['task'],
            'classes': list(self.model.classes),
            'shorter_side': self.model.resize[0] if self.model.resize else None,
            'sizes': self.sizes(),
            'score_thr': self.model.score_thr if detects else None,
            'least_score': self.model.least_score,
            'samples': [sample.name for sample in self.samples],
            'upload_bytes': UPLOAD_BYTES,
        }

    def sizes(self) -> tuple[int, int]:
        """The shortest and longest shorter side of the input, in pixels."""
        smallest, largest = SIZES
        if not self.model.resize:
            return SIZES
        own = self.model.resize[0]
        return min(smallest, own), max(largest, own)

    def predict(
        self,
        image: np.ndarray,
        shorter_side: Optional[int] = None,
        score_thr: Optional[float] = None,
    ) -> dict[str, Any]:
        """Predictions for an image (H, W, 3).

        Raises:
            UserError: a parameter is out of its range, or the input would be too large.
        """
        given = image
        height, width = image.shape[:2]
        model = self.model_for((height, width), shorter_side, score_thr)
        if not takes_in_tiles(model, (height, width)):
            image = fitted(image)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter('always')
            warnings.filterwarnings('ignore', IGNORED_WARNINGS)
            by_tiles = with_tiles(model, progress=self.progress, advice=WITHOUT_TILES)
            (found,) = by_tiles.predict([by_tiles.prepare(image)])
            drawn = jpeg_of(resized(found, fitted(image)).draw())
        lines = [str(note.message) for note in notes]
        if line := line_about_threshold(score_thr, model):
            lines.append(line)
        if isinstance(found, Detections) and found.is_full:
            lines.append(line_about_limit('this image', found.limit or 0))
        answer: dict[str, Any] = {
            'summary': found.summary() or 'nothing',
            'warnings': [self.without_folders(line) for line in lines],
            'picture': data_url('image/jpeg', drawn),
        }
        if isinstance(found, Detections):
            answer['detections'] = resized(found, given).records()
        return answer

    @contextmanager
    def progress(self, total: int, unit: str, name: str) -> Iterator[Callable[[int], object]]:
        """Counts the tiles of a prediction; see `tooling.progress`."""
        self.tiles_done, self.tiles = 0, total

        def update(count: int) -> None:
            self.tiles_done += count

        try:
            yield update
        finally:
            self.tiles_done, self.tiles = 0, 0

    def model_for(
        self,
        image_size: tuple[int, int],
        shorter_side: Optional[int] = None,
        score_thr: Optional[float] = None,
    ) -> SessionModel:
        """The model with the parameters of a prediction for an image of this height and width.

        Raises:
            UserError: as `predict`.
        """
        smallest, largest = self.sizes()
        if shorter_side is not None and not smallest <= shorter_side <= largest:
            raise UserError(
                f'shorter_side must be from {smallest} to {largest}, got {shorter_side}'
            )
        check_score_thr(score_thr)
        check_has_scores(score_thr, self.model.kind)
        model = self.model
        if score_thr is not None:
            model = model.with_score_thr(score_thr)
        if shorter_side is not None:
            model = model.with_shorter_side(shorter_side)
        self.check_input(model, image_size)
        return model

    def check_input(self, model: SessionModel, size: tuple[int, int]) -> None:
        """Raise a UserError if the input for an image of this height and width has too many
        pixels; it names a size that fits."""
        if all(model.session.shapes['images'][2:]):
            return  # all inputs have the size of the file
        if takes_in_tiles(model, size):
            return
        most = self.input_pixels()
        height, width = model.padded_size(size)
        if height * width <= most:
            return
        smallest, largest = self.sizes()
        fits = range(largest, smallest - 1, -1)
        fitting = [
            n for n in fits if math.prod(self.model.with_shorter_side(n).padded_size(size)) <= most
        ]
        advice = 'cut it'
        if fitting:  # for the page's slider, and for other programs
            advice = f'a shorter side of the input of {fitting[0]} fits (shorter_side)'
        raise UserError(
            f'an image of {size[1]} x {size[0]} pixels would be an input of {width} x {height}, '
            f'and this page takes up to {most / 1e6:.1f} megapixels; {advice}'
        )

    def input_pixels(self) -> int:
        """The largest number of pixels of the model's input."""
        tiling = tiling_for(self.model)
        if tiling is not None:
            return max(INPUT_PIXELS, tiling.above)
        if not self.model.resize:
            return INPUT_PIXELS
        short, long = self.model.resize
        own = padded_size((int(short), int(long)), self.model.about['stride'])
        return max(INPUT_PIXELS, math.prod(own))

    def without_folders(self, line: str) -> str:
        """A message about the model that does not tell where it lies."""
        return printable(line.replace(str(self.model.path), self.model.path.name))

    def sample(self, number: int) -> bytes:
        """The content of the file of a sample, by its index."""
        if not 0 <= number < len(self.samples):
            raise UserError(f'no sample {number}; there are {len(self.samples)}')
        return self.samples[number].content


def takes_in_tiles(model: SessionModel, size: tuple[int, int]) -> bool:
    """Whether an image of this height and width is taken in tiles."""
    tiling = tiling_for(model)
    return tiling is not None and math.prod(size) > tiling.above


def fitted(image: np.ndarray) -> np.ndarray:
    """An image (H, W, 3) with at most `PICTURE_PIXELS` and sides of `PICTURE_SIDE`."""
    height, width = image.shape[:2]
    scale = min(1.0, math.sqrt(PICTURE_PIXELS / (height * width)), PICTURE_SIDE / max(image.shape))
    if scale == 1:
        return image
    smaller = max(int(width * scale), 1), max(int(height * scale), 1)
    return np.asarray(Image.fromarray(image).resize(smaller, Image.Resampling.BILINEAR))


def check_pixels_of(path: Path) -> Optional[tuple[int, int]]:
    """The height and width of an image, by its header; None if it cannot be read.

    Raises:
        UserError: it has more than `IMAGE_PIXELS`.
    """
    size = size_of(path)
    if size is not None and math.prod(size) > IMAGE_PIXELS:
        raise UserError(
            f'an image may have up to {IMAGE_PIXELS / 1e6:.0f} megapixels, got {size[1]} x '
            f'{size[0]}; cut or reduce it'
        )
    return size


def resized(found: Prediction, image: np.ndarray) -> Prediction:
    """A prediction in pixels of an image (H, W, 3), which is the one that it was made for, in
    another size. Masks of objects stay as they are."""
    if found.image.shape == image.shape:
        return found
    height, width = image.shape[:2]
    if isinstance(found, Detections):
        down, across = height / found.image.shape[0], width / found.image.shape[1]
        boxes = found.boxes * np.array([across, down] * 2, np.float32)
        return replace(found, image=image, boxes=boxes)
    assert isinstance(found, LabelMap)
    rows = np.arange(height) * found.image.shape[0] // height
    columns = np.arange(width) * found.image.shape[1] // width
    return replace(found, image=image, labels=found.labels[rows[:, None], columns])


def printable(text: str) -> str:
    """Text without the bytes of file names that are not UTF-8, which JSON cannot hold."""
    return text.encode('utf-8', 'backslashreplace').decode()


def read_samples(folder: Path) -> list[Sample]:
    """The first `SAMPLES` images in a folder, by name. Hidden files and links that lead out of the
    folder are left out; a warning names links, and files that cannot be read."""
    samples: list[Sample] = []
    for path in sorted(folder.iterdir()):
        if (
            path.name.startswith('.')
            or path.suffix.lower() not in IMAGE_ENDINGS
            or not path.is_file()
        ):
            continue
        try:
            if path.resolve().parent != folder.resolve():
                raise OSError('a link to another folder')
            check_pixels_of(path)
            picture = load_image(path)
            content = path.read_bytes()
        except (OSError, UserError) as error:
            name = printable(str(path))
            warnings.warn(f'left out the sample {name}: {one_line(error)}', stacklevel=2)
            continue
        small = Image.fromarray(picture)
        small.thumbnail((SAMPLE_SIDE, SAMPLE_SIDE))
        samples.append(Sample(printable(path.name), content, jpeg_of(small)))
        if len(samples) == SAMPLES:
            break
    return samples


def check_report(path: Path, backend: str) -> None:
    """Refuse a file to which its export has found other results than PyTorch's in this runtime."""
    report = path.with_suffix('.report.json')
    try:
        checks = json.loads(report.read_text(encoding='utf-8'))['checks']
        failed = [check for check in checks if check['runtime'] == backend and not check['passed']]
    except (OSError, ValueError, KeyError, TypeError):  # none, or not that of an export
        return
    if failed:
        raise UserError(
            f'{path} gave other results than PyTorch in {backend} when it was exported, see '
            f'{report}; choose another --backend'
        )


def parse_parameters(query: QueryParams) -> dict[str, Any]:
    """The parameters of a prediction: `shorter_side` and `score_thr`, and the index of a `sample`.

    Raises:
        UserError: another name, a name twice, or a value that is no number.
    """
    kinds: dict[str, Callable[[str], float]] = {
        'shorter_side': int,
        'score_thr': float,
        'sample': int,
    }
    found: dict[str, Any] = {}
    for name, text in query.multi_items():
        if name not in kinds:
            raise UserError(f'unknown parameter {name!r}; one of {", ".join(kinds)}')
        if name in found:
            raise UserError(f'{name} is given twice')
        try:
            found[name] = kinds[name](text)
        except ValueError:
            number = 'a whole number' if kinds[name] is int else 'a number'
            raise UserError(f'{name} must be {number}, got {text[:40]!r}') from None
    return found


def check_origin(request: Request) -> None:
    """Refuse what the page of another server has asked for. Programs send neither header."""
    site = request.headers.get('sec-fetch-site')
    origin = request.headers.get('origin')
    is_foreign = False
    if site is not None:
        is_foreign = site not in ('same-origin', 'none')
    elif origin is not None:
        is_foreign = origin.partition('://')[2] != request.headers.get('host')
    if is_foreign:
        raise HTTPException(403, 'a page of another server asks; open this page instead')


async def receive(request: Request, path: Path) -> None:
    """Write the body of a request to a file. Where it is refused, the connection is closed, so that
    the rest of the body does not come."""
    too_large = HTTPException(
        413, f'an image file may have up to {UPLOAD_BYTES >> 20} MB', {'Connection': 'close'}
    )
    if int(request.headers.get('content-length', 0)) > UPLOAD_BYTES:
        raise too_large
    size = 0
    with path.open('wb') as file:
        async for chunk in request.stream():
            size += len(chunk)
            if size > UPLOAD_BYTES:
                raise too_large
            file.write(chunk)


def create_app(page: Page, hosts: Sequence[str]) -> Starlette:
    """The addresses of a page; `hosts` are the names under which it may be asked for."""
    routes = [
        Route('/predict', answer_prediction, methods=['POST']),
        Route('/progress', answer_progress, methods=['GET']),
    ]
    for address, content in page_contents(page).items():
        routes.append(Route(address, content, methods=['GET']))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={
            UserError: answer_mistake,
            OSError: answer_mistake,
            ClientDisconnect: answer_mistake,  # nobody waits for the answer
            HTTPException: answer_other_status,
            Exception: report_defect,
        },
    )
    app.router.redirect_slashes = False
    app.state.page = page
    app.state.lock = Lock()  # a prediction may take all cores, and warnings are the process's
    return app


def page_contents(page: Page) -> dict[str, Response]:
    """What is sent as it is, by its address."""
    folder = Path(__file__).parent
    contents = {
        '/': Response((folder / 'index.html').read_bytes(), media_type='text/html'),
        '/page.css': Response((folder / 'page.css').read_bytes(), media_type='text/css'),
        '/page.js': Response((folder / 'page.js').read_bytes(), media_type='text/javascript'),
        '/about': JSONResponse(page.about()),
    }
    for number, sample in enumerate(page.samples):
        contents[f'/samples/{number}'] = Response(sample.small, media_type='image/jpeg')
    return contents


async def answer_prediction(request: Request) -> Response:
    """Predictions for the image in the body of a request, or for a sample."""
    page: Page = request.app.state.page
    check_origin(request)
    parameters = parse_parameters(request.query_params)
    sample = parameters.pop('sample', None)
    with tempfile.TemporaryDirectory(prefix='cpvt_page_') as folder:
        upload = Path(folder, 'upload')
        await receive(request, upload)

        def answer() -> dict[str, Any]:
            if sample is not None:
                upload.write_bytes(page.sample(sample))
            return predict_upload(page, upload, parameters)

        async with request.app.state.lock:
            if await request.is_disconnected():
                raise ClientDisconnect
            return JSONResponse(await run_in_threadpool(answer))


async def answer_progress(request: Request) -> Response:
    """How many tiles of the image are done for which a prediction is made now, and of how many; 0
    of 0 if it is not divided."""
    page: Page = request.app.state.page
    return JSONResponse({'done': page.tiles_done, 'tiles': page.tiles})


async def answer_mistake(request: Request, error: Exception) -> Response:
    """The answer to a mistake of the user."""
    page: Page = request.app.state.page
    return JSONResponse({'error': page.without_folders(one_line(error))}, 400)


async def answer_other_status(request: Request, error: Any) -> Response:
    return JSONResponse({'error': error.detail}, error.status_code, error.headers)


async def report_defect(request: Request, error: Exception) -> Response:
    """The answer after an error of the program, which is printed here."""
    traceback.print_exception(type(error), error, error.__traceback__)
    return JSONResponse({'error': 'an error of the program; its terminal shows more'}, 500)


def predict_upload(page: Page, path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Predictions for an uploaded image, which is refused before its pixels are decoded if it is
    too large; messages do not name its temporary file."""
    size = check_pixels_of(path)
    if size is not None:
        page.model_for(size, **parameters)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter('always')
        warnings.filterwarnings('ignore', IGNORED_WARNINGS)
        try:
            image = load_image(path)
        except OSError as error:
            raise UserError(without_path(one_line(error), path)) from error
    answer = page.predict(image, **parameters)
    about_file = [without_path(str(note.message), path) for note in notes]
    return answer | {'warnings': about_file + answer['warnings']}


def without_path(line: str, path: Path) -> str:
    return line.removeprefix(f'{path}: ').replace(str(path), 'the image')


class Server(uvicorn.Server):
    """Serves a page; `run([server.listener])` begins.

    One that listens on this machine alone refuses other names: a foreign site could let its name
    point to this machine, in order to read what only this machine may see.
    """

    def __init__(self, page: Page, host: str, port: int) -> None:
        self.page = page
        family = socket.AF_INET6 if ':' in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family)
        address, port = self.listener.getsockname()[:2]
        name = f'[{address}]' if ':' in address else address
        self.url = f'http://{name}:{port}'
        self.is_private = ip_address(address).is_loopback
        hosts = [*PRIVATE_HOSTS, name] if self.is_private else ['*']
        config = uvicorn.Config(
            create_app(page, hosts),
            http='h11',  # the same answers, also where httptools is installed
            limit_concurrency=REQUESTS,
            log_config=None,  # leaves the handlers of other loggers as they are
            log_level='critical',  # errors of the page are printed by the page
            headers=list(HEADERS.items()),
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
