"""Pages as a browser shows them: headless Chromium, wide and narrow."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from fedapp.report import write_report
from tests.report.test_page import run
from tests.report.test_report import MALICIOUS, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
LEAST_CONTRAST, LEAST_LARGE = 4.5, 3.0  # WCAG 2.2, 1.4.3; large: 24 px, or 18.66 px and bold
# Whatever a page loads is refused, and the console says so.
NO_LOADS = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
# Appended to a copy of a page; writes what it measures into the page, which the browser prints.
PROBE = """
<script>
const pixel = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function rgba(color) {
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = color;
  pixel.fillRect(0, 0, 1, 1);
  return [...pixel.getImageData(0, 0, 1, 1).data].map((v, i) => i == 3 ? v / 255 : v);
}
const over = (top, below) => below.map((v, i) => top[3] * top[i] + (1 - top[3]) * v);
function background(element) {
  if (!element) return [255, 255, 255];
  return over(rgba(getComputedStyle(element).backgroundColor), background(element.parentElement));
}
function luminance(rgb) {
  const [r, g, b] = rgb.map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const faint = [];
let texts = 0;
for (const element of document.querySelectorAll("body *:not(script)")) {
  const own = [...element.childNodes].filter(n => n.nodeType == 3 && n.data.trim());
  if (!own.length || element.closest("script, title") || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), svg = element.closest("svg");
  const below = background(svg ? svg.parentElement : element);
  const above = over(rgba(svg ? style.fill : style.color), below);
  const [low, high] = [luminance(above), luminance(below)].sort((a, b) => a - b);
  const size = parseFloat(style.fontSize), bold = style.fontWeight >= 600;
  const least = size >= 24 || (bold && size >= 18.66) ? LARGE : NORMAL;
  texts += 1;
  if ((high + 0.05) / (low + 0.05) < least) faint.push([element.tagName, own[0].data.trim()]);
}
const root = document.documentElement;
const found = {
  texts, faint, width: root.scrollWidth, window: innerWidth,
};
document.body.innerHTML = "";
document.body.append(Object.assign(document.createElement("pre"),
  {id: "found", textContent: JSON.stringify(found)}));
</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of runs, and of texts from outside."""
    path = tmp_path_factory.mktemp("browser")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(path / "home"))
        binary = run(path / "binary", "pax", "--baselines")
        classes = run(path / "classes", "pax", data="wine", objective="multi:softprob")
        odd = {"parties": [{"name": MALICIOUS, "rows": 3}], "data": "x" * 300}
        texts = make_run(path / "texts", config=f"note = {json.dumps(MALICIOUS)}", **odd)
        yield {
            "run": binary / "report.html",
            "classes": classes / "report.html",
            "texts": write_report(texts),
        }


@pytest.fixture
def look(tmp_path):
    """Open a copy of a page with the probe; returns what it measured, and console messages."""

    def open_page(page, width):
        text = page.read_text(encoding="utf-8")
        probe = PROBE.replace("NORMAL", str(LEAST_CONTRAST)).replace("LARGE", str(LEAST_LARGE))
        copy = tmp_path / "page.html"
        text = text.replace("<head>", f"<head>{NO_LOADS}").replace("</body>", f"{probe}</body>")
        copy.write_text(text, encoding="utf-8")
        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        words += ["--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
        words += ["--enable-logging=stderr", f"--window-size={width},1000", copy.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        found = re.search('<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
        assert found, done.stdout[-2000:]
        console = re.findall(r"CONSOLE.*", done.stderr)
        return {**json.loads(unescape(found[1])), "console": console}

    return open_page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "classes", "texts"])
@pytest.mark.parametrize("width", [1400, 500])
def test_a_page_fits_reads_and_loads_nothing(pages, look, name, width):
    found = look(pages[name], width)
    assert found["texts"] > 50
    assert found["faint"] == []
    assert found["window"] == width
    assert found["width"] <= width
    assert found["console"] == []
