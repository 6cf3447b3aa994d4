"""Pages as a browser shows them: headless Chromium, wide and narrow."""

import json
import re
import shutil
import subprocess

import pytest

from fedapp.report import write_report
from tests.report.test_report import MALICIOUS, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
# Whatever a page loads is refused, and the console says so.
NO_LOADS = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
# Added to a copy of a page: puts its width, the window's and that it has texts in its place.
PROBE = """
<script>
const sizes = [document.documentElement.scrollWidth, innerWidth, document.body.innerText.length];
document.body.textContent = `found ${sizes.join(" ")} end`;
</script>
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "texts"])
@pytest.mark.parametrize("width", [1400, 500])
def test_a_page_fits_its_window_and_loads_nothing(binary, name, width, tmp_path):
    page = binary / "report.html"
    if name == "texts":
        odd = {"parties": [{"name": MALICIOUS, "rows": 3}], "data": "x" * 300}
        page = write_report(make_run(tmp_path, config=f"note = {json.dumps(MALICIOUS)}", **odd))
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{NO_LOADS}")
    copy = tmp_path / "page.html"
    copy.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += ["--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    words += ["--enable-logging=stderr", f"--window-size={width},1000", copy.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"found (\d+) (\d+) (\d+) end", done.stdout)
    assert found, done.stdout[-2000:]
    page_width, window, n_letters = map(int, found.groups())
    assert page_width <= window == width
    assert n_letters > 1000
    assert not re.findall(r"CONSOLE.*", done.stderr)
