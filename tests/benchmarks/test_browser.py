"""Reports and the site in a real browser: a phone and a desk, light and dark."""

from __future__ import annotations

import shutil

import pytest

from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.section import Answer, Sample, Section
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.sharing.site import write_site

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATH = next((path for name in BROWSERS if (path := shutil.which(name))), None)
WIDTHS, SCHEMES = (390, 1440), ("light", "dark")
pytestmark = pytest.mark.skipif(PATH is None, reason="no browser")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    write_site(folder, None)
    return folder


@pytest.fixture
def visit(browser):
    """Opens a page; what its console says is an error, and so is a request."""
    complaints, pages = [], []

    def open_page(path, width, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(
            ("file:", "data:")) else None)  # fmt: skip
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen_and_can_be_read(site, visit, width, scheme):
    for name in ("index", "digits-class", "map-digits-class-sweep", "method-gd_sine"):
        page = visit(site / f"{name}.html", width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        sizes = page.evaluate(
            "[...document.querySelectorAll('p, td, th, svg text')]"
            ".map((e) => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 9, name
        assert contrast(page, "document.body") > 7 and contrast(page, "document.links[0]") > 4.5
        first = page.locator("td:first-child").first.bounding_box()
        assert 60 < first["width"] < max(width / 2, 300), name


def test_no_page_is_wider_than_a_phone_or_endless(site, visit):
    page = visit(site / "index.html", WIDTHS[0])
    heads = []
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri())
        wide, high = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        assert wide <= WIDTHS[0] and high < 10_000, f"{path.name}: {wide} x {high}"
        heads.append(page.locator("h1").inner_text())
    assert len(heads) > 80 and all(heads)


OVERLAPS = """() => {
  const texts = [...document.querySelectorAll('text')].filter((t) => t.textContent);
  const inner = (t) => {  // without the slack above and below the letters
    const box = t.getBoundingClientRect(), slack = box.height / 5;
    return [box.left + 1, box.top + slack, box.right - 1, box.bottom - slack];
  };
  const whole = document.documentElement.getBoundingClientRect();
  const out = texts.map((t) => [t, inner(t)]).filter(([t, b]) =>
    b[0] < whole.left || b[1] < whole.top || b[2] > whole.right || b[3] > whole.bottom);
  const level = texts.filter((t) => !t.getAttribute('transform')).map((t) => [t, inner(t)]);
  const pairs = [];
  level.forEach(([t, a], i) => level.slice(i + 1).forEach(([u, b]) => {
    if (a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3])
      pairs.push(t.textContent + ' on ' + u.textContent);
  }));
  return [...pairs, ...out.map(([t]) => t.textContent + ' goes beyond the picture')];
}"""


def test_words_of_pictures_lie_inside_them_and_on_no_others(visit):
    page = visit(RESULTS / "digits-class" / "leaderboard.svg", 1440)
    wrong, paths = {}, sorted(RESULTS.rglob("*.svg"))
    for path in paths:
        page.goto(path.as_uri())
        if found := page.evaluate(OVERLAPS):
            wrong[str(path.relative_to(RESULTS))] = found
    assert len(paths) > 80 and wrong == {}, "\n".join(f"{k}: {v}" for k, v in wrong.items())


def test_what_is_folded_opens_for_a_link_into_it(site, visit):
    page = visit(site / "digits-class.html", 390)
    assert not page.locator("#settings table").is_visible()
    page.locator("#settings summary").first.click()
    assert page.locator("#settings table").first.is_visible()
    page.goto((site / "digits-class.html").as_uri() + "#row-gd")
    assert page.locator("#row-gd pre").is_visible(), "both folds around it are open"


def test_a_long_table_keeps_its_heads_in_sight(site, visit):
    page = visit(site / "rows.html", 390)
    head = page.locator("th").first
    before = head.bounding_box()["y"]
    page.locator("tbody tr").nth(300).scroll_into_view_if_needed()
    top = page.locator(".tall").first.bounding_box()["y"]
    assert abs(head.bounding_box()["y"] - top) < 2 and before > 0


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory):
    """A hundred samples, each known best by another model than the one before."""
    marks = {"retrain": "", "gd": "same", "npo": "other"}
    samples = [
        Sample(n, "Who?", "Kim", {
            who: Answer("Kim Berlin", 0.5, (n * 37 + place) % 100 / 100, mark)
            for place, (who, mark) in enumerate(marks.items())
        })
        for n in range(100)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("samples") / "samples.html"
    path.write_text(html.write([Section("Samples", depth=1), Section(content=samples)]))
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_samples_can_be_sorted_and_models_chosen(sample_page, visit, width, scheme):
    page = visit(sample_page, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert contrast(page, "document.querySelector('article b')") > 4.5
    assert page.locator("article h3").first.text_content() == "#0"
    line, answer = page.locator("article li").first, page.locator("article li span").first
    assert answer.bounding_box()["width"] > 0.9 * line.bounding_box()["width"]
    page.select_option("select", "npo")
    known = page.evaluate("[...document.querySelectorAll('li[data-who=npo]')].map((e) => Number(e.dataset.known))")  # fmt: skip # noqa: E501
    assert len(known) == 100 and known == sorted(known, reverse=True)
    page.fill("input[type=search]", "gd, retr")
    assert page.locator("article li:visible").count() == 200
    page.select_option("select", "")
    assert page.locator("article h3").first.text_content() == "#0"


def contrast(page, element):
    """WCAG's contrast of an element's text on the page's ground."""
    texts = page.evaluate(f"[getComputedStyle({element}).color, "
                          "getComputedStyle(document.body).backgroundColor]")  # fmt: skip
    light = []
    for text in texts:
        parts = [int(part) / 255 for part in text.strip("rgb()").split(",")]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_a_table_is_sorted_and_filtered(site, visit):
    page = visit(site / "rows.html", 1440)
    table = page.locator("table").first
    values = "rows => rows.filter((r) => !r.hidden).map((r) => r.cells[4].textContent)"
    rows = table.locator("tbody tr")
    table.locator("th").nth(4).click()
    up = [float(text) for text in rows.evaluate_all(values)]
    assert up == sorted(up) and len(up) > 100
    table.locator("th").nth(4).press("Enter")
    down = [float(text) for text in rows.evaluate_all(values)]
    assert down == sorted(up, reverse=True)
    page.locator("input[type=search]").first.fill("digits-class gd_sine")
    shown = rows.evaluate_all("rows => rows.filter((r) => !r.hidden).map((r) => r.textContent)")
    texts = rows.evaluate_all("rows => rows.map((r) => r.textContent)")
    assert shown == [text for text in texts if "digits-class" in text and "gd_sine" in text]
    assert 0 < len(shown) < len(texts) / 10


def test_the_front_page_leads_to_a_row_of_a_table(site, visit):
    page = visit(site / "index.html", 1440)
    assert page.evaluate("document.documentElement.scrollHeight") < 10_000
    cells = page.locator("svg a:has(rect.c)")
    assert cells.count() > 200
    page.locator('svg a[href="digits-class.html#row-gd_sine"]').click()
    assert page.locator("#row-gd_sine").get_attribute("open") is not None
    page.goto((site / "index.html").as_uri())
    page.locator("svg a", has_text="gd_sine").first.click()
    assert page.locator("h1").inner_text() == "gd_sine"
    page.goto((site / "index.html").as_uri())
    assert page.locator(".grid section h3").count() == 3
    page.locator(".grid section a", has_text="Texts: TOFU").click()
    assert page.evaluate("document.getElementById('texts-tofu').getBoundingClientRect().top") < 900
    mark = page.locator("figure svg a:has(circle)").last  # nothing lies on it
    place = mark.get_attribute("href")
    mark.click()
    page.wait_for_url(f"**/{place}")  # whole: its address is there before its rows are
    assert page.locator(f"#{place.split('#')[1]}").is_visible()


def test_a_picture_answers_and_a_row_unfolds(site, visit):
    page = visit(site / "index.html", 390)
    page.locator("a", has_text="digits-class").first.click()
    page.goto((site / "digits-class.html").as_uri())
    page.locator("svg circle").nth(3).hover()
    assert "seed" in page.locator("#tip").inner_text()
    page.locator("table").first.locator("a", has_text="random_label").first.click()
    unfolded = page.locator("#row-random_label")
    assert unfolded.get_attribute("open") is not None
    assert "unlearn run digits-class --only random_label" in unfolded.inner_text()
    assert unfolded.locator("a").get_attribute("href").startswith("https://arxiv.org/abs/")


@pytest.mark.parametrize("name", ["digits-class", "cifar10-small-all"])
def test_a_picture_is_readable_in_a_document(site, visit, name):
    """As wide as a README shows it, no text is below 9 pixels and none leaves the frame."""
    page = visit(site / f"{name}.html", 1440)
    drawn = page.evaluate("""() => {
      const svg = document.querySelector('svg'), frame = svg.getBoundingClientRect();
      const scale = Math.min(1, 830 / frame.width), texts = [...svg.querySelectorAll('text')];
      const boxes = texts.map((text) => text.getBoundingClientRect());
      return {
        size: Math.min(...texts.map((t) => parseFloat(getComputedStyle(t).fontSize) * scale)),
        out: boxes.filter((b) => b.left < frame.left - 1 || b.right > frame.right + 1).length,
      };
    }""")
    assert drawn["size"] >= 9 and drawn["out"] == 0
