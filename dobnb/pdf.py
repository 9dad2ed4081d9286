"""The book as one PDF: the rendered pages put into one, in order, and printed by Chromium.

The pages are those of ``_build/html``, so numbers of theorems, equations and figures are the same on paper. Links
inside the book stay links. Sphinx's own way to one page, its builder ``singlehtml``, fails on sphinx-proof's theorems.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dobnb import __version__
from dobnb.errors import DobnbError
from dobnb.files import write_text

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""What prints, the first that is installed."""
ONLY_ON_SCREEN = ".headerlink, .copybtn, .prev-next-area, script, noscript, .explorer, dialog, button"
"""What a page has for its readers on a screen alone."""
REFERENCES = {"a": "href", "img": "src"}
LAYOUT = """
  @page { size: A4; margin: 18mm 16mm 20mm; }
  html { font-size: 12.5px; }
  body { background: #fff; display: block; }
  main { margin: 0 auto; max-width: 178mm; }
  section.book-page { break-before: page; }
  .book-title { margin-top: 60mm; text-align: center; }
  .book-contents ol, .book-contents ul { list-style: none; padding-left: 1rem; }
  .book-contents li { display: flex; justify-content: space-between; border-bottom: 1px dotted #999; }
  .book-contents li::after { content: attr(data-page); }
  .book-contents p { font-weight: 600; margin: 0.8rem 0 0.2rem; }
  h1, h2, h3, h4, dt, p:has(+ details), p:has(+ .pst-scrollable-table-container) { break-after: avoid; }
  .cell_input:has(+ .cell_output pre) { break-after: avoid; }
  figure, img, table tr, div.cell_input, .proof, div.math, details { break-inside: avoid; }
  :is([id^="page-0"], [id^="page-1"], #page-index, #page-theorems) table { break-inside: avoid; }
  pre { white-space: pre-wrap !important; overflow-wrap: anywhere; }
  table { font-size: 0.85em; }
  div.cell_output table.dataframe :is(th, td) { white-space: normal; }
  .pst-scrollable-table-container, div.cell_output, div.math { overflow: visible !important; }
  img { max-height: 190mm; max-width: 112mm !important; width: auto !important; }
  dl.py { margin-bottom: 0.8rem !important; }
  dl.py p { margin-bottom: 0.4rem; }
  dl.field-list { display: block !important; }
"""
NUMBER = """numbers => {
  for (const link of document.querySelectorAll(".book-contents a"))
    link.parentNode.dataset.page = numbers[link.hash.slice(1)];
}"""
"""Writes page numbers into the contents: a browser knows them only once it has printed."""


class PdfError(DobnbError):
    """The book cannot be printed."""


