"""The documents: short lines, and every path, link, setting, command and symbol in them is one of this tree."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

#: Numbers of lines, and what is wrong there.
Problems = Iterator[tuple[int, str]]

ROOT = Path(__file__).parents[2]
WIDTH = 120
# Directories whose text defines symbols, settings and options.
SOURCES = ("src", "torch_backend", "cpp", "python", "tests", "crates", "benches", "fuzz", "examples")
TEXT = {".rs", ".cu", ".cuh", ".cpp", ".hpp", ".py", ".pyi", ".toml", ""}
PATH = re.compile(rf"(?:{'|'.join((*SOURCES, 'docs'))}|\.ci)/[\w./*{{}},-]*")
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
# Named in the documents and nowhere else in this tree: names of torch and of its clients, and names in formulas.
FOREIGN = {"record_stream", "x_r", "PartialState", "HfArgumentParser", "available_backends"}


def documents(*folders: str) -> list[Path]:
    """All documents, or those whose path starts with one of `folders`."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in found if not folders or str(path.relative_to(ROOT)).startswith(folders))


def lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Number and text of each line, and whether it is code between fences."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        yield number, line, fenced or fence


def spans(path: Path) -> Iterator[tuple[int, str]]:
    """The text between back-ticks, line by line."""
    for number, line, fenced in lines(path):
        if not fenced:
            yield from ((number, span) for span in CODE.findall(line))


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """The text that may contain commands: between back-ticks and between fences."""
    yield from spans(path)
    yield from ((number, line.partition("#")[0]) for number, line, fenced in lines(path) if fenced)


@cache
def sources(*folders: str) -> str:
    """The text of all files below `folders`, except this one."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    texts = (file for file in files if file.is_file() and file.suffix in TEXT and file != Path(__file__))
    return "\n".join(file.read_text(errors="replace") for file in texts)


@cache
def words(*folders: str) -> frozenset[str]:
    """All identifiers below `folders`, and the files' names."""
    names = (part for folder in folders for file in (ROOT / folder).rglob("*") for part in (file.name, file.stem))
    return frozenset(re.findall(r"\w+", sources(*folders))) | frozenset(names)


