"""Tables in README.md and pages of docs, made of the committed files in benchmarks/results, and
pictures in docs/images.

    python benchmarks/tables.py            # writes them between the markers <!-- table: NAME -->
    and <!-- end of table --> python benchmarks/tables.py --check    # only says which page is not
    what the files make, with exit code 1

What has not been measured has no row, column or cell. Every ratio is "times as fast": that of a
contender's speed to the first column's, in the same run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gpu_results
import peers
from report import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/planning.md",
    "docs/growth.md",
    "docs/step.md",
)
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns in which no row has anything."""
    kept = [
        column for column in range(len(header)) if column == 0 or any(row[column] for row in rows)
    ]
    lines = [
        [header[column] for column in kept],
        ["---"] * len(kept),
        *([row[column] for column in kept] for row in rows),
    ]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines
    )


def shown(tables: Sequence[peers.Table], source: str = "") -> list[str]:
    return [f"{title}{source}:\n\n{markdown(header, rows)}" for title, header, rows in tables]


def gpu(folder: Path) -> str:
    """All of `gpu_workers.py`, machine by machine, with pictures."""
    parts = []
    for machine, files in gpu_results.machines(folder).items():
        made = shown(gpu_results.tables(machine, files))
        pictures = [("steps", "Times as fast as DDP by hand")]
        if any(
            "efficiency" in row
            for case in gpu_results.cases_of(files)
            for row in case["contenders"].values()
        ):
            pictures.append(("scaling", "Efficiency on several GPUs"))
        parts += [
            made[0],
            *(
                f"![{title}, {machine}](images/{gpu_results.picture(what, machine)})\n"
                for what, title in pictures
            ),
            *made[1:],
        ]
    return "\n".join(parts)


def readme(folder: Path) -> str:
    header = [
        "",
        "where",
        "by hand",
        "by hand, compiled",
        "allhands",
        "allhands, compiled",
        "Lightning",
        "Accelerate",
    ]
    rows = [*gpu_results.for_readme(folder), *peers.for_readme(folder)]
    return markdown(
        header,
        [
            [*row[:2], *("" if ratio is None else f"{ratio:.2f}" for ratio in row[2:])]
            for row in rows
        ],
    )


def section(patterns: str) -> Callable[[Path], str]:
    """A table or more for each file of results of these names."""

    def make(folder: Path) -> str:
        parts = []
        for path in (path for pattern in patterns.split() for path in sorted(folder.glob(pattern))):
            parts += shown(
                peers.tables(path.stem, json.loads(path.read_text())),
                f" (`benchmarks/results/{path.name}`)",
            )
        return "\n".join(parts)

    return make


TABLES: dict[str, Callable[[Path], str]] = {
    "readme": readme,
    "gpu": gpu,
    "gpt": section("gpt_parallel*.json"),
    "library": section("library_models_*.json"),
    "step": section("step_overhead_*.json launch.json"),
    "growth": section("growth.json"),
    "kvstore": section("kvstore*.json"),
    "mpi": section("mpi_allreduce_*.json"),
    "planning": section("planning.json"),
    "links": section("planning_links.json"),
    "card": section("planning_card.json"),
    "horovod": section("horovod_[0-9]*.json horovod_h*.json horovod_tensorflow*.json"),
    "federated": section(
        "federated_h[0-9][0-9][0-9].json federated_devices.json federated_peers.json "
        "federated_sites.json coala_tutorial.json"
    ),
}


def filled(text: str, folder: Path) -> str:
    """A page's text with its tables as the files make them."""
    return MARKED.sub(
        lambda found: f"{found[1]}\n{TABLES[found[2]](folder).strip()}\n\n{found[3]}", text
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    args = parser.parse_args()
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        made = filled(text, args.results)
        if made != text:
            stale.append(name)
            if not args.check:
                page.write_text(made)
    if args.check:
        if stale:
            sys.exit(
                f"not what {args.results.name} makes: {', '.join(stale)}; run python "
                "benchmarks/tables.py"
            )
        return
    import pictures

    drawn = pictures.draw(args.results, ROOT / "docs" / "images")
    print("written:", ", ".join([*stale, *drawn]) or "nothing has changed")


if __name__ == "__main__":
    main()
