"""The page in a real browser: Debian's Chromium, where it is installed."""

import re
import shutil
import threading
from collections.abc import Iterator

import pytest
from serve.real_port import served
from serve.writing import Writing

from mars_ray.config.serve import Limits, ServedModel
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.status import Decided

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
# An event that comes late on a loaded machine is no fault.
playwright.expect.set_options(timeout=30_000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


MARKDOWN = """Here is *a function*, `add`, and <b>no HTML</b>:

```python
def add(a, b):
    return a + b
```

| a | b |
|---|---|
| 1 | [docs](https://example.org/x) |

1. one
2. **two**
"""
GATE = threading.Semaphore(0)  # of the model "held"
EVIL = """<script>window.broken = 1</script>

<img src=x onerror="window.broken = 1"> <svg/onload="window.broken = 1">
[x](javascript:window.broken=1) ![y](https://example.org/y.png) <a href="javascript:1">z</a>

```"><script>window.broken = 1</script>
<script>window.broken = 1</script>
```
"""


@pytest.fixture(scope="module")
def url(job, text_engine) -> Iterator[str]:
    backends = {
        "tiny": text_engine,
        "second": text_engine,
        "markdown": Writing(text_engine, MARKDOWN),
        "evil": Writing(text_engine, EVIL),
        "held": Writing(text_engine, MARKDOWN, gate=GATE),
        "endless": Writing(text_engine, "and so on " * 9, is_endless=True),
    }
    # Short answers: several fit the context.
    others = tuple(
        ServedModel(checkpoint=job.checkpoint, model_name=name) for name in list(backends)[1:]
    )
    short = job.model_copy(update={"limits": Limits(new_tokens=15), "more_models": others})
    with served(build_api(short, backends)) as url:
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


def begin(page: playwright.Page, text: str, model: str = "tiny") -> playwright.Locator:
    """The article of an answer that is on its way."""
    page.locator("#model").select_option(model)
    before = page.locator("article.them").count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    return page.locator("article.them").nth(before)


def ask(page: playwright.Page, text: str, model: str = "tiny") -> playwright.Locator:
    """The article of the answer, once it is complete."""
    answer = begin(page, text, model)
    playwright.expect(answer.locator(".note").last).to_contain_text("own choice")
    return answer


def choose(page: playwright.Page, mode: str, **fields: str) -> None:
    """The settings of the next question."""
    if not page.locator("#mode").is_visible():
        page.locator("#settings > summary").click()
    page.locator("#mode").select_option(mode)
    for label, value in fields.items():
        page.get_by_label(label).fill(value)


def shades(answer: playwright.Locator) -> set[str]:
    """How many tokens came together in the answer."""
    marked = answer.locator("span[data-tokens]")
    return set(marked.evaluate_all("spans => spans.map(s => s.dataset.tokens)"))


def bodies(page: playwright.Page) -> list[dict]:
    """Those of the requests from now on."""
    sent = []
    page.on("request", lambda request: request.post_data and sent.append(request.post_data_json))
    return sent


def test_a_conversation_with_a_mode_switch(page):
    """Shades say how many tokens came from one forward; `exact` has none."""
    choose(page, "confidence", Threshold="0")
    answer = ask(page, "count")
    assert "5" in shades(answer)
    assert "confidence at 0" in answer.locator(".note").inner_text()
    choose(page, "exact")
    assert page.get_by_label("Threshold").is_disabled()
    exact = ask(page, "again")
    assert shades(exact) <= {"1", "0"}
    assert "1.00 tokens per forward" in exact.locator(".note").inner_text()


def test_an_answer_beside_that_of_exact(page):
    """The same question, the same text and both speeds; the conversation does not hear of it, and
    what was decoded alike has one mean."""
    choose(page, "verified")
    answer = ask(page, "count")
    sent = bodies(page)
    page.get_by_role("button", name="Ask again in exact mode").click()
    playwright.expect(answer.locator(".verdict")).to_contain_text("the same text")
    sides = answer.locator("section")
    assert sides.count() == 2
    texts = [sides.nth(number).locator(".answer").inner_text() for number in range(2)]
    assert texts[0] == texts[1]
    assert sides.nth(1).locator("h3").inner_text().startswith("exact")
    assert "1.00 tokens per forward" in sides.nth(1).locator(".note").inner_text()
    for number in range(2):
        assert "tokens/s" in sides.nth(number).locator(".rate").inner_text()
    assert page.get_by_role("button", name="Ask again").count() == 0
    second = ask(page, "again")
    assert "over 2 answers" in second.locator(".note").inner_text()
    assert [len(body["messages"]) for body in sent] == [1, 3]
    assert sent[0]["mode"] == "exact"
    assert "threshold" not in sent[0]
    choose(page, "exact")
    ask(page, "last")
    assert page.get_by_role("button", name="Ask again").count() == 1


def test_two_answers_play_again_side_by_side(page):
    """Guards a text that is cut where a play was ended before its time."""
    page.get_by_label("exact beside it").check()
    answer = begin(page, "write", "held")
    bodies = answer.locator(".answer")
    for number in range(2):  # each comes in two reads at least, so it has a speed
        playwright.expect(bodies.nth(number)).not_to_be_empty()
        GATE.release()
    verdict = r"^\d+\.\d\d times the tokens per second of exact, the same text"
    playwright.expect(answer.locator(".verdict")).to_have_text(re.compile(verdict))
    before = [bodies.nth(number).inner_html() for number in range(2)]
    # A clock that stands still, so that a slow machine shows no more than the first step.
    page.evaluate("performance.now = () => 0")
    page.evaluate("window.requestAnimationFrame = (step) => { window.step = step; return 1; }")
    page.get_by_role("button", name="Play both at their speed").click()
    page.evaluate("window.step()")
    assert len(bodies.nth(1).inner_text()) < len(MARKDOWN) / 2
    page.get_by_role("button", name="Show all").click()
    assert [bodies.nth(number).inner_html() for number in range(2)] == before


def test_every_question_beside_exact(page):
    """One after the other, with the same seed, so that sampled answers can be compared too."""
    choose(page, "verified", Temperature="1")
    page.get_by_label("exact beside it").check()
    sent = bodies(page)
    answer = begin(page, "count")
    playwright.expect(answer.locator(".verdict")).to_contain_text("the same text")
    first, second = sent
    assert (first["mode"], second["mode"]) == ("verified", "exact")
    assert first["seed"] == second["seed"]
    assert first["temperature"] == second["temperature"] == 1
    choose(page, "exact")
    assert ask(page, "again").locator("section").count() == 1


def test_a_system_prompt_is_said_first_and_a_new_chat_forgets_the_rest(page):
    """Settings stay; what was said is gone from the page and from the requests."""
    choose(page, "exact", **{"System prompt": "be short"})
    sent = bodies(page)
    ask(page, "one")
    ask(page, "two")
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    assert page.locator("#welcome").is_visible()
    ask(page, "three")
    said = [[(m["role"], m["content"]) for m in body["messages"]] for body in sent]
    assert [len(messages) for messages in said] == [2, 4, 2]
    assert said[2] == [("system", "be short"), ("user", "three")]


def test_an_example_is_asked_at_once(page):
    """As it is written, without the line breaks of the page's source."""
    sent = bodies(page)
    page.get_by_role("button", name="List ten tips").click()
    playwright.expect(page.locator(".them .note")).to_contain_text("own choice")
    assert sent[0]["messages"][-1]["content"] == "List ten tips for a good night's sleep."
    assert not page.locator("#welcome").is_visible()


def test_an_answer_is_shown_as_markdown_with_its_forwards(page):
    """Code, tables and lists; in all of them it is seen which tokens came together."""
    answer = ask(page, "write", "markdown").locator(".answer")
    assert answer.locator("em").inner_text() == "a function"
    assert answer.locator("pre").inner_text() == "def add(a, b):\n    return a + b"
    assert answer.locator("figcaption span").inner_text() == "python"
    assert answer.locator("td").count() == 2
    assert answer.locator("ol li").count() == 2
    link = answer.get_by_role("link")
    assert link.get_attribute("href") == "https://example.org/x"
    assert "noopener" in (link.get_attribute("rel") or "")
    assert "<b>no HTML</b>" in answer.inner_text()
    for part in ("pre", "table", "ol", "p"):
        assert len(shades(answer.locator(part).first)) > 1


def test_code_and_answers_can_be_copied(page, browser):
    """The code without its marks, the answer as the model wrote it."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = ask(page, "write", "markdown")
    answer.locator("figcaption").get_by_role("button", name="Copy").click()
    read = "navigator.clipboard.readText()"
    assert page.evaluate(read) == "def add(a, b):\n    return a + b"
    answer.locator(".below").get_by_role("button", name="Copy").click()
    playwright.expect(answer.locator(".below button")).to_have_text("Copied")
    assert page.evaluate(read) == MARKDOWN
    page.locator("article.you").get_by_role("button", name="Copy").click()
    assert page.evaluate(read) == "write"


def test_copying_works_without_a_clipboard(page):
    """As over plain HTTP to another machine; the focus stays."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate(
        "document.addEventListener('copy', () => { window.copied = document.activeElement.value })"
    )
    copy = ask(page, "write", "markdown").locator("figcaption").get_by_role("button")
    copy.click()
    playwright.expect(copy).to_have_text("Copied")
    assert page.evaluate("window.copied") == "def add(a, b):\n    return a + b"
    assert copy.evaluate("button => document.activeElement === button")


