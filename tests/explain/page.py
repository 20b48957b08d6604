"""Pages of `attnfold explain --html`: well-formed, loading nothing, every shape inside its picture.

usage: page.py ATTNFOLD
"""
import math
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

QUESTIONS = [["--batch", "1", "--context", "2560"],
             ["--lengths", "65536,512x15,256/2000"],
             ["--batch", "256", "--context", "131072"],
             ["--batch", "1", "--context", "1", "--sms", "1"],
             ["--model", "deepseek-v3", "--tp", "8", "--batch", "16", "--context", "8192"],
             ["--model", "gemma-3-27b", "--local", "--query", "2048", "--context", "8192"],
             ["--gpu", "epyc-9654", "--heads", "9/3", "--head-dim", "72"]]
SHAPES = {"rect": ("x", "y", "width", "height"), "circle": ("cx", "cy", "r"), "text": ("x", "y")}


def numbers(element):
    """Every number of the element's geometry; all must be finite."""
    tag = element.tag.split("}")[1]
    values = [float(element.get(a)) for a in SHAPES.get(tag, ()) if element.get(a) is not None]
    values += [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", element.get("d") or "")]
    return tag, values


def check(page, failures):
    root = ET.fromstring(page)
    text = page.lower()
    if re.search(r"(src|href)\s*=|url\(|@import|<script", text):
        failures.append("it loads something")
    if re.search(r"\b(nan|inf)\b", text):
        failures.append("it holds nan or inf")
    pictures = [e for e in root.iter() if e.tag.endswith("}svg")]
    lines = [e for e in root.iter() if e.tag.endswith("}tr")][1:]
    with_blocks = sum(1 for line in lines if line[2].text != "-")
    if len(pictures) != 2 + with_blocks:
        failures.append(f"{len(pictures)} pictures for {with_blocks} lines with blocks")
    for picture in pictures:
        width, height = [float(x) for x in picture.get("viewBox").split()[2:]]
        shapes = 0
        for element in picture.iter():
            tag, values = numbers(element)
            shapes += tag in ("rect", "circle", "path")
            if not all(map(math.isfinite, values)):
                failures.append(f"{tag} is not finite: {values}")
            if tag == "rect":
                x, y, w, h = values
                if min(x, y, w, h) < 0 or x + w > width + 0.1 or y + h > height + 0.1:
                    failures.append(f"rect {values} leaves {width} x {height}")
            elif tag in ("circle", "text") and len(values) >= 2:
                if not (0 <= values[0] <= width and 0 <= values[1] <= height):
                    failures.append(f"{tag} {values} leaves {width} x {height}")
        if shapes < 4:
            failures.append(f"a picture of {shapes} shapes")


def main():
    command = sys.argv[1]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for question in QUESTIONS:
            file = Path(folder) / "page.html"
            run = subprocess.run([command, "explain", *question, "--html", file], capture_output=True, text=True)
            failures = []
            if run.returncode != 0:
                failures.append(f"exit code {run.returncode}: {run.stderr.strip()}")
            else:
                check(file.read_text(), failures)
            for failure in failures[:8]:
                print(f"FAILED: explain {' '.join(question)}: {failure}")
            failed += len(failures)
    print(f"{len(QUESTIONS)} pages, {failed} failures")
    sys.exit(1 if failed else 0)


main()
