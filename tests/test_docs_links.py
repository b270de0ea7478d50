"""Links between the pages lead somewhere, on GitHub and on the site, and every page can be found."""

import re

import pytest

from tests.pages import DOCS, INLINE, PAGES, ROOT, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAVIGATION = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    seen, found = {}, set()
    for heading in re.findall(r"^#+ (.*)$", prose(path.relative_to(ROOT).as_posix()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
    return found


def links(page):
    text = INLINE.sub(lambda span: "" if "](" in span[1] else span[0], prose(page))
    return [link for link in LINK.findall(text) if "://" not in link]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (PAGES[page].parent / target).resolve() if target else PAGES[page]
        name = path.relative_to(ROOT).as_posix()
        assert path.is_file(), f"{page}: {link}"
        assert not anchor or anchor in anchors(path), f"{page}: {link}: {name} has {sorted(anchors(path))}"
        if page.startswith("docs/"):
            assert path.is_relative_to(DOCS), f"{page}: {link}: the site has docs/ alone"


def test_every_page_is_in_the_navigation_and_on_the_first_page():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(NAVIGATION) == sorted(pages)  # each once
    assert {link for link in links("docs/index.md") if link.endswith(".md")} == pages - {"index.md"}


def test_an_error_points_to_a_section_of_the_help():
    sources = (path.read_text() for path in (ROOT / "lightning_gradcomp").rglob("*.py"))
    sections = {name for text in sources for name in re.findall(r"help_at\(['\"]([\w-]+)", text)}
    assert sections and sections <= anchors(DOCS / "help.md")
