"""A web page to try an exported model: drop an image, and see what the model finds in it.

The page is also an interface for other programs:

    curl --data-binary @photo.jpg 'http://127.0.0.1:7860/predict?size=600&score_thr=0.5'

answers JSON with `summary`, `warnings`, `picture` (a data URL) and, of a detector, `detections`, or
with an `error` of one line. The parameters are optional. The page needs no package besides those of
`cpvt run`.
"""

# No address is the path of a file. The server sends the files of `page/` and small pictures of the
# samples, all of which it holds in memory, and the results of predictions. Uploads are temporary
# files that no address leads to.

import base64
import io
import json
import re
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, Literal, NamedTuple, Optional
from urllib.parse import parse_qsl, urlsplit

from PIL import Image

from .runtime.comparison import HEAD, verdict
from .runtime.images import load_image
from .runtime.predictor import ExportedModel, check_score_thr
from .runtime.self_test import verify_session
from .tooling.command import IGNORED_WARNINGS, UserError, one_line, run_command
from .tooling.inputs import IMAGES, local_path

SIZES = (32, 1333)  # pixels, of the slider
SAMPLES = 24
SAMPLE_SIDE = 240  # pixels, longest side of a sample's small picture
UPLOAD_BYTES = 256 * 2**20
CHUNK_BYTES = 2**20
IDLE_SECONDS = 60  # after which a silent connection is closed
FILES = {  # of page/, by address
    '/': ('index.html', 'text/html; charset=utf-8'),
    '/page.css': ('page.css', 'text/css; charset=utf-8'),
    '/page.js': ('page.js', 'text/javascript; charset=utf-8'),
}
HEADERS = {
    'Content-Security-Policy': "default-src 'self'; img-src 'self' blob: data:",
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
}


class Content(NamedTuple):
    """What the server sends."""

    data: bytes
    kind: str  # MIME type


class Sample(NamedTuple):
    """An image to pick from."""

    path: Path
    picture: bytes  # a small JPEG


