"""A page that a demo leaves behind: one light HTML file with tables and pictures, nothing fetched from elsewhere."""

import base64
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment

from shared_moe.errors import InputError, UnreadableError
from shared_moe.files import atomic_path

MEDIA = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".svg": "image/svg+xml",
}

PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
  figure { margin: 1.5rem 0; }
  img { max-width: 100%; height: auto; border: 1px solid #8886; background: #fff; }
  figcaption, caption { font-size: .9rem; opacity: .8; text-align: left; padding: .3rem 0; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; margin: 1rem 0; }
  th, td { padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
  .number { text-align: right; font-variant-numeric: tabular-nums; }
  .notice { border-left: .3rem solid #d08700; background: #d087001f; padding: .5rem 1rem; }
  pre { overflow-x: auto; background: #8881; padding: .7rem 1rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for part in parts %}
{% if part.kind == "heading" %}
<h2>{{ part.text }}</h2>
{% elif part.kind == "paragraph" %}
<p>{{ part.text }}</p>
{% elif part.kind == "notice" %}
<p class="notice" role="note">{{ part.text }}</p>
{% elif part.kind == "code" %}
<pre><code>{{ part.text }}</code></pre>
{% elif part.kind == "link" %}
<p><a href="{{ part.source }}">{{ part.text }}</a></p>
{% elif part.kind == "picture" %}
<figure><img src="{{ part.source }}" alt="{{ part.text }}"><figcaption>{{ part.text }}</figcaption></figure>
{% elif part.kind == "table" %}
<div class="scroll"><table>
{% if part.text %}<caption>{{ part.text }}</caption>{% endif %}
<thead><tr>{% for name in part.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in part.rows %}
<tr>{% for cell in row %}<td{% if cell.number %} class="number"{% endif %}>{{ cell.text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% endfor %}
</body>
</html>
"""
)


@dataclass(frozen=True)
class _Part:
    kind: str
    text: str = ""
    source: str = ""
    file: Path | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[dict[str, Any]]] = ()


@dataclass
class Report:
    """Add parts in reading order, then `write`. Every text is escaped; each method returns the report."""

    title: str
    parts: list[_Part] = field(default_factory=list)

    def heading(self, text: str) -> "Report":
        return self._add(_Part("heading", text))

    def paragraph(self, text: str) -> "Report":
        return self._add(_Part("paragraph", text))

    def notice(self, text: str) -> "Report":
        """What the reader must not overlook, such as "composed of real tiles"."""
        return self._add(_Part("notice", text))

    def code(self, text: str) -> "Report":
        """A command or its output, with its line breaks."""
        return self._add(_Part("code", text))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> "Report":
        """Rows of cells in any type; numbers are set to the right, floats with four significant digits.

        Raises `InputError` for a row of another length than `columns`.
        """
        cells = []
        for number, row in enumerate(rows):
            if len(row) != len(columns):
                raise InputError(
                    f"row {number} of the table has {len(row)} cells, expected {len(columns)}: {row!r}"
                )
            cells.append([_cell(value) for value in row])
        return self._add(_Part("table", caption, columns=list(columns), rows=cells))

    def picture(self, picture: Any, caption: str, *, embed: bool = True) -> "Report":
        """A picture: an image file's path, PNG bytes, a matplotlib Figure or a PIL image.

        `embed=False` links a file by its path relative to the page instead. Raises `InputError` for another kind,
        `UnreadableError` for a file that is not there.
        """
        if isinstance(picture, str | Path):
            path = Path(picture)
            if path.suffix.lower() not in MEDIA:
                raise InputError(f"{path}: a picture must be one of {', '.join(MEDIA)}")
            if not path.is_file():
                raise UnreadableError(f"{path}: no such picture")
            if not embed:
                return self._add(_Part("picture", caption, file=path))
            return self._add(
                _Part("picture", caption, _data(path.read_bytes(), MEDIA[path.suffix.lower()]), path)
            )
        if not embed:
            raise InputError("only a file can be linked; save the picture and pass its path")
        return self._add(_Part("picture", caption, _data(_png(picture), "image/png")))

    def link(self, path: Path | str, text: str) -> "Report":
        """A link to a file, by its path relative to the page."""
        return self._add(_Part("link", text, file=Path(path)))

    def write(self, path: Path | str) -> Path:
        """Write the page at `path` (at `path`/index.html for a folder) and `summary.json` beside it.

        The summary ({"title", "notices", "facts", "pictures"}) is what an index page shows of this report: the facts
        are the first table of two columns, the pictures those that are files. Returns the page's path.
        """
        page = Path(path)
        if page.suffix.lower() not in (".html", ".htm"):
            page = page / "index.html"
        with atomic_path(page) as out:
            out.write_text(self.html(page.parent), encoding="utf-8")
        with atomic_path(page.with_name("summary.json")) as out:
            out.write_text(json.dumps(self._summary(page.parent), indent=2) + "\n", encoding="utf-8")
        return page

    def html(self, folder: Path | str = ".") -> str:
        """The page as text; links are relative to `folder`."""
        parts = [
            part
            if part.source or part.file is None
            else _Part(part.kind, part.text, _href(part.file, folder))
            for part in self.parts
        ]
        return PAGE.render(title=self.title, parts=parts)

    def _summary(self, folder: Path) -> dict[str, Any]:
        tables = [p for p in self.parts if p.kind == "table" and len(p.columns) == 2]
        return {
            "title": self.title,
            "notices": [p.text for p in self.parts if p.kind == "notice"],
            "facts": [[cell["text"] for cell in row] for row in tables[0].rows] if tables else [],
            "pictures": [
                {"file": _relative(p.file, folder), "caption": p.text}
                for p in self.parts
                if p.kind == "picture" and p.file is not None
            ],
        }

    def _add(self, part: _Part) -> "Report":
        self.parts.append(part)
        return self


def _cell(value: Any) -> dict[str, Any]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"text": f"{value:.4g}" if isinstance(value, float) else str(value), "number": number}


def _relative(file: Path, folder: Path | str) -> str:
    return Path(os.path.relpath(file, folder)).as_posix()


def _href(file: Path, folder: Path | str) -> str:
    return quote(_relative(file, folder))


def _data(raw: bytes, media: str) -> str:
    return f"data:{media};base64,{base64.b64encode(raw).decode()}"


def _png(picture: Any) -> bytes:
    if isinstance(picture, bytes):
        return picture
    out = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(out, format="png", dpi=120, bbox_inches="tight")
    elif hasattr(picture, "save") and hasattr(picture, "mode"):
        picture.save(out, format="PNG")
    else:
        raise InputError(
            f"a picture must be a path, PNG bytes, a matplotlib Figure or a PIL image, got {type(picture).__name__}"
        )
    return out.getvalue()
