"""A page of `attnfold explain --html` in a real browser: it lays out, and every picture shows its shapes.

usage: page_in_browser.py ATTNFOLD

Looks for a browser of the Chromium family; without one the test says SKIPPED.  A copy of the page gets a
script that measures what the browser made of it.
"""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MEASURE = """<script>//<![CDATA[
const out = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  let shapes = 0, outside = 0;
  for (const s of svg.querySelectorAll("rect, circle, path, text")) {
    const b = s.getBoundingClientRect();
    ++shapes;
    if (b.left < box.left - 2 || b.right > box.right + 2 || b.top < box.top - 2 || b.bottom > box.bottom + 2) ++outside;
  }
  out.push({name: svg.getAttribute("aria-label"), width: box.width, height: box.height, shapes, outside});
}
document.body.setAttribute("data-measured", JSON.stringify(out));
//]]></script></body>"""


def main():
    names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
    browser = next((b for b in map(shutil.which, names) if b), None)
    if browser is None:
        print("SKIPPED: none of", ", ".join(names), "is installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        subprocess.run([sys.argv[1], "explain", "--lengths", "8192,512x15", "--html", file],
                       check=True, capture_output=True)
        file.write_text(file.read_text().replace("</body>", MEASURE))
        dom = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                              f"--user-data-dir={folder}/profile", "--window-size=1400,1000", "--dump-dom", file.as_uri()],
                             capture_output=True, text=True, timeout=300).stdout
    found = re.search(r'data-measured="([^"]*)"', dom)
    if not found:
        print("FAILED: the page did not run to its end:", dom[:400])
        sys.exit(1)
    pictures = json.loads(found.group(1).replace("&quot;", '"'))
    bad = [p for p in pictures if p["width"] < 300 or p["height"] < 80 or p["shapes"] < 6 or p["outside"]]
    for picture in bad:
        print("FAILED:", picture)
    if len(pictures) < 10:
        print("FAILED: expected 10 pictures or more, got", len(pictures))
    print(f"{browser}: {len(pictures)} pictures, {len(bad)} wrong")
    sys.exit(1 if bad or len(pictures) < 10 else 0)


main()
