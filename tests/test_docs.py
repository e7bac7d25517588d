"""The documentation: code that runs or at least compiles, links that lead somewhere, claims that
are kept."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from allhands.config import read_run
from tests import page_blocks

pytestmark = pytest.mark.usefixtures("forked_python")

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The code of all fenced blocks of a language, without their indentation."""
    return [
        textwrap.dedent(text)
        for _, kind, text in FENCE.findall(page.read_text())
        if kind == language
    ]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.serial
def test_the_first_examples_run_as_shown(tmp_path):
    code = "\n".join(blocks(ROOT / "README.md", "python"))
    (tmp_path / "first.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "first.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        # One worker a core: with 32 of them, five epochs have too few steps.
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = float(re.search(r"validation accuracy: (\S+)", done.stdout)[1])
    assert accuracy > 0.9, done.stdout
    assert float(re.search(r"validation loss: (\S+)", done.stdout)[1]) < 0.5, done.stdout


def test_the_first_examples_are_the_same():
    assert blocks(ROOT / "README.md", "python") == blocks(ROOT / "docs" / "index.md", "python")


def test_files_and_layers_that_the_architecture_names_exist():
    source, pyproject = ROOT / "src" / "allhands", (ROOT / "pyproject.toml").read_text()
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", page)
    assert len(paths) > 25
    assert [path for path in paths if not (source / path).exists()] == []
    (shown,) = blocks(ROOT / "docs" / "idea.md", "text")
    layers = re.findall(r'^    "([^"]+)",$', pyproject.split("layers = [")[1].split("]")[0], re.M)
    assert [set(re.split(r"\W+", line.split("  ")[0])) for line in shown.splitlines()] == [
        set(re.findall(r"allhands\.(\w+)", layer)) for layer in layers
    ]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_blocks_compile(page):
    for code in blocks(page, "python"):
        ast.parse(code)  # raises SyntaxError with the line


@pytest.fixture(scope="module")
def blocks_run():
    """What became of the blocks of each page, run in one process (see `tests.page_blocks`)."""
    environ = os.environ.copy()
    shared = ROOT.parent / "shared" / "data"
    if shared.is_dir():
        environ.setdefault("ALLHANDS_DATA", str(shared))
    done = subprocess.run(
        [sys.executable, "-m", "tests.page_blocks"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=800,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["page"]: line["error"] for line in lines}, done.stderr


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page_blocks.run_here(page)], ids=named)
def test_the_blocks_of_a_page_run(page, blocks_run):
    errors, stderr = blocks_run
    assert named(page) in errors, f"the process that runs the pages ended before: {stderr[-3000:]}"
    assert errors[named(page)] is None, errors[named(page)]


def test_every_block_runs_here_or_somewhere_that_is_named():
    used = {
        page_blocks.elsewhere(page, kind, titled)
        for page in PAGES
        for kind, titled, _ in page_blocks.blocks(page)
    }
    assert used - {None} == page_blocks.ELSEWHERE.keys()
    for where in page_blocks.ELSEWHERE.values():
        for path in re.findall(r"tests/[\w/]+(?:\.py)?", where):
            assert (ROOT / path).exists(), where
    names = {named(page) for page in PAGES}
    assert {*page_blocks.PRELUDES, *page_blocks.AFTERWARDS} <= names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{named(page)} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), (
                f"{named(page)} links to {target}, which has no such heading"
            )


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_exist(page):
    """Paths in backticks below a folder of this repository."""
    for path in re.findall(
        r"`((?:src|tests|examples|benchmarks|docs)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{named(page)} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_make_targets_that_are_named_exist(page):
    targets = set(
        re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    )
    text = page.read_text()
    mentioned = set(re.findall(r"`make (\w+)", text)) | set(
        re.findall(r"^make (\w+)", "\n".join(blocks(page, "bash")), re.MULTILINE)
    )
    assert mentioned <= targets


def test_ci_runs_what_the_readme_says():
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert last.endswith("make --jobs=2 --keep-going lint test")


def test_the_run_file_of_the_example_is_valid():
    config = read_run([ROOT / "examples" / "digits" / "run.yml"]).config
    assert (config.data.name, config.workers, config.strategy.name) == ("digits", 2, "ddp")


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_pages_show_are_there(page):
    """A formatter takes the line for code, in a block that it formats."""
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("--8"):
            shown = re.fullmatch(r'--8<-- "([^"]+)"', line)
            assert shown, f"{named(page)}: {line}"
            assert (ROOT / shown[1]).is_file(), line