def test_nothing_that_a_model_writes_is_html(page):
    """Scripts, handlers and addresses of scripts are text; images are not fetched."""
    answer = ask(page, "write", "evil").locator(".answer")
    assert page.evaluate("window.broken") is None
    for tag in ("script", "img", "svg", "iframe", "style"):
        assert page.locator(f"main {tag}").count() == 0
    addresses = answer.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert addresses == ["https://example.org/y.png"]
    assert "<script>window.broken = 1</script>" in answer.locator("pre").inner_text()


def test_the_browser_makes_no_html_of_a_text(browser, url):
    """Guards a policy that a browser does not understand; it complains, so not in a `page`."""
    page = browser.new_page()
    page.goto(url)
    make = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch { return 'refused'; } }"
    assert page.evaluate(make) == "refused"
    inline = """() => { const script = document.createElement("script");
      script.append("window.broken = 1"); document.body.append(script); return window.broken; }"""
    assert page.evaluate(inline) is None
    page.close()


def test_enter_that_ends_a_composed_word_does_not_send(page):
    """Japanese, Chinese and Korean are written so; some browsers say it by a key code alone."""
    page.get_by_label("Message").fill("你好")
    press = """how => document.getElementById("text").dispatchEvent(new KeyboardEvent("keydown",
      { key: "Enter", bubbles: true, cancelable: true, ...how }))"""
    for how in ({"isComposing": True}, {"keyCode": 229}):
        page.evaluate(press, how)
    page.keyboard.press("Shift+Enter")
    assert page.locator("article").count() == 0
    assert page.get_by_label("Message").input_value() == "你好\n"


