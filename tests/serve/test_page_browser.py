"""The server's page in a real browser, over a model whose tokens are scripts and tags: nothing of it may run."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.serve.app import ROUTES
from tests.browser import AXE, BROWSER, FLAGS, SCREENSHOTS, needs_browser
from tests.serve.conftest import Served, start_server, wait_for, write_tiny

pytestmark = needs_browser

CHAT = "/v1/chat/completions"
CONTEXT = 30_000  # tokens: half a minute of the tiny model
VIEWS = ("race", "live", "pairs", "advise", "docs")
PLACES = {view: "/docs" if view == "docs" else f"/#{view}" for view in VIEWS}
FILLED = {"live": "#tiles dd", "pairs": "#cards dd", "advise": "#advice dd", "docs": ".operation"}
SERVED = "document.getElementById('model').textContent.includes('tokens')"
HOSTILE = (
    "<script>window.ran={}</script>",
    "<img/src=x/onerror=window.ran={}>",
    "</p><svg/onload=window.ran={}>",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with tags and scripts as the text of every token that is no ASCII character. No token ends an
    answer: an answer that ends by itself could be over before a busy browser clicks Stop.
    """
    folder = tmp_path_factory.mktemp("page") / "tiny"
    write_tiny(folder, CONTEXT)
    for name, end in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        config = json.loads((folder / name).read_text())
        del config[end]
        (folder / name).write_text(json.dumps(config))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    for number, string in enumerate([s for s in vocab if len(s) == 1 and not s.isascii() and s not in "ĠĊ"]):
        vocab[HOSTILE[number % len(HOSTILE)].format(number)] = vocab.pop(string)
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def shown(hostile: Path) -> Iterator[Served]:
    server = start_server(hostile)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield launched
        launched.close()


class Tab:
    """A page in the browser. Every test ends with: nothing ran, nothing was complained of, no other host was asked."""

    def __init__(self, browser: Any, server: Served, width: int = 1280, scheme: str = "light") -> None:
        self.server, self.asked, self.problems = server, list[Any](), list[str]()
        self.expected = ""  # what every complaint must contain, and one must be made
        self.context = browser.new_context(
            viewport={"width": width, "height": 900 if width > 600 else 844}, color_scheme=scheme
        )
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.asked.append(request))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._said)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and "status of 401" not in message.text:
            self.problems.append(message.text)

    def open(self, place: str = "/") -> Tab:
        self.page.goto(self.server.url + place)
        return self

    def until(self, condition: str) -> None:
        """Waits for an expression. Playwright's own way is to evaluate text in the page, which the page forbids."""
        wait_for(lambda: bool(self.page.evaluate(condition)))

    def ready(self) -> Tab:
        self.open()
        self.until(SERVED)
        return self

    def race(self, prompt: str = "aaaa", **options: str) -> Tab:
        """A race to its end. Options are the ids of controls."""
        for name, value in ({"tokens": "100", "drafter": "lookup", "depth": "4"} | options).items():
            place = self.page.locator(f"#{name}")
            if place.evaluate("one => one.tagName") == "SELECT":
                place.select_option(value)
            else:
                place.fill(value)
        self.page.fill("#prompt", prompt)
        self.page.click("#go")
        self.page.wait_for_selector("#verdict [data-same]")
        return self

    def bodies(self) -> list[dict[str, Any]]:
        """What the page sent to be answered, warm-ups left out."""
        sent = [json.loads(one.post_data) for one in self.asked if one.url.endswith(CHAT)]
        return [body for body in sent if "warm-up" not in body["cache_salt"]]

    def tokens(self, lane: str = "speculative") -> list[dict[str, str]]:
        look = "s => ({text: s.textContent, origin: s.dataset.origin, classes: s.className, step: s.dataset.step})"
        return self.page.eval_on_selector_all(f"#{lane} .answer:last-child .token", f"all => all.map({look})")

    def close(self) -> None:
        ran = self.page.evaluate("window.ran")
        self.context.close()
        assert ran is None
        assert [said for said in self.problems if not self.expected or self.expected not in said] == []
        assert bool(self.problems) == bool(self.expected)
        assert {one.url.split("/")[2] for one in self.asked} == {self.server.url.split("/")[2]}


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*args: Any) -> Served:
        started.append(start_server(*args))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def tab(browser: Any, shown: Served, serve: Callable[..., Served]) -> Iterator[Callable[..., Tab]]:
    """Opens tabs. They close before the servers of the test stop: a page that outlives its server complains."""
    opened: list[Tab] = []

    def open_tab(server: Served = shown, **options: Any) -> Tab:
        opened.append(Tab(browser, server, **options))
        return opened[-1]

    yield open_tab
    for one in opened:
        one.close()


