"""A confusion matrix as a table: true classes by predicted ones, by their names."""

from __future__ import annotations

from collections.abc import Sequence

from fedapp.report.markup import Name, escaped, quiet, table, titled

MOST_CLASSES = 30  # of a whole matrix; of more, the pairs most often confused are listed
MOST_PAIRS = 20

Counts = Sequence[Sequence[float]]


def confusion_table(counts: Counts, classes: Sequence[str], caption: str) -> str:
    """Weights of rows by true class (rows) and predicted class (columns), shaded within a row."""
    if len(classes) > MOST_CLASSES:
        return _pairs(counts, classes, caption)
    head = "".join(f'<th class="n" scope="col">{titled(name, 12)}</th>' for name in classes)
    body = "\n".join(
        f'<tr><th scope="row">{titled(name, 12)}</th>{"".join(_cells(row, place))}</tr>'
        for place, (name, row) in enumerate(zip(classes, counts, strict=True))
    )
    corner = "<th>true \\ predicted</th>"
    return (
        f'<figure><div class="wide"><table class="matrix"><thead><tr>{corner}{head}'
        f"</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        f"<figcaption>{escaped(caption)}</figcaption></figure>\n"
    )


def _cells(row: Sequence[float], own: int) -> list[str]:
    """Cells of a true class: right ones blue, wrong ones red, the more the stronger."""
    total = sum(row)
    cells = []
    for place, weight in enumerate(row):
        share = weight / total if total else 0.0
        color = "blue" if place == own else "vermilion"
        shade = f"background: color-mix(in srgb, var(--{color}) {50 * share:.0f}%, transparent)"
        style = f' style="{shade}"' if weight else ""
        cells.append(f'<td class="n"{style} title="{share:.1%}">{weight:,.0f}</td>')
    return cells


def _pairs(counts: Counts, classes: Sequence[str], caption: str) -> str:
    """The pairs of classes that are confused most."""
    wrong = [
        (weight, weight / sum(row), classes[true], classes[guessed])
        for true, row in enumerate(counts)
        for guessed, weight in enumerate(row)
        if weight and true != guessed
    ]
    most = sorted(wrong, key=lambda each: each[0], reverse=True)[:MOST_PAIRS]
    rows = [
        [Name(true), Name(guessed), f"{weight:,.0f}", f"{share:.1%}"]
        for weight, share, true, guessed in most
    ]
    note = f"{caption}: the pairs most often confused of {len(classes)} classes"
    header = ["true", "predicted", "rows", "of the true class"]
    return table(header, rows, n_texts=2) + quiet(note) if rows else ""
