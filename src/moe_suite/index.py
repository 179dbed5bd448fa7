"""The page that gathers what the domains' demos wrote.

A demo leaves `summary.json` beside its `index.html`: {"title", "notices": [...], "facts": [[name, value], ...],
"pictures": [{"file", "caption"}, ...]} with file names relative to its folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from shared_moe.files import atomic_path

PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>moe-suite demo</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
  section { border-top: 1px solid #ddd; padding: 1rem 0 2rem; }
  figure { display: inline-block; margin: .5rem 1rem .5rem 0; max-width: 32rem; vertical-align: top; }
  img { max-width: 100%; border: 1px solid #ddd; }
  figcaption, .time { color: #555; font-size: .9rem; }
  .notice { background: #fff4d6; padding: .4rem .8rem; }
  .failed { background: #fde0e0; padding: .4rem .8rem; }
  td { padding: .1rem 1.5rem .1rem 0; vertical-align: top; }
</style>
<h1>moe-suite demo</h1>
{% for run in runs %}
<section>
  <h2>{{ run.domain }}: {{ run.summary.title or run.command }}</h2>
  <p class="time"><code>{{ run.command }} demo</code>, {{ "%.0f" % run.seconds }} s</p>
  {% if run.exit_code %}
  <p class="failed">This demo failed with exit code {{ run.exit_code }}.</p>
  {% else %}
  {% for notice in run.summary.notices %}<p class="notice">{{ notice }}</p>{% endfor %}
  <table>{% for name, value in run.summary.facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
  {% for picture in run.summary.pictures %}
  <figure><img src="{{ run.domain }}/{{ picture.file }}" alt="{{ picture.caption }}"><figcaption>{{ picture.caption }}</figcaption></figure>
  {% endfor %}
  <p><a href="{{ run.domain }}/index.html">the whole report</a></p>
  {% endif %}
</section>
{% endfor %}
</html>
"""
)


@dataclass(frozen=True)
class DemoRun:
    domain: str
    command: str
    folder: Path
    seconds: float
    exit_code: int

    @property
    def summary(self) -> dict:
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else {}


def write_index(output: Path, runs: list[DemoRun]) -> Path:
    """Write `output`/index.html from the demos' summaries; a failed demo is shown as failed."""
    page = output / "index.html"
    with atomic_path(page) as p:
        p.write_text(PAGE.render(runs=runs), encoding="utf-8")
    return page
