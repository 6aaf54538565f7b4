"""A web page to try an exported model: drop an image, and see what the model finds in it.

The page is also an interface for other programs:

    curl --data-binary @photo.jpg 'http://127.0.0.1:7860/predict?size=600&score_thr=0.5'

answers JSON with `summary`, `warnings`, `picture` (a data URL) and, of a detector, `detections`, or
with an `error` of one line. The parameters are optional. The page needs `pip install '.[app]'`.
"""

# No address is the path of a file. The server sends the files of `page/` and small pictures of the
# samples, all of which it holds in memory, and the results of predictions. Uploads are temporary
# files that no address leads to.

import base64
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, Optional

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

from .export.comparison import HEAD, verdict
from .export.self_test import verify_session
from .predict.drawing import jpeg_of
from .predict.images import load_image
from .predict.metadata import reference_name
from .predict.predictor import ExportedModel, check_score_thr
from .tooling.command import IGNORED_WARNINGS, UserError, one_line
from .tooling.images import IMAGE_ENDINGS

SIZES = (32, 1333)  # pixels, of the slider
SAMPLES = 24
SAMPLE_SIDE = 240  # pixels, longest side of a sample's small picture
UPLOAD_BYTES = 256 * 2**20
CLOSING_SECONDS = 3  # for the answers that are under way when the server is stopped
PRIVATE_HOSTS = ('localhost', '127.0.0.1', '[::1]', '[')  # '[': IPv6, as Starlette 0 reads it
HEADERS = {
    'Content-Security-Policy': "default-src 'self'; img-src 'self' blob: data:",
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
}


class Sample(NamedTuple):
    """An image to pick from."""

    path: Path
    picture: bytes  # a small JPEG


class Page:
    """A model and samples, as the page asks for them.

    Args:
        model: makes the predictions.
        samples: images to pick from.
    """

    def __init__(self, model: ExportedModel, samples: Sequence[Sample] = ()) -> None:
        self.model = model
        self.samples = samples

    def about(self) -> dict[str, Any]:
        """What the page shows before there is an image."""
        about = self.model.about
        detects = self.model.kind_of_results == 'detections'
        return {
            'name': self.model.path.name,
            'arch': about.get('arch'),
            'task': about['task'],
            'classes': list(self.model.classes),
            'size': self.model.resize[0] if self.model.resize else None,
            'sizes': self.sizes(),
            'score_thr': about['score_thr'] if detects else None,
            'samples': [sample.path.name for sample in self.samples],
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
        self, path: Path, size: Optional[int] = None, score_thr: Optional[float] = None
    ) -> dict[str, Any]:
        """Predictions for an image; see `serve` for the parameters.

        Raises:
            UserError: a parameter is out of its range.
            OSError: not a complete image.
        """
        smallest, largest = self.sizes()
        if size is not None and not smallest <= size <= largest:
            raise UserError(f'size must be from {smallest} to {largest}, got {size}')
        check_score_thr(score_thr, self.model.kind_of_results)
        model = self.model if size is None else self.model.with_size(size)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter('always')
            warnings.filterwarnings('ignore', IGNORED_WARNINGS)
            (found,) = model.predict([load_image(path)], score_thr)
            picture = jpeg_of(found.draw())
        lines = [self.without_folders(str(note.message)) for note in notes]
        answer: dict[str, Any] = {
            'summary': found.summary() or 'nothing',
            'warnings': [line.removeprefix(f'{path}: ') for line in lines],
            'picture': f'data:image/jpeg;base64,{base64.b64encode(picture).decode()}',
        }
        if found.kind == 'detections':
            answer['detections'] = found.records()
        return answer

    def without_folders(self, line: str) -> str:
        """A message about the model that does not tell where it lies."""
        return line.replace(str(self.model.path), self.model.path.name)

    def path_of(self, sample: int) -> Path:
        """The file of a sample, by its index."""
        if not 0 <= sample < len(self.samples):
            raise UserError(f'no sample {sample}; there are {len(self.samples)}')
        return self.samples[sample].path

    def verify(self) -> dict[str, Any]:
        """Whether the file gives the results of PyTorch on this device: a verdict and a table.

        Raises:
            UserError: the file has no test data, or cannot be run.
        """
        checks = verify_session(self.model.path, self.model.session)
        reference = reference_name(self.model.about)
        return {
            'verdict': f'{self.model.session.device}: {verdict(checks, reference)}',
            'head': HEAD,
            'rows': [check.cells for check in checks],
        }


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
            picture = Image.fromarray(load_image(path))
        except OSError as error:
            warnings.warn(f'left out the sample {path}: {one_line(error)}', stacklevel=2)
            continue
        picture.thumbnail((SAMPLE_SIDE, SAMPLE_SIDE))
        samples.append(Sample(path, jpeg_of(picture)))
        if len(samples) == SAMPLES:
            break
    return samples


