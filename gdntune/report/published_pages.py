"""The parts of README and docs that are made from published journals, and their marks:

    python -m gdntune.report.published_pages [--write]

in a checkout says which figures the journals no longer bear, by page and name, and exits with 1;
--write puts the journals' own in their place. A part stands between `<!--made:NAME-->` and
`<!--end-->`, within a sentence or as a block; `contents` is the page's own table of contents.
A test holds that nothing is to be said.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gdntune.files import write_whole
from gdntune.report import published_behind, published_figures

PAGES = ("README.md", "docs/results.md", "docs/limits.md", "docs/measured.md")
CONTENTS = "contents"
_PART = re.compile(r"<!--made:(?P<name>\S+?)-->(?P<text>.*?)<!--end-->", re.DOTALL)


class Stale(NamedTuple):
    """A part that a page has otherwise than the journals, or, where both are equal, in the wrong
    place. made: None where they have none of that name, or no page has the mark.
    """

    page: str
    name: str
    says: str | None
    made: str | None

    def __str__(self) -> str:
        if self.says is None:
            return f"no page has <!--made:{self.name}-->: put it, and <!--end-->, in {self.page}"
        if self.made is None:
            return (
                f"{self.page}: {self.name}: no such part; remove its mark, or publish its journal"
            )
        if self.made == self.says:
            return (
                f"{self.page}: {self.name}: its mark begins a line, which Markdown takes for HTML,"
                " links and all; put the word before it on that line"
            )
        said, made = self.says.split("\n"), self.made.split("\n")
        pairs = [(a, b) for a, b in zip(said, made, strict=False) if a != b]
        lines = [f"  - {a}\n  + {b}" for a, b in pairs]
        lines += [f"  - {line}" for line in said[len(made) :]]
        lines += [f"  + {line}" for line in made[len(said) :]]
        return "\n".join([f"{self.page}: {self.name}: the journals say otherwise", *lines])


def anchor(heading: str) -> str:
    """What a link to a heading ends with, on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def contents(text: str) -> str:
    """A page's headings of the second level as links."""
    headings = re.findall(r"^## (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return "\n".join(f"- [{words}](#{anchor(words)})" for words in headings)


def parts(results: Path) -> dict[str, Callable[[], str]]:
    """All that is made of the journals below a folder, by name."""
    return {**published_figures.tables(results), **published_behind.sentences(results)}


def stale(root: Path, made: Mapping[str, Callable[[], str]]) -> Iterator[Stale]:
    """What the pages of a checkout have otherwise than it is made, and what none of them has."""
    seen = set()
    for page in PAGES:
        text = (root / page).read_text(encoding="utf-8")
        for mark in _PART.finditer(text):
            name, said = mark["name"], mark["text"].strip("\n")
            seen.add(name)
            now = _made(name, made, text)
            if said != now or _begins_a_line(mark, text):
                yield Stale(page, name, said, now)
    for name in made:
        if name not in seen:
            yield Stale(PAGES[1], name, None, None)


def rewritten(text: str, made: Mapping[str, Callable[[], str]]) -> str:
    """A page with its parts as they are made; those of other names stay."""

    def part(mark: re.Match[str]) -> str:
        now = _made(mark["name"], made, text)
        if now is None:
            return mark[0]
        around = "\n\n" if "\n" in now or "\n" in mark["text"] else ""
        return f"<!--made:{mark['name']}-->{around}{now}{around}<!--end-->"

    return _PART.sub(part, text)


def _begins_a_line(mark: re.Match[str], text: str) -> bool:
    """Of a part within a sentence."""
    return "\n" not in mark["text"] and text[: mark.start()].endswith("\n")


def _made(name: str, made: Mapping[str, Callable[[], str]], text: str) -> str | None:
    if name == CONTENTS:
        return contents(text)
    return made[name]() if name in made else None


def main(arguments: list[str], root: Path) -> int:
    """Says or writes what is stale; how many parts are left so, at most 1."""
    if arguments not in ([], ["--write"]):
        sys.stderr.write(f"{' '.join(arguments)}: expected nothing, or --write\n")
        return 2
    made = parts(root / "docs" / "results")
    if arguments:
        for page in PAGES:
            text = (root / page).read_text(encoding="utf-8")
            if (now := rewritten(text, made)) != text:
                write_whole(root / page, now.encode())
                sys.stdout.write(f"{page}: written\n")
    left = list(stale(root, made))
    sys.stdout.writelines(f"{one}\n" for one in left)
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], Path(__file__).parents[2]))