class Refused(Exception):
    """A request that is answered with an HTTP status and a line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class Page:
    """A model and samples, as the page asks for them. Threads wait for each other.

    Args:
        model: makes the predictions.
        samples: images to pick from.
    """

    def __init__(self, model: ExportedModel, samples: Sequence[Sample] = ()) -> None:
        self.model, self.samples = model, samples
        self.lock = threading.Lock()

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
        with self.lock, recorded_warnings() as notes:
            (found,) = model.predict([load_image(path)], score_thr)
            picture = jpeg(found.draw())
        answer = {
            'summary': found.summary() or 'nothing',
            'warnings': [self.without_folders(note).removeprefix(f'{path}: ') for note in notes],
            'picture': f'data:image/jpeg;base64,{base64.b64encode(picture).decode()}',
        }
        if found.kind == 'detections':
            answer['detections'] = found.records()
        return answer

    def without_folders(self, line: str) -> str:
        """A message about the model that does not tell where it lies."""
        return line.replace(str(self.model.path), self.model.path.name)

    def verify(self) -> dict[str, Any]:
        """Whether the file gives the results of PyTorch on this device: a verdict and a table.

        Raises:
            UserError: the file has no test data, or cannot be run.
        """
        with self.lock:
            checks = verify_session(self.model.path, self.model.session)
        return {
            'verdict': f'{self.model.session.device}: {verdict(checks)}',
            'head': HEAD,
            'rows': [check.cells for check in checks],
        }


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the lines of warnings; they are complete at the end of the context."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter('always')
        warnings.filterwarnings('ignore', IGNORED_WARNINGS)
        yield lines
    lines += [str(note.message) for note in notes]


def jpeg(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, 'JPEG', quality=90)
    return file.getvalue()


def read_samples(folder: Path) -> list[Sample]:
    """The first `SAMPLES` images in a folder, by name. Hidden files and links that lead out of the
    folder are left out; a warning names links, and files that cannot be read."""
    samples: list[Sample] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith('.') or path.suffix.lower() not in IMAGES or not path.is_file():
            continue
        try:
            if path.resolve().parent != folder.resolve():
                raise OSError('a link to another folder')
            picture = Image.fromarray(load_image(path))
        except OSError as error:
            warnings.warn(f'left out the sample {path}: {one_line(error)}', stacklevel=2)
            continue
        picture.thumbnail((SAMPLE_SIDE, SAMPLE_SIDE))
        samples.append(Sample(path, jpeg(picture)))
        if len(samples) == SAMPLES:
            break
    return samples


def parse_parameters(query: str) -> dict[str, Any]:
    """The parameters of a prediction from the query of an address: `size` and `score_thr`, and the
    index of a `sample`.

    Raises:
        UserError: another name, a name twice, or a value that is no number.
    """
    kinds: dict[str, Callable[[str], float]] = {'size': int, 'score_thr': float, 'sample': int}
    found: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
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


def is_loopback(host: str) -> bool:
    """Whether a host name or address is that of this machine for itself."""
    if host == 'localhost':
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Server(ThreadingTCPServer):
    """Serves a page, with a thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, page: Page, host: str, port: int) -> None:
        self.page = page
        self.is_private = is_loopback(host)
        folder = Path(__file__).parent / 'page'
        self.files = {
            address: Content((folder / name).read_bytes(), kind)
            for address, (name, kind) in FILES.items()
        }
        self.address_family = socket.AF_INET6 if ':' in host else socket.AF_INET
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f'http://[{host}]:{port}' if ':' in str(host) else f'http://{host}:{port}'

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # such as a browser that closed its tab
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    protocol_version = 'HTTP/1.1'
    server_version, sys_version = 'cpvt_pyramid', ''
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:  # noqa: N802 the name that http.server calls
        self.answer(self.find_content)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
        self.answer(self.compute)

    def answer(self, content_of: Callable[[str, str], Content]) -> None:
        """Send what a function of the path and the query returns, or the line of its error."""
        try:
            self.check_host()
            try:
                parts = urlsplit(self.path)
            except ValueError:
                raise Refused(400, 'a damaged address') from None
            content, status = content_of(parts.path, parts.query), 200
        except Refused as error:
            content, status = as_json({'error': str(error)}), error.status
        except (ConnectionError, TimeoutError):
            raise  # nobody waits for an answer
        except Exception:
            traceback.print_exc()
            line = 'an error of the program; its terminal shows more'
            content, status = as_json({'error': line}), 500
        self.send(content, status)

    def check_host(self) -> None:
        """Refuse names that a foreign site has let point to this machine, in order to read what
        only this machine may see."""
        try:
            host = urlsplit(f'//{self.headers.get("Host", "")}').hostname
        except ValueError:
            host = None
        if self.server.is_private and not is_loopback(host or ''):
            self.close_connection = True
            raise Refused(403, 'this page is for its own machine; --host lets others in')

    def find_content(self, path: str, query: str) -> Content:
        page = self.server.page
        if path in self.server.files:
            return self.server.files[path]
        if path == '/about':
            return as_json(page.about())
        if path in ('/predict', '/verify'):
            raise Refused(405, f'{path} needs a POST request')
        sample = re.fullmatch('/samples/([0-9]{1,4})', path)
        if sample and int(sample[1]) < len(page.samples):
            return Content(page.samples[int(sample[1])].picture, 'image/jpeg')
        raise Refused(404, 'nothing at this address')

    def compute(self, path: str, query: str) -> Content:
        page = self.server.page
        with tempfile.TemporaryDirectory(prefix='cpvt_page_') as folder:
            upload = Path(folder, 'upload')
            self.receive(upload)
            try:
                if path == '/verify':
                    return as_json(page.verify())
                if path == '/predict':
                    parameters = parse_parameters(query)
                    sample = parameters.pop('sample', None)
                    if sample is not None and not 0 <= sample < len(page.samples):
                        raise UserError(f'no sample {sample}; there are {len(page.samples)}')
                    image = upload if sample is None else page.samples[sample].path
                    return as_json(page.predict(image, **parameters))
            except (UserError, OSError) as error:
                raise Refused(400, page.without_folders(one_line(error))) from error
        raise Refused(404, 'nothing at this address')

    def receive(self, path: Path) -> None:
        """Write the body of the request to a file."""
        length = self.headers.get('Content-Length', '0')
        self.close_connection, close = True, self.close_connection  # if it is not read to its end
        if 'Transfer-Encoding' in self.headers or not re.fullmatch('[0-9]{1,18}', length):
            raise Refused(411, 'the request needs a Content-Length')
        left = int(length)
        if left > UPLOAD_BYTES:
            raise Refused(413, f'an image file may have up to {UPLOAD_BYTES >> 20} MB')
        with path.open('wb') as file:
            while left:
                chunk = self.rfile.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise ConnectionError('the client closed the connection')
                file.write(chunk)
                left -= len(chunk)
        self.close_connection = close

    def send(self, content: Content, status: int) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header('Content-Type', content.kind)
        self.send_header('Content-Length', str(len(content.data)))
        if self.close_connection:
            self.send_header('Connection', 'close')
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content.data)

    def send_error(
        self, code: int, message: Optional[str] = None, explain: Optional[str] = None
    ) -> None:
        """What http.server calls for a request that it cannot read."""
        self.close_connection = True
        self.send(as_json({'error': message or self.responses[code][0]}), code)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""


def as_json(value: Any) -> Content:
    return Content(json.dumps(value).encode(), 'application/json')


def serve(
    model: str,
    samples: Optional[str] = None,
    backend: Literal['onnxruntime', 'openvino'] = 'onnxruntime',
    host: str = '127.0.0.1',
    port: int = 7860,
) -> None:
    """Serve the page until it is interrupted.

    Args:
        model (MODEL): a .onnx file of tools/export.py.
        samples (DIR): folder of images to pick from, which everyone who opens the page sees; by
            default that of the model.
        backend: what runs the model.
        host: address to listen on; 0.0.0.0 lets other machines in, without a password.
        port: port to listen on; 0 takes a free one.
    """
    exported = ExportedModel(local_path(model), backend)
    folder = Path(samples or Path(model).parent)
    if not folder.is_dir():
        raise UserError(f'no folder at {folder}')
    page = Page(exported, read_samples(folder))
    try:
        server = Server(page, host, port)
    except (OSError, OverflowError) as error:  # a port above 65535
        raise UserError(f'cannot listen on {host}:{port}: {one_line(error)}') from error
    with server:
        print(f'{server.url}, with {len(page.samples)} samples of {folder}; stop it with Ctrl-C')
        sys.stdout.flush()
        server.serve_forever()


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(serve, argv, 'the page is closed')


if __name__ == '__main__':
    sys.exit(main())