def pages_of(contents: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(caption, pages) of each part of a table of contents, as ``_toc.yml`` has it; the root comes first."""

    def below(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        for entry in entries:
            yield entry["file"]
            yield from below(entry.get("sections", ()))

    yield "", [contents["root"]]
    for part in contents.get("parts") or [{"caption": "", "chapters": contents.get("chapters", [])}]:
        yield part.get("caption", ""), list(below(part["chapters"]))


def one_page(folder: Path, contents: Mapping[str, Any], title: str, author: str, notes: Sequence[str] = ()) -> str:
    """All pages of the rendered book in `folder`, in the order of its table of contents, as one page of HTML.

    :param folder: with the rendered pages; the page that is returned belongs there.
    :param notes: lines of plain text below the version on the title page, such as date and licence.
    :raises PdfError: a page of the table of contents was not rendered.
    """
    from bs4 import BeautifulSoup

    parts = list(pages_of(contents))
    names = [name for _, pages in parts for name in pages]
    articles, listed, head = [], [], ""
    for caption, pages in parts:
        entries = []
        for name in pages:
            path = folder / f"{name}.html"
            if not path.is_file():
                raise PdfError(f"{name} was not rendered; run `make html` first")
            page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
            head = head or _head(page, name)
            article = page.select_one("article.bd-article")
            _belongs_to(article, name, names)
            entries.append((_anchor(name), article.h1.get_text()))
            articles.append(f'<section class="book-page" id="{_anchor(name)}">{article.decode_contents()}</section>')
        items = "".join(f'<li><a href="#{anchor}">{html.escape(text)}</a></li>' for anchor, text in entries)
        listed.append(f"{f'<p>{html.escape(caption)}</p>' if caption else ''}<ul>{items}</ul>")
    by = f"<p>{html.escape(author)}</p><p>version {__version__}</p>"
    by += "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    cover = (
        f'<div class="book-title"><h1>{html.escape(title)}</h1>{by}</div>'
        f'<section class="book-page book-contents"><h1>Contents</h1>{"".join(listed)}</section>'
    )
    return (
        f'<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>{head}<style>{LAYOUT}</style></head>"
        f"<body><main>{cover}{''.join(articles)}</main></body></html>"
    )


def _anchor(name: str) -> str:
    return f"page-{name.rsplit('/', 1)[-1]}"


def _head(page: BeautifulSoup, name: str) -> str:
    """Style sheets, icons and MathJax of a page, as seen from the folder of all pages."""
    kept = []
    for tag in page.select('link[rel~="stylesheet"], script'):
        place = tag.get("src") or tag.get("href") or ""
        if tag.name == "script" and not re.search(r"mathjax|fontawesome", place or tag.get_text(), re.IGNORECASE):
            continue
        for attribute in ("src", "href"):
            if tag.get(attribute):
                tag[attribute] = posixpath.normpath(posixpath.join(posixpath.dirname(name), tag[attribute]))
        kept.append(str(tag))
    return "".join(kept)


def _belongs_to(article: Tag, name: str, names: Sequence[str]) -> None:
    """Make ids of a page unlike those of any other, and let links and figures find their places from the one page."""
    for tag in article.select(ONLY_ON_SCREEN):
        tag.decompose()
    for tag in article.select("details"):
        tag["open"] = ""
    for tag in article.select(".toggle-hidden"):
        tag["class"] = [one for one in tag["class"] if one != "toggle-hidden"]
    for tag in article.find_all(id=True):
        tag["id"] = f"{_anchor(name)}--{tag['id']}"
    for kind, attribute in REFERENCES.items():
        for tag in article.find_all(kind):
            if link := _moved(tag.get(attribute, ""), name, names):
                tag[attribute] = link
            elif kind == "a":
                del tag["href"]  # a file beside the book, which paper has not


def _moved(link: str, name: str, names: Sequence[str]) -> str | None:
    """Where a link of the page `name` leads in the one page; None for files that are not in it."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else ""
    page = path.removesuffix(".html") or name
    if page in names:
        return f"#{_anchor(page)}--{parts.fragment}" if parts.fragment else f"#{_anchor(page)}"
    return path if path.startswith("_images/") else None


def print_pdf(page: Path, pdf: Path) -> None:
    """Print a page of HTML, once its mathematics is set, with an outline and numbered pages.

    It is printed twice: the numbers of the first printing go into the contents of the second.

    :raises PdfError: no browser is installed, or it fails.
    """
    from playwright.sync_api import Error, sync_playwright

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise PdfError("printing needs Chromium or Chrome; neither is installed; on Debian: apt-get install chromium")
    small = "font-size:8px;width:100%;text-align:center;color:#444"
    try:
        with sync_playwright() as driver:
            chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
            opened = chromium.new_page()
            opened.set_default_timeout(600_000)
            opened.goto(page.as_uri())
            opened.evaluate("window.MathJax?.startup?.promise")
            opened.evaluate("Promise.all([...document.images].map(image => image.decode()))")
            settings: Any = {
                "path": pdf, "format": "A4", "prefer_css_page_size": True, "print_background": True,
                "outline": True, "tagged": True, "display_header_footer": True, "header_template": "<span></span>",
                "footer_template": f'<div style="{small}"><span class="pageNumber"></span></div>',
            }  # fmt: skip
            opened.pdf(**settings)
            numbers = page_numbers(pdf)
            opened.evaluate(NUMBER, numbers)
            opened.pdf(**settings)
            chromium.close()
    except Error as error:
        reason = str(error).splitlines()[0]
        raise PdfError(f"the browser did not print: {reason}; close other programs, try again") from None
    if page_numbers(pdf) != numbers:
        raise PdfError("page numbers moved the pages that they stand for; give .book-contents li a fixed height")


def page_numbers(pdf: Path) -> dict[str, int]:
    """The page, counted from 1, on which each page of a printed book begins, by its id: what the contents list."""
    from pypdf import PdfReader

    reader = PdfReader(pdf)
    named = {name.removeprefix("/"): place for name, place in reader.named_destinations.items()}
    return {name: 1 + reader.get_destination_page_number(place) for name, place in named.items() if "--" not in name}


def pdf(build: Path, contents: Mapping[str, Any], title: str, author: str, notes: Sequence[str] = ()) -> Path:
    """Make ``_build/pdf/book.pdf`` out of the rendered pages.

    :param build: the folder ``_build``.
    :param contents: what ``_toc.yml`` says.
    :param notes: see :func:`one_page`.
    :return: the file.
    :raises PdfError: see :func:`one_page` and :func:`print_pdf`.
    """
    page = build / "html" / "one-page.html"
    write_text(page, one_page(build / "html", contents, title, author, notes))
    file = build / "pdf" / "book.pdf"
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.pdf")
    try:
        print_pdf(page, partial)
        partial.replace(file)
    finally:
        page.unlink()
        partial.unlink(missing_ok=True)
    return file