# ------------------------------------------------------------------------------------------------------- the race


def test_both_lanes_have_the_same_text_and_tokens_the_colours_of_their_origins(
    tab: Callable[..., Tab], shown: Served
) -> None:
    one = tab().ready().race()
    plain, drafted = one.bodies()
    assert plain["seed"] == drafted["seed"] and plain["cache_salt"] != drafted["cache_salt"]
    assert plain["speculative_decoding"] == {"drafter": "none", "steps": True}
    texts = ["".join(token["text"] for token in one.tokens(lane)) for lane in ("plain", "speculative")]
    assert texts[0] == texts[1] and one.page.get_attribute("#verdict [data-same]", "data-same") == "true"
    asked = {**drafted, "stream": False, "cache_salt": "again"}
    asked["speculative_decoding"] = {**drafted["speculative_decoding"], "stats": True}
    [choice] = shown.post(CHAT, asked).json()["choices"]
    tokens = one.tokens()
    assert [token["origin"] for token in tokens] == choice["token_origins"]
    assert choice["message"]["content"] == texts[1]
    for token in tokens:
        assert token["origin"] in token["classes"].split()
    assert {token["origin"] for token in one.tokens("plain")} == {"plain"}
    assert "accepted" in choice["token_origins"]
    colours = one.page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#speculative .answer .token')]"
        ".map(s => [s.dataset.origin, getComputedStyle(s).backgroundColor]))"
    )
    assert len(set(colours.values())) == len(colours) > 1 and "accepted" in colours


def test_what_the_model_writes_is_shown_and_does_not_run(tab: Callable[..., Tab]) -> None:
    one = tab().ready().race(prompt="<script>window.ran='user'</script>")
    said = one.page.inner_text("#speculative .answer")
    assert "<script>window.ran=" in said and "onerror=window.ran=" in said
    assert one.page.inner_text("#speculative .user").startswith("<script>")
    assert one.page.locator(".talk script, .talk img, .talk svg, #tree script, #tree img").count() == 0


def test_pointing_at_a_token_shows_the_tree_of_its_step(tab: Callable[..., Tab]) -> None:
    one = tab().ready().race()
    index = next(i for i, token in enumerate(one.tokens()) if token["origin"] == "accepted")
    step = int(one.tokens()[index]["step"])
    own = [token for token in one.tokens() if token["step"] == str(step)]
    accepted = sum(token["origin"] == "accepted" for token in own)
    one.page.hover("#why")
    one.page.locator("#speculative .answer .token").nth(index).hover()
    said = one.page.inner_text("#why")
    assert f"Step {step + 1} of" in said and "lookup drafted" in said and "Planner: depth 4, asked" in said
    drafted = int(said.split("drafted ")[1].split(",")[0])
    assert one.page.locator("#tree .node").count() == 1 + drafted + len(own) - accepted
    assert one.page.locator("#tree .node.accepted").count() == accepted
    assert one.page.locator("#speculative .token.selected").count() == len(own)


def test_arrow_keys_move_from_step_to_step(tab: Callable[..., Tab]) -> None:
    one = tab().ready().race()
    one.page.focus("#speculative .talk")
    for _ in range(100):
        one.page.keyboard.press("ArrowLeft")
    assert one.page.inner_text("#why").startswith("Step 1 of")
    one.page.keyboard.press("ArrowRight")
    assert one.page.inner_text("#why").startswith("Step 2 of")


def test_controls_change_the_request_and_turns_follow_each_other(tab: Callable[..., Tab]) -> None:
    one = tab().ready()
    one.race(tokens="12", depth="3", temperature="0.5", mode="rejection", seed="7", prediction="abc")
    first = one.bodies()[-1]
    assert first["temperature"] == 0.5 and first["seed"] == 7 and first["max_tokens"] == 12
    assert first["prediction"] == {"type": "content", "content": "abc"}
    asked = {"drafter": "lookup", "depth": 3, "mode": "rejection", "steps": True}
    assert first["speculative_decoding"] == asked
    one.page.evaluate("document.getElementById('verdict').replaceChildren()")
    one.race(
        prompt="and then?", tokens="12", mode="coupled", depth="0", order="together", **{"tree-shape": "1x1"}
    )
    second = one.bodies()[-1]
    assert second["speculative_decoding"] == {
        "drafter": "lookup", "tree": "1x1", "mode": "coupled", "steps": True
    }  # fmt: skip
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    answers = one.page.locator("#speculative .answer").first.evaluate("one => one.textContent")
    assert second["messages"][1]["content"] == answers
    assert "shared steps" in one.page.inner_text("#verdict")
    one.page.click("#fresh")
    assert one.page.locator(".talk > *").count() == 0


