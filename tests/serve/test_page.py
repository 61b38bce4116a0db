"""The page in a real browser: Debian's Chromium, where it is installed."""

import shutil
from collections.abc import Iterator

import pytest
from serve.real_port import served

from mars_ray.config.serve import Limits, ServedModel
from mars_ray.serve.ingress.routes import build_api
from mars_ray.serve.status import Decided

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def url(job, text_engine) -> Iterator[str]:
    # Short answers: several fit the context.
    short = job.model_copy(
        update={
            "limits": Limits(new_tokens=15),
            "more_models": (ServedModel(checkpoint=job.checkpoint, model_name="second"),),
        }
    )
    with served(build_api(short, {"tiny": text_engine, "second": text_engine})) as url:
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
    playwright.expect(page.locator("#model")).to_have_value("tiny")
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
    playwright.expect(answer.locator(".note")).to_contain_text("own choice", timeout=20_000)
    return answer


def test_a_conversation_with_a_mode_switch(page):
    """Shades say how many tokens came from one forward; `exact` has none."""
    page.locator("#mode").select_option("confidence")
    page.get_by_label("Threshold").fill("0")
    answer = ask(page, "count")
    shades = answer.locator("span").evaluate_all("spans => spans.map(s => s.dataset.tokens)")
    assert "5" in shades
    assert "confidence at 0" in answer.locator(".note").inner_text()
    page.locator("#mode").select_option("exact")
    assert page.get_by_label("Threshold").is_disabled()
    exact = ask(page, "again")
    shades = exact.locator("span").evaluate_all("spans => spans.map(s => s.dataset.tokens)")
    assert set(shades) <= {"1", "0"}
    assert "1.00 tokens per forward" in exact.locator(".note").inner_text()


def test_an_answer_beside_that_of_exact(page):
    """The same question, the same text and both speeds; the conversation does not hear of it, and
    what was decoded alike has one mean."""
    page.locator("#mode").select_option("verified")
    answer = ask(page, "count")
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    page.get_by_role("button", name="Ask again in exact mode").click()
    verdict = answer.locator(".verdict")
    playwright.expect(verdict).to_contain_text("tokens per second of exact, the same text")
    assert float(verdict.locator("b").inner_text()) > 0
    sides = answer.locator(".sides section")
    assert sides.count() == 2
    assert sides.nth(0).locator("p").inner_text() == sides.nth(1).locator("p").inner_text()
    assert sides.nth(1).locator("h3").inner_text().startswith("exact")
    assert "1.00 tokens per forward" in sides.nth(1).locator(".note").inner_text()
    for number in range(2):
        assert "tokens/s" in sides.nth(number).locator("h3 span").inner_text()
    assert page.get_by_role("button", name="Ask again").count() == 0
    second = ask(page, "again")
    assert "over 2 answers" in second.locator(".note").inner_text()
    bodies = [body for body in asked if body]
    assert [len(body["messages"]) for body in bodies] == [1, 3]
    assert bodies[0]["mode"] == "exact"
    page.locator("#mode").select_option("exact")
    ask(page, "last")
    assert page.get_by_role("button", name="Ask again").count() == 1