@pytest.mark.parametrize("how", ["key", "button"])
def test_a_stopped_answer_keeps_its_text_and_its_figures(page, how):
    """And stays in the conversation, which goes on."""
    answer = begin(page, "go on", "endless")
    playwright.expect(answer.locator(".answer")).to_contain_text("so on and so on")
    note = answer.locator(".note")
    playwright.expect(note).to_contain_text("tokens/s")
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    playwright.expect(note).to_contain_text("stopped")
    assert float(note.locator("b").first.inner_text()) > 1
    assert "tokens/s" in note.inner_text()
    assert "and so on" in answer.locator(".answer").inner_text()
    assert not note.evaluate("note => note.classList.contains('error')")
    sent = bodies(page)
    ask(page, "count")
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant", "user"]


def test_a_new_chat_while_an_answer_comes(page):
    """Guards an old answer that joins the new conversation."""
    answer = begin(page, "go on", "endless")
    playwright.expect(answer.locator(".answer")).to_contain_text("so on")
    page.get_by_role("button", name="New chat").click()
    playwright.expect(page.get_by_role("button", name="Send")).to_be_visible()
    sent = bodies(page)
    ask(page, "count")
    assert len(sent[0]["messages"]) == 1
    assert page.locator("article.them").count() == 1


def test_a_phone_shows_everything(page, text_engine, monkeypatch):
    """Nothing sticks out at 360 pixels, and what is to be touched is large enough. Where a policy
    decides it says why."""

    async def decided() -> Decided:
        why = "3 replicas: 12 ± 3 requests/s in 60 s take 2.4 " * 3
        return Decided(0.0, 3, 0.3, 0.0, why, 0.7, 2.5, 0.0)

    playwright.expect(page.locator("#policy")).to_be_hidden()
    monkeypatch.setattr(text_engine, "decided", decided)
    page.set_viewport_size({"width": 360, "height": 740})
    playwright.expect(page.locator("#policy")).to_contain_text("3 replicas")
    assert not page.locator("#why").is_visible()
    page.locator("#policy summary").click()
    playwright.expect(page.locator("#why")).to_contain_text("12 ± 3 requests/s")
    ask(page, "write", "markdown")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="New chat").click()
    ask(page, "word " * 6)
    page.get_by_role("button", name="Ask again in exact mode").last.click()
    playwright.expect(page.locator(".verdict")).to_be_visible(timeout=10_000)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360
    box = page.get_by_role("button", name="Send").bounding_box()
    assert box
    assert box["height"] >= 40


