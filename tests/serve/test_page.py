"""The page in a real browser: Debian's Chromium, where it is installed."""

import shutil
from collections.abc import Iterator

import pytest
from serve.real_port import served

from mars_ray.config.serve import Limits
from mars_ray.serve.app import build_api

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def url(job, text_engine) -> Iterator[str]:
    # Short answers: several fit the context.
    short = job.model_copy(update={"limits": Limits(new_tokens=15)})
    with served(build_api(short, {"tiny": text_engine})) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url) -> Iterator[playwright.Page]:
    """Fails a test in which the page logs an error or asks another server for something."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: said.type == "error" and problems.append(said.text))
    page.on("request", lambda asked: asked.url.startswith(url) or problems.append(asked.url))
    page.goto(url)
    playwright.expect(page.locator("#service")).to_have_text("tiny")
    yield page
    page.close()
    # The browser itself reports every reply that is no success.
    assert [problem for problem in problems if "Failed to load resource" not in problem] == []


def ask(page: playwright.Page, text: str) -> playwright.Locator:
    """The article of the answer, once it is complete."""
    before = page.locator("article").count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator("article").nth(before + 1)
    playwright.expect(answer.locator(".note")).to_contain_text("per forward", timeout=20_000)
    return answer


def test_a_conversation_with_a_mode_switch(page):
    """Shades say how many tokens came from one forward; `exact` has none."""
    page.get_by_label("Mode").select_option("confidence")
    page.get_by_label("Threshold").fill("0")
    answer = ask(page, "count")
    shades = answer.locator("span").evaluate_all("spans => spans.map(s => s.dataset.tokens)")
    assert "5" in shades
    assert "confidence at 0" in answer.locator(".note").inner_text()
    page.get_by_label("Mode").select_option("exact")
    assert page.get_by_label("Threshold").is_disabled()
    exact = ask(page, "again")
    shades = exact.locator("span").evaluate_all("spans => spans.map(s => s.dataset.tokens)")
    assert set(shades) <= {"1", "0"}
    assert "1.00 per forward" in exact.locator(".note").inner_text()


def test_a_phone_shows_everything(page):
    """Nothing sticks out at 390 pixels, and what is to be touched is large enough."""
    ask(page, "word " * 6)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    for name in ("Send", "Stop"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box
        assert box["height"] >= 40


def test_it_works_without_a_mouse(page):
    """Tab reaches every control, each has a name, and the focus comes back after an answer."""
    page.locator("body").press("Tab")
    reached = []
    for _ in range(3):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    # The threshold has no effect in the service's own mode, and there is nothing to stop.
    assert reached == ["mode", "text", "send"]
    ask(page, "count")
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.get_by_role("main").get_attribute("aria-live") == "polite"


def test_markup_in_a_message_is_text(page):
    """Guards a script in a message, in either direction."""
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("main img").count() == 0
    assert page.locator("main b").count() == 0


def test_an_error_is_shown_and_the_next_message_works(page):
    """The refused message is not part of the conversation any more."""
    page.get_by_label("Message").fill("x " * 500)
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".error")).to_contain_text("context", timeout=10_000)
    ask(page, "count")
