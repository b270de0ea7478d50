"""Pages, and the data beside them, say the same: after a change of either `python -m benchmarks.figures`."""

import pytest

from benchmarks import figures


@pytest.fixture(scope="module")
def known():
    return figures.read_csv()


@pytest.fixture(scope="module")
def values():
    return figures.computed()


@pytest.mark.parametrize("page", figures.BLOCKS)
def test_blocks_are_those_of_the_data(page):
    assert figures.PAGES[page].read_text() == figures.filled(page)


def test_every_figure_has_a_source_and_is_what_it_says(known, values):
    assert not [error for page in figures.PAGES for error in figures.wrong(page, known[page], values)]


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """A copy of a page with one text in place of another."""

    def change(page, old, new):
        text = figures.PAGES[page].read_text()
        assert old in text
        (tmp_path / "page.md").write_text(text.replace(old, new))
        monkeypatch.setitem(figures.PAGES, page, tmp_path / "page.md")

    return change


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "results.csv: resnet18 dgc N=2 220 steps folds, difference", "-9.99 ± 0.01"),  # computed
        ("docs/methods/powersgd.md", "96.76 ± 0.16", "97.76 ± 0.16"),  # in prose, recorded
        ("docs/methods/dga.md", "11.3x", "10.3x"),  # in a table
        ("docs/faq.md", "28 to 53 ms", "28 to 43 ms"),
    ],
)
def test_a_figure_changed_by_hand_is_named_with_its_page(changed, known, values, page, old, new):
    changed(page, values.get(old, old), new)
    [error] = figures.wrong(page, known[page], values)
    assert error.startswith(f"{page}: ") and new.split(" to ")[-1].split("x")[0].removesuffix(" ms") in error


def test_further_runs_are_written_into_the_prose(changed, known, values):
    """And what a person has written over a computed figure is computed again."""
    source = "results.csv: resnet18 dgc N=2 220 steps folds, difference"
    changed("README.md", values[source], "-9.99 ± 0.01")
    later = values | {source: "+1.23 ± 0.45"}
    found = figures.update("README.md", known["README.md"], later)
    assert ("+1.23 ± 0.45", source) in found
    assert not figures.wrong("README.md", found, later)
    assert "(ResNet-18 on the digits, five folds: +1.23 ± 0.45 points)" in figures.PAGES["README.md"].read_text()


def test_a_new_figure_has_no_source_yet(changed, known, values):
    changed("README.md", "Two commands", "Two commands, 7.77x")
    found = figures.update("README.md", known["README.md"], values)
    assert [figure for figure, source in found if not source] == ["7.77"]
    assert figures.wrong("README.md", found, values) == ["README.md: 7.77: no source in docs/figures.csv"]