def test_tokens_of_the_predicted_text_have_a_colour_of_their_own(tab: Callable[..., Tab]) -> None:
    one = tab().ready().race(tokens="40")
    assert not any("predicted" in token["classes"] for token in one.tokens())
    text = "".join(token["text"] for token in one.tokens())
    one.page.click("#fresh")
    one.race(tokens="40", prediction=text)
    assert any("predicted" in token["classes"] for token in one.tokens())
    assert "from your predicted text" in one.page.inner_text("#legend")


def test_a_race_can_be_played_again(tab: Callable[..., Tab]) -> None:
    one = tab().ready().race()
    before = one.tokens()
    one.page.evaluate("document.getElementById('verdict').replaceChildren()")
    one.page.click("#replay")
    one.page.wait_for_selector("#verdict [data-same]")
    assert one.tokens() == before and len(one.bodies()) == 2


@pytest.mark.alone
def test_stop_aborts_the_request_in_the_engine(tab: Callable[..., Tab], shown: Served) -> None:
    one = tab().ready().race(tokens="8")
    shown.wait_idle()
    gone, made = shown.metric("client_disconnects_total"), shown.metric("generation_tokens_total")
    one.page.fill("#tokens", str(CONTEXT - 1000))
    one.page.fill("#prompt", "go on")
    one.page.click("#go")
    # More than the first race and its warm-up: their last tokens may be counted late.
    wait_for(lambda: shown.metric("generation_tokens_total") > made + 100)
    one.page.click("#stop")
    one.until("document.getElementById('verdict').textContent === 'Stopped.'")
    wait_for(lambda: shown.metric("client_disconnects_total") > gone)
    shown.wait_idle()
    assert shown.metric("generation_tokens_total") < made + CONTEXT - 1000
    assert one.page.is_enabled("#go") and one.page.is_disabled("#stop")
    one.page.click("#go")  # the prompt is still there, and the stopped turn is not part of the conversation
    one.page.click("#stop")
    one.until("document.getElementById('verdict').textContent === 'Stopped.'")
    assert len(one.bodies()[-1]["messages"]) == 3


def test_a_long_answer_is_laid_out_in_pieces(tab: Callable[..., Tab]) -> None:
    """Every frame lays out the last piece again. In one piece, 7,000 tokens took half of the page's time."""
    one = tab().ready().race(tokens="1300")
    pieces = one.page.evaluate(
        "[...document.querySelectorAll('#speculative .piece')].map(p => [...p.children].map(t => t.textContent))"
    )
    assert sum(map(len, pieces)) == 1300 and max(map(len, pieces)) <= 500
    assert all(len(piece) == 500 or piece[-1].endswith("\n") for piece in pieces[:-1])


@pytest.mark.alone
def test_the_end_of_an_answer_is_followed_until_the_reader_scrolls_back(tab: Callable[..., Tab]) -> None:
    one = tab().ready()
    one.page.fill("#tokens", str(CONTEXT - 1000))
    one.page.fill("#prompt", "go on")
    one.page.click("#go")
    talk = "document.querySelector('#plain .talk')"
    at_end = f"{talk}.scrollHeight - {talk}.scrollTop - {talk}.clientHeight < 2"
    one.until(f"{talk}.scrollHeight > 3 * {talk}.clientHeight && {at_end}")
    one.page.evaluate(f"{talk}.scrollTop = 100")
    grown = one.page.evaluate(f"{talk}.scrollHeight") + 200
    one.until(f"{talk}.scrollHeight > {grown}")
    assert one.page.evaluate(f"{talk}.scrollTop") == 100
    one.page.evaluate(f"{talk}.scrollTop = {talk}.scrollHeight")
    one.until(f"{talk}.scrollHeight > {grown + 600} && {at_end}")
    one.page.click("#stop")


