"""Checks a built site: every link and anchor within it leads somewhere, and nothing in it is fetched from elsewhere. `python website/check.py site`

mkdocs checks the links that are written in Markdown; this looks at what came out, themes and API pages included. Links that a reader may follow to
other sites are not fetched.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself, by tag and attribute; `a` is followed by a reader alone.
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("image", "href"),
    ("use", "href"),
}
STYLE_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""")


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "link" and given.get("rel") == "canonical":
            return
        for name in ("href", "src"):
            if given.get(name):
                self.links.add(given[name])
                if (tag, name) in FETCHED:
                    self.fetched.add(given[name])


def faults(site: Path) -> list[str]:
    """What is wrong with the site, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        where = path.relative_to(site)
        found += [f"{where}: fetches {link}" for link in sorted(page.fetched) if _is_elsewhere(link)]
        if where.name != "404.html":  # its links start at a root that a site in a folder has not
            found += [f"{where}: {why}" for link in sorted(page.links) if (why := _broken(link, path, pages))]
    for path in sorted(site.rglob("*.css")):
        found += [
            f"{path.relative_to(site)}: fetches {link}" for link in STYLE_URL.findall(path.read_text(encoding="utf-8"))
        ]
    return found


def _is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).netloc)


def _broken(link: str, page: Path, pages: dict[Path, Page]) -> str:
    """Why a link leads nowhere; empty if it leads somewhere, or out of the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return f"'{link}' leads to no file"
    known = {path.resolve(): found for path, found in pages.items()} if parts.fragment else {}
    if parts.fragment and target in known and unquote(parts.fragment) not in known[target].anchors | {"__top"}:
        return f"'{link}': there is no such place on that page"
    return ""


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print(
        "\n".join(wrong)
        if wrong
        else f"{sys.argv[1]}: every link and anchor leads somewhere; nothing is fetched from elsewhere"
    )
    sys.exit(bool(wrong))
