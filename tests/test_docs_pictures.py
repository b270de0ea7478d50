"""The pictures of the pages are what docs/pictures.py draws from today's data."""

import re

import pytest

from docs import pictures
from lightning_gradcomp.app.plan import given_link
from tests.pages import DOCS, PAGES, ROOT

TEXT = re.compile(r"<text [^>]*>([^<]*)</text>")


def test_pictures_say_what_the_data_say(tmp_path):
    pictures.draw(tmp_path)
    drawn = {path.name: TEXT.findall(path.read_text()) for path in tmp_path.iterdir()}
    assert all(drawn.values())
    assert drawn == {path.name: TEXT.findall(path.read_text()) for path in (DOCS / "pictures").iterdir()}


def test_every_picture_is_on_a_page():
    """In Markdown, or in an HTML tag as the README's, which has one picture for a dark ground."""
    shown = {name for page in PAGES for name in re.findall(r"pictures/(\w+)\.svg[)\"]", (ROOT / page).read_text())}
    assert shown == set(pictures.everything())


def test_a_time_has_one_unit():
    assert [pictures.clock(seconds) for seconds in (31.4, 96.4, 450, 930)] == ["31 s", "96 s", "7.5 min", "16 min"]


@pytest.mark.parametrize(
    "mbit, delay_ms, method",
    [(100_000, 0.1, "DDP"), (4000, 0.1, "bf16"), (1000, 0.1, "dgc"), (1000, 90, "dga"), (20, 0.1, "sparseloco")],
)
def test_a_link_has_the_method_that_changes_the_training_least(mbit, delay_ms, method):
    assert pictures.chosen(pictures.plan(), given_link(mbit, delay_ms)) == method
