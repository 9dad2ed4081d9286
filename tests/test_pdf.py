"""The PDF: every page of the book in order, links that lead inside it, and a file only where printing went well."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from bs4 import BeautifulSoup
from PIL import Image
from pypdf import PdfReader

from dobnb import book, pdf
from dobnb.pdf import PdfError

ROOT = Path(__file__).parents[1]
CONTENTS = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGE = """<html><head><link rel="stylesheet" href="../_static/a.css"><script src="../_static/mathjax/m.js"></script>
<script src="../_static/other.js"></script></head><body><article class="bd-article"><section id="{name}"><h1>{name}
<a class="headerlink" href="#x">#</a></h1><p id="same">{text}</p><details><summary>S</summary>folded</details></section>
</article></body></html>"""


def lay(root: Path) -> dict:
    """Two rendered pages that link to each other, and their table of contents."""
    (root / "book").mkdir()
    links = '<a href="two.html#same">2</a> <a href="#same">1</a> <a href="https://example.org/">out</a>'
    links += '<a href="../_downloads/x.ipynb">file</a> <img src="../_images/i.png">'
    (root / "book" / "one.html").write_text(PAGE.format(name="one", text=links))
    (root / "book" / "two.html").write_text(PAGE.format(name="two", text='<a href="one.html">back</a>'))
    return {"root": "book/one", "parts": [{"caption": "P & Q", "chapters": [{"file": "book/two"}]}]}


def test_pages_become_one(tmp_path: Path) -> None:
    page = BeautifulSoup(pdf.one_page(tmp_path, lay(tmp_path), "A <title>", "Someone"), "html.parser")
    ids = [tag["id"] for tag in page.find_all(id=True)]
    assert len(ids) == len(set(ids)) and {"page-one", "page-two", "page-one--same", "page-two--same"} <= set(ids)
    links = [tag.get("href") for tag in page.select("section.book-page:not(.book-contents) a")]
    assert links == ["#page-two--same", "#page-one--same", "https://example.org/", None, "#page-one"]
    assert [tag["href"] for tag in page.select(".book-contents a")] == ["#page-one", "#page-two"]
    assert page.img["src"] == "_images/i.png" and page.link["href"] == "_static/a.css"
    assert [script["src"] for script in page.find_all("script")] == ["_static/mathjax/m.js"]
    assert page.title.text == "A <title>" and "P & Q" in page.text and "headerlink" not in str(page)
    assert all(tag.has_attr("open") for tag in page.find_all("details"))


def test_the_title_page_says_who_when_and_what_one_may_do(tmp_path: Path) -> None:
    records = {name: {"when": f"2026-0{month}-02T03:04:05Z"} for name, month in (("01_a", 3), ("02_b", 2))}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "book.json").write_text(json.dumps({"notebooks": records}))
    notes = book._colophon(tmp_path)
    page = BeautifulSoup(pdf.one_page(tmp_path, lay(tmp_path), "A", "P & Q", notes), "html.parser")
    said = [line.text for line in page.select(".book-title p")]
    assert said[0] == "P & Q" and said[2] == "notebooks executed up to 2 March 2026"
    assert "CC BY 4.0" in said[3] and "MIT" in said[3]
    for name, licence in (("LICENSE-TEXT.md", "CC BY 4.0"), ("LICENSE", "MIT License")):
        assert licence in (ROOT / name).read_text()


def test_a_page_that_was_not_rendered_is_named(tmp_path: Path) -> None:
    contents = lay(tmp_path)
    (tmp_path / "book" / "two.html").unlink()
    with pytest.raises(PdfError, match="book/two was not rendered; run `make html` first"):
        pdf.one_page(tmp_path, contents, "A", "B")


def test_the_book_in_one_page(pages: Path) -> None:
    names = [name for _, part in pdf.pages_of(CONTENTS) for name in part]
    page = BeautifulSoup(pdf.one_page(pages, CONTENTS, "A", "B"), "html.parser")
    assert [tag["id"] for tag in page.select("main > section.book-page[id]")] == [pdf._anchor(name) for name in names]
    ids = {tag["id"] for tag in page.find_all(id=True)}
    inside = [tag["href"] for tag in page.select('a[href^="#"]')]
    assert len(inside) > 500 and [link for link in inside if link[1:] not in ids] == []
    for image in page.find_all("img"):
        assert (pages / image["src"]).is_file() and image["alt"].strip()


def test_printing(tmp_path: Path) -> None:
    if not any(map(shutil.which, pdf.BROWSERS)):
        pytest.skip("no Chromium or Chrome is installed")
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "_images").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "html" / "_images" / "i.png")
    with ThreadPoolExecutor(1) as alone:  # the other browser tests hold Playwright's loop in this thread
        printed = alone.submit(pdf.pdf, tmp_path, lay(tmp_path / "html"), "A", "B").result()
    content = printed.read_bytes()
    assert printed == tmp_path / "pdf" / "book.pdf" and content.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) == 4  # cover, contents, two pages
    assert b"/Outlines" in content and b"/MarkInfo" in content
    contents = PdfReader(printed).pages[1].extract_text()
    assert re.findall(r"(one|two)\s+(\d)", contents) == [("one", "3"), ("two", "4")]
    assert [path.name for path in (tmp_path / "pdf").iterdir()] == ["book.pdf"]
    assert not (tmp_path / "html" / "one-page.html").exists()


def test_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "html").mkdir()
    contents = lay(tmp_path / "html")
    with pytest.raises(PdfError, match="neither is installed"):
        pdf.pdf(tmp_path, contents, "A", "B")
    assert list((tmp_path / "pdf").iterdir()) == []
