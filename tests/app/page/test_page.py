"""The web page in Chromium, which shows what a person sees: run by `make test-page`.

Each test leaves pictures of the page in build/page.
"""

import base64
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from support import ROOT

from cpvt_pyramid.app.images.reading import load_image
from cpvt_pyramid.app.page.server import Page, Server, read_samples
from cpvt_pyramid.app.predict.exported import ExportedModel

pytestmark = pytest.mark.page

PICTURES = ROOT / 'build/page'
EXAMPLES = ROOT / 'examples'
SCREENS = {'desktop': (1280, 900), 'phone': (390, 844)}
DROP = """
    const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
    const files = new DataTransfer();
    files.items.add(new File([bytes], arguments[1]));
    document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: files, bubbles: true}));
"""


class Browser:
    """A page in Chromium, of the size of a screen."""

    def __init__(self, driver: webdriver.Chrome, url: str, screen: str) -> None:
        self.driver, self.screen = driver, screen
        width, height = SCREENS[screen]
        # A window of Chromium cannot be as narrow as a phone.
        metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=screen == 'phone')
        driver.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
        driver.get(url)
        self.wait(lambda: self.driver.title != 'cpvt_pyramid')

    def find(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, name: str) -> str:
        return self.find(name).text

    def wait(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 60).until(lambda _: condition())

    def wait_for_result(self) -> None:
        self.wait(lambda: 'busy' not in self.find('result').get_attribute('class'))

    def drop(self, path: Path) -> None:
        """Drop a file onto the page, as from a file manager."""
        content = base64.b64encode(path.read_bytes()).decode()
        self.driver.execute_script(DROP, content, path.name)
        self.wait_for_result()

    def set_slider(self, name: str, value: float) -> None:
        script = """
            arguments[0].value = arguments[1];
            arguments[0].dispatchEvent(new Event('input'));
            arguments[0].dispatchEvent(new Event('change'));
        """
        self.driver.execute_script(script, self.find(name), value)
        self.wait_for_result()

    def shoot(self, name: str) -> None:
        """Write a picture of the whole page."""
        shot = self.driver.execute_cdp_cmd(
            'Page.captureScreenshot', {'captureBeyondViewport': True, 'format': 'png'}
        )
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f'{name}-{self.screen}.png'
        path.write_bytes(base64.b64decode(shot['data']))

    def complaints(self) -> list[str]:
        """What the console of the page says, but for the statuses of answers."""
        lines = [entry['message'] for entry in self.driver.get_log('browser')]
        return [line for line in lines if 'status of 400' not in line]

    def overflows(self) -> bool:
        """Whether the page is wider than the screen."""
        script = 'return document.documentElement.scrollWidth > window.innerWidth'
        return self.driver.execute_script(script)


@pytest.fixture(scope='module')
def driver() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which('chromium')
    for option in ('headless=new', 'no-sandbox', 'disable-dev-shm-usage', 'disable-gpu'):
        options.add_argument(f'--{option}')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.Chrome(options, Service(shutil.which('chromedriver')))
    yield driver
    driver.quit()


@pytest.fixture(scope='module', params=['trees'])
def page(request: pytest.FixtureRequest) -> Iterator[Server]:
    model = ExportedModel(EXAMPLES / f'{request.param}.onnx')
    server = Server(Page(model, read_samples(EXAMPLES / request.param)), '127.0.0.1', 0)
    thread = threading.Thread(target=server.run, args=([server.listener],))
    thread.start()
    yield server
    server.should_exit = True
    thread.join()


@pytest.fixture
def photos(page: Server) -> list[Path]:
    """The model's samples."""
    return sorted((EXAMPLES / page.page.model.path.stem).iterdir())


@pytest.fixture(params=SCREENS)
def browser(
    driver: webdriver.Chrome, page: Server, request: pytest.FixtureRequest
) -> Iterator[Browser]:
    browser = Browser(driver, page.url, request.param)
    yield browser
    assert browser.complaints() == []


def test_a_dropped_image_is_shown_with_its_results(browser, page, photos):
    model = page.page.model
    photo = photos[1]
    assert browser.text('name') == model.path.name and not browser.overflows()
    assert browser.text('size-value') == (
        f'{model.resize[0]} pixels' if model.resize else 'unscaled'
    )
    browser.drop(photo)
    expected = page.page.predict(load_image(photo))
    picture = browser.find('picture')
    assert browser.text('status') == f'{photo.name}: {expected["summary"]}'
    assert picture.get_attribute('src') == expected['picture']
    assert picture.get_attribute('alt') == expected['summary']
    assert picture.is_displayed() and browser.find('preview').is_displayed()
    assert browser.find('save').get_attribute('download') == f'{photo.stem}.overlay.jpg'
    browser.shoot(model.about['task'])
    assert not browser.overflows()
    browser.set_slider('size', 320)
    assert browser.text('size-value') == '320 pixels'
    expected = page.page.predict(load_image(photo), 320)
    assert picture.get_attribute('src') == expected['picture']
    score = browser.find('score')
    assert score.is_displayed() == (model.kind == 'detections')
    if score.is_displayed():
        browser.set_slider('score', 1)
        assert browser.text('status') == f'{photo.name}: nothing'


def test_samples_and_files_are_chosen_with_a_click(browser, page, photos):
    samples = browser.all('#samples button')
    assert [sample.get_attribute('title') for sample in samples] == [p.name for p in photos]
    assert all(image.get_property('naturalWidth') for image in browser.all('#samples img'))
    samples[2].click()
    browser.wait_for_result()
    expected = page.page.predict(load_image(photos[2]))
    assert browser.find('picture').get_attribute('src') == expected['picture']
    assert [sample.get_attribute('aria-pressed') for sample in samples].index('true') == 2
    browser.find('file').send_keys(str(photos[0]))
    browser.wait(lambda: browser.text('status').startswith(photos[0].name))
    browser.wait_for_result()
    expected = page.page.predict(load_image(photos[0]))
    assert browser.find('picture').get_attribute('src') == expected['picture']
    assert 'true' not in [sample.get_attribute('aria-pressed') for sample in samples]


def test_mistakes_are_told_in_one_line_and_the_page_goes_on(browser, page, photos, tmp_path):
    name = 'a "b" & <i>c</i> ü 数.jpg'
    path = tmp_path / 'text'
    path.write_text('no image')
    path = path.rename(tmp_path / name.replace('/', '∕'))
    browser.drop(path)
    assert f'{path.name}: not an image in one of the formats' in browser.text('status')
    assert not browser.find('picture').is_displayed()
    browser.shoot(f'{page.page.model.about["task"]}-mistake')
    empty = "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: new DataTransfer()}))"
    browser.driver.execute_script(empty.replace('})', ', bubbles: true})'))
    assert browser.text('status') == 'Drop a file; this was none.'
    browser.drop(photos[0])
    assert browser.find('picture').is_displayed()