def test_a_refused_request_is_said(tab: Callable[..., Tab]) -> None:
    one = tab().ready()
    one.page.fill("#tokens", str(CONTEXT))
    one.page.fill("#prompt", "x")
    one.page.click("#go")
    one.page.wait_for_selector("#alert:not([hidden])")
    assert "maximum context length" in one.page.inner_text("#alert")
    one.expected = "status of 400"


@pytest.mark.alone
def test_a_server_that_dies_is_said(
    tab: Callable[..., Tab], serve: Callable[..., Served], hostile: Path
) -> None:
    server = serve(hostile)
    one = tab(server).ready()
    one.page.fill("#tokens", str(CONTEXT - 1000))
    one.page.fill("#prompt", "go on")
    one.page.keyboard.press("Control+Enter")
    one.until("document.querySelectorAll('#plain .token').length > 20")
    server.process.kill()
    said = "document.getElementById('alert').textContent"
    one.until(f"{said} === 'The connection to the server was lost before the answer ended.'")
    assert one.page.is_enabled("#go") and one.page.is_disabled("#stop")
    one.page.click("#go")
    one.until(f"{said} === 'The server does not answer.'")
    one.expected = "Failed to load resource: net::"


# ------------------------------------------------------------------------------------------------- the other views


def test_charts_move_under_load(tab: Callable[..., Tab], shown: Served) -> None:
    one = tab().open("/#live")
    one.page.wait_for_selector("#charts .line", state="attached")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "ignore_eos": True}
    load = threading.Thread(target=lambda: [shown.post(CHAT, body) for _ in range(2)])
    load.start()
    heights = "new Set(line.getAttribute('d').match(/ [\\d.]+/g)).size"
    one.until(f"[...document.querySelectorAll('#charts .line')].some(line => {heights} > 1)")
    one.until("parseFloat(document.querySelector('#tiles dd').textContent.replace(',', '')) > 0")
    one.until(
        "document.querySelector('#decisions-chart path') && document.querySelector('#decisions tbody tr')"
    )
    load.join()
    assert "tokens since the start" in one.page.inner_text("#live-state")


def test_pairs_are_shown_with_their_cards(tab: Callable[..., Tab], shown: Served) -> None:
    one = tab().open("/#pairs")
    one.page.wait_for_selector("#cards .pair")
    found = shown.get("/v1/pairs").json()["data"]
    names = [pair["name"] for pair in sorted(found, key=lambda pair: not pair["in_use"])]
    assert one.page.locator("#cards h2").all_inner_texts() == names
    assert one.page.locator("#cards .chart").count() >= 2


def test_sliders_change_the_advice(tab: Callable[..., Tab]) -> None:
    one = tab().open("/#advise")
    one.page.wait_for_selector("#advice dd")
    speedup = "document.querySelector('#advice dd').textContent"
    high = one.page.evaluate(speedup)
    one.page.fill("#numbers [name=first]", "0.1")
    one.until(f"{speedup} !== '{high}'")
    assert float(one.page.evaluate(speedup)[:-1]) < float(high[:-1])
    one.page.fill("#numbers [name=tok_s]", "40")
    one.page.fill("#numbers [name=price_per_hour]", "2")
    one.until("document.getElementById('advice').textContent.includes('million')")


def test_docs_show_every_route_with_the_shape_of_its_answer(tab: Callable[..., Tab]) -> None:
    one = tab().open("/docs")
    one.page.wait_for_selector(".operation")
    shown = [text.split("\n") for text in one.page.locator(".operation h2").all_inner_texts()]
    assert {path for _, path in shown} == {route.path_format for route in ROUTES}
    chat = one.page.inner_text("#post-v1-chat-completions")
    assert "Body: ChatRequest" in chat and "Answer: ChatCompletion" in chat and "messages" in chat
    one.page.locator("#post-v1-chat-completions summary", has_text="ChatChoice").click()
    one.until("document.getElementById('post-v1-chat-completions').innerText.includes('finish_reason')")
    upload = one.page.inner_text("#post-v1-files")
    assert "a form" in upload and "-F file=@FILE" in upload and "Answer: FileObject" in upload
    listed = one.page.inner_text("#get-v1-batches")
    assert "limit" in listed and "Answer: BatchList" in listed
    assert one.page.locator("#contents b").all_inner_texts()[0] == "Answers"


