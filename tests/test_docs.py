"""README, docs/ and examples/: what they show runs and prints what they say, and their links lead
somewhere.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from gdntune.report import published_pages

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "tables").glob("*.md")),
]
OF_EXAMPLE = {
    "decode": "engine", "packed": "engine", "verify": "engine", "own_config": "tune",
    "layer": "engine", "in_transformers": "engine", "in_vllm": "engine", "in_sglang": "engine", "drop_ins": "engine",
}  # fmt: skip


def blocks(page, language):
    """The fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run(*arguments):
    """A Python of its own that finds the package here."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = warm.run([sys.executable, *map(str, arguments)], env, ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_is_short():
    """A busy engineer reads it to the end: under 700 words, code and table included."""
    assert len((ROOT / "README.md").read_text().split()) < 700


def test_readmes_snippet_runs():
    """The call of the README runs as it stands."""
    (snippet,) = blocks(ROOT / "README.md", "python")
    assert run("-c", snippet) == "torch.Size([4, 1, 8, 128])\n"


@pytest.mark.parametrize("name", OF_EXAMPLE)
def test_example(name, tmp_path):
    """Each example prints what its page shows."""
    folder = [tmp_path / "run"] if name == "own_config" else []
    printed = run(ROOT / "examples" / f"{name}.py", *folder)
    assert printed in blocks(ROOT / "docs" / f"{OF_EXAMPLE[name]}.md", "text")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    """Every relative link is to a file or folder of the repository."""
    links = re.findall(
        r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    )
    gone = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_anchors_lead_somewhere(page):
    """Every link to a heading, of its own page or another, names one that is there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    gone = []
    for where, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
        target = page.parent / where if where else page
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
        if anchor not in map(published_pages.anchor, headings):
            gone.append(f"{where}#{anchor}")
    assert gone == []


def test_guide_names_every_page():
    """docs/index.md links to each page beside it."""
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert [name for name in sorted(pages) if f"({name})" not in index] == []


def test_reference_is_of_the_code():
    """docs/reference.md is what `python -m gdntune.cli.reference` prints: it names every command,
    option and config key.
    """
    from gdntune.cli.reference import page

    assert (ROOT / "docs" / "reference.md").read_text() == page()


def test_reference_has_every_variable_of_the_environment():
    """Fault: three that the code reads stood on another page alone."""
    from gdntune.cli.reference import ENVIRONMENT

    code = "".join(p.read_text() for p in (ROOT / "gdntune").rglob("*.py"))
    assert set(re.findall(r"GDNTUNE_[A-Z_]+", code)) == {n for n in ENVIRONMENT if n != "CXX"}


def commands_of(page):
    """Each gdntune command of a page's shell blocks, without its comment."""
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if "gdntune" in words and words[0] in ("gdntune", "PYTHONPATH=examples"):
            yield words[words.index("gdntune") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_that_are_shown_exist(page):
    """Every command of a shell block has the options and number of arguments of today."""
    import typer.main

    from gdntune.cli.app import app

    for words in commands_of(page):
        command, args = typer.main.get_command(app), words
        while hasattr(command, "commands"):
            name, *args = args
            command = command.commands[name]
        args = [str(ROOT / "LICENSE") if "*" in a and "'" not in a else a for a in args]
        command.make_context(command.name, args, resilient_parsing=False)


def test_what_drafts_are_said_to_cost():
    """The page shows what its command prints, of a table that ships."""
    page = ROOT / "docs" / "speculative.md"
    (command,) = blocks(page, "sh")
    printed = run("-m", *command.split())
    assert printed in blocks(page, "text")


def test_site_builds(tmp_path):
    """mkdocs finds every page of the guide in its navigation, and every link and anchor."""
    pytest.importorskip(
        "material", reason="mkdocs-material is not installed: pip install -e '.[dev]'"
    )
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert named == {p.name for p in (ROOT / "docs").glob("*.md")}
    assert (tmp_path / "site" / "walks" / "index.html").exists()
