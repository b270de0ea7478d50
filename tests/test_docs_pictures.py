"""The pictures of the pages are what docs/pictures.py draws from today's data."""

import re

from docs import pictures
from tests.pages import DOCS, PAGES, ROOT

TEXT = re.compile(r"<text [^>]*>([^<]*)</text>")


def test_pictures_say_what_the_data_say(tmp_path):
    pictures.draw(tmp_path)
    drawn = {path.name: TEXT.findall(path.read_text()) for path in tmp_path.iterdir()}
    assert all(drawn.values())
    assert drawn == {path.name: TEXT.findall(path.read_text()) for path in (DOCS / "pictures").iterdir()}


def test_every_picture_is_on_a_page():
    shown = {target for page in PAGES for target in re.findall(r"!\[[^\]]+\]\(\S*pictures/(\S+)\)", page_text(page))}
    assert shown == {f"{name}.svg" for name in pictures.PICTURES}


def page_text(page):
    return (ROOT / page).read_text()
