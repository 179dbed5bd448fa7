import base64
import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from shared_moe.errors import InputError, UnreadableError
from shared_moe.report import Report


class Page(HTMLParser):
    """Tags in order, attributes of pictures and links, and visible text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_parts_stand_in_the_order_in_which_they_were_added():
    report = Report("A demo").notice("composed of real tiles").heading("Result").paragraph("It ran.")
    report.table(["name", "value"], [["count", 12], ["mpp", 0.25]], "facts").code("a\nb")
    text = "".join(Page(report.html().split("</style>")[1]).text)
    order = ["A demo", "composed of real tiles", "Result", "It ran.", "facts", "count", "12", "0.25", "a\nb"]
    places = [text.index(word) for word in order]
    assert places == sorted(places)


@given(st.text())
def test_no_text_can_break_out_of_its_place(text):
    hostile = f"<script>alert(1)</script>\" onload='x' {text}"
    report = Report(hostile).heading(hostile).paragraph(hostile).notice(hostile).code(hostile)
    report.table([hostile, "b"], [[hostile, 1]], hostile).picture(b"png", hostile).link("a b.html", hostile)
    page = Page(report.html())
    assert "script" not in page.tags
    assert page.tags.count("p") == 3
    assert "".join(page.text).count("alert(1)") == 11
    assert page.sources == ["data:image/png;base64,cG5n", "a%20b.html"]


def test_pictures_are_embedded_or_linked_relative_to_the_page(tmp_path):
    file = tmp_path / "pictures" / "a picture.png"
    file.parent.mkdir()
    Image.new("RGB", (2, 2)).save(file)
    report = Report("t").picture(file, "embedded").picture(file, "linked", embed=False)
    page = report.write(tmp_path / "pages" / "demo")
    assert page == tmp_path / "pages" / "demo" / "index.html"
    embedded, linked = Page(page.read_text()).sources
    assert base64.b64decode(embedded.split(",")[1]) == file.read_bytes()
    assert linked == "../../pictures/a%20picture.png"


def test_figures_and_images_become_png():
    figure = Figure()
    figure.subplots().plot([1, 2])
    report = Report("t").picture(figure, "figure").picture(Image.new("L", (3, 3)), "image")
    for source in Page(report.html()).sources:
        assert base64.b64decode(source.split(",")[1]).startswith(b"\x89PNG")


def test_nothing_is_fetched_from_elsewhere():
    report = Report("t").paragraph("see https://example.org").picture(b"x", "c")
    assert [s for s in Page(report.html()).sources if not s.startswith("data:")] == []
    assert "@import" not in report.html()


def test_summary_is_what_an_index_page_needs(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "a b.png")
    report = Report("Slides").notice("not a medical device").table(["", ""], [["tiles", 3]])
    report.picture(tmp_path / "a b.png", "thumbnail", embed=False).write(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "title": "Slides",
        "notices": ["not a medical device"],
        "facts": [["tiles", "3"]],
        "pictures": [{"file": "a b.png", "caption": "thumbnail"}],
    }


def test_bad_input_is_named(tmp_path):
    report = Report("t")
    with pytest.raises(InputError, match="row 1 of the table has 1 cells, expected 2"):
        report.table(["a", "b"], [[1, 2], [3]])
    with pytest.raises(UnreadableError, match=r"gone\.png: no such picture"):
        report.picture(tmp_path / "gone.png", "c")
    with pytest.raises(InputError, match=r"must be one of \.png"):
        report.picture(tmp_path / "a.exe", "c")
    with pytest.raises(InputError, match="got int"):
        report.picture(3, "c")
    with pytest.raises(InputError, match="only a file can be linked"):
        report.picture(b"x", "c", embed=False)
    assert report.parts == []