def test_a_phone_shows_everything(page, text_engine, monkeypatch):
    """Nothing sticks out at 360 pixels, and what is to be touched is large enough. Where a policy
    decides it says why."""

    async def decided() -> Decided:
        why = "3 replicas: 12 ± 3 requests/s in 60 s take 2.4 " * 3
        return Decided(0.0, 3, 0.3, 0.0, why, 0.7, 2.5, 0.0)

    playwright.expect(page.locator("#policy")).to_be_hidden()
    monkeypatch.setattr(text_engine, "decided", decided)
    page.set_viewport_size({"width": 360, "height": 740})
    playwright.expect(page.locator("#policy")).to_contain_text("3 replicas", timeout=10_000)
    ask(page, "word " * 6)
    page.get_by_role("button", name="Ask again in exact mode").click()
    playwright.expect(page.locator(".verdict")).to_be_visible(timeout=10_000)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360
    for name in ("Send", "Stop"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box
        assert box["height"] >= 40


def test_it_works_without_a_mouse(page):
    """Tab reaches every control, each has a name, and the focus comes back after an answer."""
    page.locator("body").press("Tab")
    reached = []
    for _ in range(4):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    # The threshold has no effect in the service's own mode, and there is nothing to stop.
    assert reached == ["model", "mode", "text", "send"]
    ask(page, "count")
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.get_by_role("main").get_attribute("aria-live") == "polite"


def test_markup_in_a_message_is_text(page):
    """Guards a script in a message, in either direction."""
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("main img").count() == 0
    assert page.locator("main p b").count() == 0


def test_an_error_is_shown_and_the_next_message_works(page):
    """The refused message is not part of the conversation any more."""
    page.get_by_label("Message").fill("x " * 500)
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".error")).to_contain_text("context", timeout=10_000)
    ask(page, "count")


def test_the_other_model_answers_when_it_is_chosen(page):
    """Its name stands above its answer."""
    page.locator("#model").select_option("second")
    answer = ask(page, "count")
    assert answer.locator("h2").inner_text() == "second"


def test_live_figures_come_by_themselves(page):
    """Replicas and threshold at once, tokens per forward after an answer; guards a page that asks
    on while nobody looks."""
    playwright.expect(page.locator("#replicas")).to_have_text("1")
    playwright.expect(page.locator("#in-force")).to_have_text("1.00")
    ask(page, "count")
    playwright.expect(page.locator("#rate")).not_to_have_text("0", timeout=5_000)
    playwright.expect(page.locator("#per-forward")).to_contain_text(".")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    hidden = "Object.defineProperty(document, 'visibilityState', { value: 'hidden' })"
    page.evaluate(hidden)
    page.wait_for_timeout(2500)
    assert asked == []


# Relative luminance and contrast as in WCAG 2; computed colours are blended over what is below.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (layers) => {
    layers.forEach((color) => { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); });
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((part) => part / 255)
    .map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [.2126, .7152, .0722][index], 0);
  const contrast = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement)
      layers.unshift(getComputedStyle(node).backgroundColor);
    const [low, high] = [light(over(layers)), light(over([...layers,
      getComputedStyle(element).color]))].sort((a, b) => a - b);
    return (high + .05) / (low + .05);
  };
  return [...document.querySelectorAll("h1, h2, h3, dt, dd, label, p, .note, #legend, "
    + "#legend span, span[data-tokens], button:enabled, select, textarea, output")]
    .filter((element) => element.offsetParent && element.textContent + element.placeholder)
    .map((element) => [element.outerHTML.slice(0, 60), contrast(element)]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page, scheme):
    """Contrast of at least 4.5 (WCAG AA) on every shade, by day and by night."""
    page.emulate_media(color_scheme=scheme)
    page.locator("#mode").select_option("confidence")
    page.get_by_label("Threshold").fill("0")
    ask(page, "count")
    measured = page.evaluate(CONTRAST)
    assert len(measured) > 20
    assert [(what, ratio) for what, ratio in measured if ratio < 4.5] == []


def test_a_service_with_keys_asks_for_one(browser, job, text_engine, tmp_path):
    """And shows everything once it has it."""
    keys = tmp_path / "keys.toml"
    keys.write_text("[[keys]]\nname = 'a'\nkey = 'a-secret-of-24-characters'")
    locked = job.model_copy(update={"keys_file": str(keys)})
    with served(build_api(locked, {"tiny": text_engine})) as url:
        page = browser.new_page()
        page.goto(url)
        playwright.expect(page.locator("#service")).to_have_text("needs a valid API key")
        page.get_by_label("API key").fill("a-secret-of-24-characters")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#replicas")).to_have_text("1")
        ask(page, "count")
        page.close()