# ------------------------------------------------------------------------------------------------- the whole page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_fits_and_is_accessible(tab: Callable[..., Tab], width: int, scheme: str) -> None:
    """Screenshots of every view are left in build/screenshots."""
    one = tab(width=width, scheme=scheme).ready()
    one.page.evaluate("document.getElementById('options').open = true")
    one.race()
    for view in VIEWS:
        if view != "race":
            one.open(PLACES[view])
            one.page.wait_for_selector(FILLED[view])
        one.page.evaluate("scrollTo(0, 0)")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        one.page.screenshot(
            path=SCREENSHOTS / f"{view}-{width}-{scheme}.png", full_page=view != "docs", animations="disabled"
        )
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width, view
        # A chart that is stretched has letters of another size.
        stretched = "c => c.clientWidth && Math.abs(c.clientWidth - c.viewBox.baseVal.width) > 1"
        assert (
            one.page.evaluate(f"[...document.querySelectorAll('svg.chart')].filter({stretched}).length") == 0
        )
        ground = one.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) > 380) == (scheme == "light")


def test_on_paper_every_view_is_light_and_whole(tab: Callable[..., Tab]) -> None:
    one = tab(width=720, scheme="dark").ready()  # about the width of A4
    one.page.evaluate("document.getElementById('options').open = true")
    one.race(tokens="300")
    one.page.emulate_media(media="print")
    for view in VIEWS:
        if view != "race":
            one.open(PLACES[view])
            one.page.wait_for_selector(FILLED[view])
        one.page.screenshot(path=SCREENSHOTS / f"{view}-print.png", full_page=view != "docs")
        ink = one.page.evaluate("getComputedStyle(document.documentElement).color")
        assert sum(map(int, ink[4:-1].split(","))) < 200, view
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 720, view
        boxes = "[...document.querySelectorAll('.talk, .tree, .scroll, pre')]"
        cut = f"{boxes}.filter(o => o.scrollHeight > o.clientHeight + 1).map(o => o.className)"
        assert one.page.evaluate(cut) == [], view
        assert not one.page.is_visible(".bar"), view


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_contrast_and_labels_are_right(tab: Callable[..., Tab], width: int, scheme: str) -> None:
    one = tab(width=width, scheme=scheme).ready()
    one.page.evaluate("document.getElementById('options').open = true")
    one.race()
    for view in VIEWS:
        if view != "race":
            one.open(PLACES[view])
            one.page.wait_for_selector(FILLED[view])
        # Routes are all of one kind, and axe takes seconds for the longest: two are checked.
        one.page.evaluate(
            "document.querySelectorAll('.operation:not(#get-v1-live, #post-tokenize)').forEach(o => o.remove())"
        )
        one.page.evaluate(AXE.read_text())
        found = one.page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].html]))")
        assert found == [], view


def test_the_theme_can_be_chosen_and_stays(tab: Callable[..., Tab]) -> None:
    one = tab().ready()
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = one.page.evaluate(ground)
    one.page.click("#theme")
    dark = one.page.evaluate(ground)
    one.ready()
    assert one.page.evaluate(ground) == dark != light


def test_the_page_is_light_and_paints_at_once(tab: Callable[..., Tab]) -> None:
    paints = []
    for _ in range(3):  # the fastest counts: other programs may slow one down
        one = tab().ready()
        paint = one.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        paints.append(paint)
    assert min(paints) < 1000
    files = [a for a in one.asked if a.resource_type in ("document", "script", "stylesheet", "image")]
    assert len(files) >= 10
    assert sum(len(httpx.get(a.url, headers={"accept": "text/html"}).content) for a in files) < 500_000


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_memory(
    tab: Callable[..., Tab], serve: Callable[..., Served], hostile: Path
) -> None:
    server = serve(hostile, "--api-key", "the-right-key-0123456789")
    one = tab(server).open()
    one.page.wait_for_selector("#key-dialog[open]")
    one.page.fill("#key", "a-wrong-key-0123456789")
    one.page.keyboard.press("Enter")
    one.until("document.getElementById('key-wrong').textContent.includes('refused')")
    assert one.page.is_visible("#key-dialog") and one.page.input_value("#key") == ""
    one.page.fill("#key", "the-right-key-0123456789")
    one.page.keyboard.press("Enter")
    one.until(SERVED)
    one.race()
    kept = one.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "right-key" not in kept and "right-key" not in one.page.content()
    assert all("right-key" not in asked.url for asked in one.asked)
    one.open()
    one.page.wait_for_selector("#key-dialog[open]")  # a new page knows nothing of it


