"""The examples of the README and of docs/ run, and their links lead somewhere."""

import dataclasses
import re
from pathlib import Path

import pytest

from linformers import LinformerConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
EMBEDDING = (ROOT / "docs" / "embedding.md").read_text().partition("## sentence-transformers")[0]
BLOCKS = re.findall(r"```python\n(.*?)```", README + MODELS + EMBEDDING, re.DOTALL)
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_python_blocks_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 5
    scope = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), scope)


def test_table_of_choices_names_fields_and_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(LinformerConfig)}
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", MODELS, re.MULTILINE)
    assert len(rows) >= 10
    for field, values in rows:
        default = re.search(r'\*\*`"(.*?)"`\*\*', values) or re.match(r"`?([\w.]+)`?", values)
        assert str(defaults[field]) == default[1]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("https://"):
            assert not dead(page, link), link


def dead(page, link):
    """Whether a link of a page leads to no file, or to no heading in it."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return True
    headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else []
    return bool(anchor) and anchor not in {re.sub(r"[^\w -]", "", own.lower()).replace(" ", "-") for own in headings}


def test_a_dead_link_is_found():
    page = ROOT / "README.md"
    assert dead(page, "docs/nowhere.md")
    assert dead(page, "docs/models.md#no-such-choice")
    assert not dead(page, "docs/models.md#the-choices")
