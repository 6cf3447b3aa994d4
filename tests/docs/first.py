"""The first result of README.md and the tutorial; ``python -m tests.docs.first`` writes it."""

import re
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill

from rich.console import Console

import fedapp
from fedapp.arguments import parse_overrides
from fedapp.home import app_folder
from fedapp.report.summary import headline, score_rows, score_table

PAGES = ("README.md", "docs/tutorials/two-commands.md")
BLOCK = re.compile(r"(?<=```text\n)\w+ organisations together: .*?(?=```)", re.DOTALL)


def printed():
    """The sentence, and the scores of the test rows, of what ``make run`` trains."""
    line = re.search(r"^FIRST := pax --data (.*)$", (app_folder() / "Makefile").read_text(), re.M)
    assert line
    data, *words = line[1].split()
    settings = parse_overrides([word for word in words if word != "-c"])
    named = {name.replace("-", "_"): value for name, value in settings.items()}
    with TemporaryDirectory() as folder:
        run = fedapp.run("pax", data=data, baselines=True, run_dir=f"{folder}/run", **named)
        summary = run.summary
    console = Console(file=StringIO(), width=100, color_system=None)
    console.print(score_table([row for row in score_rows(summary) if row[0][1] == "test"]))
    table = [text.rstrip() for text in console.file.getvalue().splitlines()]
    return "\n".join([fill(headline(summary), 100), "...", *table, ""])


def main():
    """Write the result into the pages."""
    block = printed()
    for page in (Path(app_folder(), name) for name in PAGES):
        page.write_text(BLOCK.sub(lambda _: block, page.read_text()))


if __name__ == "__main__":
    main()