def test_it_works_without_a_mouse(page):
    """Tab reaches every control, each has a name, and the focus comes back after an answer."""
    page.set_viewport_size({"width": 1100, "height": 900})
    page.reload()
    playwright.expect(page.locator("#model")).to_have_value("tiny")
    page.locator("body").press("Tab")
    reached = []
    for _ in range(14):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    examples = ["BUTTON"] * 4
    # The threshold has no effect in the service's own mode.
    settings = ["SUMMARY", "mode", "temperature", "system", "beside"]
    assert reached == ["model", "new", *examples, *settings, "text", "send", "BODY"]
    ask(page, "count")
    assert page.evaluate("document.activeElement.id") == "text"


def test_every_control_has_a_name(page):
    """Also those of an answer, and those that are closed away; what is shown is one log."""
    choose(page, "verified")
    ask(page, "write", "markdown")
    unnamed = page.evaluate("""() => [
      ...document.querySelectorAll("button, select, input, textarea")]
      .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim()))
      .map((e) => e.outerHTML)""")
    assert unnamed == []
    assert page.get_by_role("log").get_attribute("aria-busy") == "false"
    assert page.locator("figcaption button").get_attribute("title") == "Copy the code"


def test_markup_in_a_message_is_text(page):
    """Guards a script in what the user wrote."""
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("main img").count() == 0
    assert page.locator("main p b").count() == 0


def test_a_refused_message_stays_in_the_box(page):
    """With the error's words, and without a trace in the conversation; the next one works."""
    begin(page, "x " * 500)
    problem = page.get_by_role("alert")
    playwright.expect(problem).to_contain_text("context")
    assert page.get_by_label("Message").input_value() == ("x " * 500).strip()
    assert page.locator("article").count() == 0
    sent = bodies(page)
    ask(page, "count")
    assert len(sent[0]["messages"]) == 1
    assert problem.count() == 0


def test_a_message_that_reaches_nobody_stays_in_the_box(page):
    """Guards a browser's own words, which say nothing."""
    page.route("**/v1/chat/completions", lambda route: route.abort())
    begin(page, "count")
    playwright.expect(page.get_by_role("alert")).to_have_text("the service cannot be reached")
    assert page.get_by_label("Message").input_value() == "count"


def test_the_other_model_answers_when_it_is_chosen(page):
    """Its name stands above its answer."""
    answer = ask(page, "count", "second")
    assert answer.locator("h2").inner_text() == "second"


def test_live_figures_come_by_themselves(page):
    """Replicas and threshold at once, tokens per forward after an answer; guards a page that asks
    on while nobody looks."""
    playwright.expect(page.locator("#replicas")).to_have_text("1")
    playwright.expect(page.locator("#in-force")).to_have_text("1.00")
    ask(page, "count")
    playwright.expect(page.locator("#rate")).not_to_have_text("0")
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
    + "#legend span, span[data-tokens], button:enabled, select, textarea, output, summary, a, td, "
    + "th")]
    .filter((element) => element.offsetParent && element.textContent + element.placeholder)
    .map((element) => [element.outerHTML.slice(0, 60), contrast(element)]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page, scheme):
    """Contrast of at least 4.5 (WCAG AA) on every shade, by day and by night."""
    page.emulate_media(color_scheme=scheme)
    choose(page, "confidence", Threshold="0")
    ask(page, "write", "markdown")
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