def parse_parameters(query: QueryParams) -> dict[str, Any]:
    """The parameters of a prediction: `size` and `score_thr`, and the index of a `sample`.

    Raises:
        UserError: another name, a name twice, or a value that is no number.
    """
    kinds: dict[str, Callable[[str], float]] = {'size': int, 'score_thr': float, 'sample': int}
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


async def receive(request: Request, path: Path) -> None:
    """Write the body of a request to a file."""
    size = 0
    with path.open('wb') as file:
        async for chunk in request.stream():
            size += len(chunk)
            if size > UPLOAD_BYTES:
                raise HTTPException(413, f'an image file may have up to {UPLOAD_BYTES >> 20} MB')
            file.write(chunk)


def create_app(page: Page, hosts: Sequence[str]) -> Starlette:
    """The addresses of a page; `hosts` are the names under which it may be asked for."""
    lock = Lock()  # a prediction may take all cores, and warnings belong to the process

    async def predict(request: Request) -> Response:
        parameters = parse_parameters(request.query_params)
        sample = parameters.pop('sample', None)
        with tempfile.TemporaryDirectory(prefix='cpvt_page_') as folder:
            upload = Path(folder, 'upload')
            await receive(request, upload)
            image = upload if sample is None else page.path_of(sample)
            async with lock:
                return JSONResponse(await run_in_threadpool(page.predict, image, **parameters))

    async def verify(request: Request) -> Response:
        async with lock:
            return JSONResponse(await run_in_threadpool(page.verify))

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({'error': page.without_folders(one_line(error))}, 400)

    async def refuse_address(request: Request, error: Any) -> Response:
        return JSONResponse({'error': error.detail}, error.status_code)

    async def fail(request: Request, error: Exception) -> Response:
        traceback.print_exception(type(error), error, error.__traceback__)
        return JSONResponse({'error': 'an error of the program; its terminal shows more'}, 500)

    folder = Path(__file__).parent / 'page'
    contents = {
        '/': Response((folder / 'index.html').read_bytes(), media_type='text/html'),
        '/page.css': Response((folder / 'page.css').read_bytes(), media_type='text/css'),
        '/page.js': Response((folder / 'page.js').read_bytes(), media_type='text/javascript'),
        '/about': JSONResponse(page.about()),
    }
    for number, sample in enumerate(page.samples):
        contents[f'/samples/{number}'] = Response(sample.picture, media_type='image/jpeg')
    routes = [
        Route('/predict', predict, methods=['POST']),
        Route('/verify', verify, methods=['POST']),
    ]
    for address, content in contents.items():
        routes.append(Route(address, content, methods=['GET']))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={
            UserError: refuse,
            OSError: refuse,
            ClientDisconnect: refuse,  # nobody waits for the answer
            HTTPException: refuse_address,
            Exception: fail,
        },
    )
    app.router.redirect_slashes = False
    return app


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
        hosts = [*PRIVATE_HOSTS, name] if ip_address(address).is_loopback else ['*']
        config = uvicorn.Config(
            create_app(page, hosts),
            log_level='critical',  # errors of the page are printed by the page
            headers=list(HEADERS.items()),
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