def test_a_model_may_be_chosen_and_a_key_may_be_limited_to_one(
    tab: Callable[..., Tab], serve: Callable[..., Served], hostile: Path, tmp_path: Path
) -> None:
    """Each model loads when it is chosen first. A conversation is never carried from one model to the other."""
    keys = {name: (name + "-key-0123456789abcdef") for name in ("free", "limited")}
    file = tmp_path / "keys.toml"
    tables = (
        f'[[key]]\nname = "{name}"\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n'
        for name, key in keys.items()
    )
    file.write_text("".join(tables) + 'models = ["other"]\n')
    config = tmp_path / "models.toml"
    config.write_text(f"[models.first]\nmodel = {json.dumps(str(hostile))}\n"
                      f"[models.other]\nmodel = {json.dumps(str(hostile))}\nload = 'first use'\n")  # fmt: skip
    server = serve("first", "other", "--config", str(config), "--key-file", str(file))
    one = tab(server).open()
    one.page.fill("#key", keys["free"])
    one.page.keyboard.press("Enter")
    one.until(SERVED)
    one.race()
    assert one.page.eval_on_selector_all("#model option", "all => all.map(o => o.value)") == [
        "first",
        "other",
    ]
    one.page.select_option("#model select", "other")
    one.until("!document.querySelector('.answer')")
    one.race()
    assert [body["model"] for body in one.bodies()[-2:]] == ["other", "other"]
    assert [len(body["messages"]) for body in one.bodies()[-2:]] == [1, 1]
    one.page.click("nav a[href='#live']")
    one.until("document.getElementById('live-state').textContent.startsWith('other takes requests')")
    two = tab(server).open()
    two.page.fill("#key", keys["limited"])
    two.page.keyboard.press("Enter")
    two.until(SERVED)
    assert two.page.inner_text("#model").startswith("other") and not two.page.query_selector("#model select")
    two.race()


def test_a_proxy_that_hides_the_live_figures_does_not_stop_the_page(tab: Callable[..., Tab]) -> None:
    one = tab()
    one.page.route("**/v1/live*", lambda route: route.fulfill(status=404, body="{}"))
    one.ready().race()
    assert one.page.get_attribute("#verdict [data-same]", "data-same") == "true"
    one.expected = "status of 404"


@pytest.mark.parametrize("others", [0.0, 3.0, None])
def test_the_verdict_says_when_other_programs_disturbed(
    tab: Callable[..., Tab], others: float | None
) -> None:
    begun: list[float] = []

    def answer(route: Any) -> None:
        figures = route.fetch().json()
        begun.append(figures["time"])
        spent = None if others is None else others * (figures["time"] - begun[0])
        route.fulfill(json={**figures, "other_programs_seconds": spent})

    one = tab()
    one.page.route("**/v1/live*", answer)
    said = one.ready().race().page.inner_text("#verdict")
    assert ("Other programs used 3.0 cores" in said) == bool(others)
    assert one.page.locator("#verdict .unsure").count() == bool(others)
    assert one.page.locator("#verdict .won, #verdict .lost").count() == (not others)


def test_a_view_begins_at_its_top(tab: Callable[..., Tab]) -> None:
    one = tab().open("/#race")
    one.until(SERVED)
    for view in ("live", "race"):
        one.page.click(f"nav a[href='#{view}']")
        one.page.wait_for_selector(f"#{view}-title", state="visible")
        bar, title = (one.page.locator(place).bounding_box() for place in (".bar", f"#{view}-title"))
        assert title["y"] >= bar["y"] + bar["height"] and one.page.evaluate("scrollY") == 0


def test_everything_can_be_reached_and_used_by_keyboard(tab: Callable[..., Tab]) -> None:
    one = tab().ready()
    press, focused = (
        one.page.keyboard.press,
        "document.activeElement.id || document.activeElement.textContent",
    )
    press("Tab")
    assert one.page.evaluate(focused) == "Skip to content"
    assert one.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("Enter")
    assert one.page.evaluate(focused) == "view"
    order = []
    while "go" not in order:
        press("Tab")
        order.append(one.page.evaluate(focused))
    assert [name for name in order if len(name) < 9] == ["Edit", "Code", "List", "Chat", "prompt", "go"]
    one.page.fill("#tokens", "8")
    one.page.focus("button.chip >> nth=2")
    press("Enter")
    assert one.page.evaluate(focused) == "prompt" and "planets" in one.page.input_value("#prompt")
    press("Control+Enter")
    one.page.wait_for_selector("#verdict [data-same]")
