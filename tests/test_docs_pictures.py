"""The pictures of the pages are well-formed; the charts are what docs/pictures.py draws from today's data."""

import re
from xml.etree import ElementTree

import pytest

from docs import pictures
from tests.pages import DOCS, PAGES, ROOT

FILES = sorted((DOCS / "pictures").iterdir())


def texts(path):
    """The words of an SVG file."""
    return [each.text for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_a_chart_says_what_the_data_say(tmp_path):
    pictures.draw(tmp_path)
    for path in tmp_path.iterdir():
        assert texts(path) == texts(DOCS / "pictures" / path.name), f"{path.name}: python -m docs.pictures"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_picture_has_words_and_a_size(path):
    assert texts(path) and all(texts(path))
    assert ElementTree.parse(path).getroot().get("viewBox")


def test_every_picture_is_on_a_page():
    """In Markdown, or in an HTML tag as the README's, which has one picture for a dark ground."""
    shown = {name for page in PAGES for name in re.findall(r"pictures/(\w+)\.svg[)\"]", (ROOT / page).read_text())}
    assert shown == {path.stem for path in FILES}


def test_a_time_has_one_unit():
    assert [pictures.clock(seconds) for seconds in (31.4, 96.4, 450, 930)] == ["31 s", "96 s", "7.5 min", "16 min"]