def expanded(pattern: str) -> list[str]:
    """`a/{b,c}` as `a/b` and `a/c`."""
    parts = [
        part.strip("{}").split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", pattern)
    ]
    return ["".join(choice) for choice in product(*parts)]


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document: headings as the site writes them, or as GitHub does outside docs/."""
    found: dict[str, int] = {}
    site = path.is_relative_to(ROOT / "docs")
    for _, line, fenced in lines(path):
        if fenced or not (heading := re.match(r"#+ (.*)", line)):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "").strip().lower()
        text = text.encode("ascii", "ignore").decode() if site else text
        slug = re.sub(r"[-\s]+" if site else r"\s", "-", re.sub(r"[^\w\s-]", "", text))
        found[slug] = found.get(slug, -1) + 1
    return frozenset(
        slug + (f"{'_' if site else '-'}{k}" if k else "") for slug, most in found.items() for k in range(most + 1)
    )


def long_lines(path: Path) -> Problems:
    alone = re.compile(r"\s*(?:[-*] )?(?:!?\[[^\]]*\]\([^)]*\)|https?://\S+)[.,;:]?\s*")
    for number, line, fenced in lines(path):
        if len(line) > WIDTH and not fenced and not line.lstrip().startswith("|") and not alone.fullmatch(line):
            yield number, f"{len(line)} characters; break the line at {WIDTH}"


def missing_paths(path: Path) -> Problems:
    for number, span in spans(path):
        name = span.split()[0].partition("::")[0]
        if re.fullmatch(r"[\w-]+\.(rs|cuh?|[ch]pp)", name) and name not in words(*SOURCES):
            yield number, f"there is no file {name} in this tree; name one that exists"
        # An upper-case word is a placeholder for a name that the reader chooses.
        if not PATH.fullmatch(name) or re.search(r"\b[A-Z]{2,}\b", name.replace("README", "")):
            continue
        for one in expanded(name):
            if not (any(ROOT.glob(one.rstrip("/"))) if "*" in one else (ROOT / one).exists()):
                yield number, f"there is no {one}; name a path that exists"


def dead_links(path: Path) -> Problems:
    for number, line, fenced in lines(path):
        for found in [] if fenced else LINK.finditer(CODE.sub("", line)):
            target = found[1] or found[2]
            file, _, anchor = target.partition("#")
            to = (path.parent / file).resolve() if file else path
            if re.match(r"[a-z]+:", target):
                continue
            if not to.exists():
                yield number, f"the link to {target} leads nowhere; there is no such file"
            elif anchor and anchor not in anchors(to):
                yield number, f"{file or 'this page'} has no heading #{anchor}; it has {sorted(anchors(to))}"


def settings(code: str) -> Iterator[str]:
    """`SYMM_*` variables that the code names and nothing reads."""
    for name in re.findall(r"\bSYMM_[A-Z0-9_]+[A-Z0-9]", code):
        if name not in words("src", "python", "tests"):
            yield f"nothing reads {name}; src/config.rs has the settings"


def targets(code: str) -> Iterator[str]:
    """`make` targets that do not exist."""
    known = {
        name for line in re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.M) for name in line.split()
    }
    for name in re.findall(r"(?:^|[\s(])make ([a-z][\w-]*)", code):
        if name not in known:
            yield f"the Makefile has no target {name}"


def modules(code: str) -> Iterator[str]:
    """Programs of the package or of the tests that do not exist, and their options."""
    code = re.sub(r"^torch-symm (?=[a-z]+(?: -|$))", "python -m torch_symm ", code)
    for name, rest in re.findall(r"python3? (-m torch_symm[\w.]*|tests(?:/\w+)+)([^&|;]*)", code):
        folder = "python/" + name[3:].replace(".", "/") if name.startswith("-m") else name
        if not (ROOT / folder / "__main__.py").exists() and not (ROOT / f"{folder}.py").exists():
            yield f"`python {name}` is no program; there is no {folder}/__main__.py"
            continue
        text = sources("python/torch_symm" if name.startswith("-m") else folder)
        if name == "-m torch_symm" and (command := re.match(r" (\w+)", rest)) and f'"{command[1]}"' not in text:
            yield f"`python -m torch_symm` has no command {command[1]}"
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest):
            if f'"{option}"' not in text:
                yield f"`python {name}` has no option {option}"


def cargo(code: str) -> Iterator[str]:
    """Tests and benchmarks of cargo that do not exist."""
    for kind, name in re.findall(r"--(test|bench) (\w+)", code if "cargo" in code else ""):
        folder = ROOT / ("tests" if kind == "test" else "benches")
        if not (folder / f"{name}.rs").exists() and not (folder / name / "main.rs").exists():
            yield f"cargo has no --{kind} {name}"


def package(code: str) -> Iterator[str]:
    """Names of torch_symm that the package does not have."""
    for name in re.findall(r"\btorch_symm((?:\.\w+)+)", code):
        missing = [part for part in name.strip(".").split(".") if part not in words("python/torch_symm")]
        if missing:
            yield f"torch_symm{name}: the package has no {missing[0]}"


def missing_settings_and_commands(path: Path) -> Problems:
    checks: list[Callable[[str], Iterator[str]]] = [settings, targets, modules, cargo, package]
    yield from ((number, text) for number, code in commands(path) for check in checks for text in check(code))


def symbols(span: str) -> list[str]:
    """The parts of a piece of code that must occur in the sources: `Type`, `module::name`, `name()`, `snake_case`."""
    if "/" in span or ".py::" in span or re.search(r"\s(?!\w+\})", span):
        return []
    called = re.fullmatch(r"([\w:.]+)\([^()]*\)", span)
    plain = called[1] if called else span
    if "::" in plain:
        return re.findall(r"\w+", plain)
    if called:
        return [plain.split(".")[-1]]
    camel, snake = re.fullmatch(r"[A-Z]\w*[a-z]\w*", plain), re.fullmatch(r"[a-z]\w*_\w+", plain)
    return [plain] if camel or snake else []


def missing_symbols(path: Path) -> Problems:
    known = words(*SOURCES) | FOREIGN | set(dir(builtins))
    for number, span in spans(path) if path in documents("docs/design", "docs/glossary") else ():
        for name in symbols(span):
            if name not in known:
                yield number, f"`{span}`: no source has {name}; use the name that the code has"


@pytest.mark.parametrize(
    "check", [long_lines, missing_paths, dead_links, missing_settings_and_commands, missing_symbols]
)
def test_documents(check: Callable[[Path], Problems]) -> None:
    found = [f"{path.relative_to(ROOT)}:{number}: {text}" for path in documents() for number, text in check(path)]
    assert not found, "\n" + "\n".join(found)


def test_the_page_of_settings_is_complete() -> None:
    config = (ROOT / "src/config.rs").read_text()
    names = set(re.findall(r'"(SYMM_[A-Z0-9_]+)"', config[config.index("const SETTINGS") :].split("];", 1)[0]))
    page = (ROOT / "docs/guide/settings.md").read_text()
    listed = set(re.findall(r"^\| `(SYMM_[A-Z0-9_]+)", page, re.MULTILINE))
    assert len(names) > 10 and listed == names, listed ^ names
