#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A picture of a benchmark's figures: a bar for each row's median, a line from its least to its greatest value.

usage: tests/bench/plot.py FIGURES.json [...] > PICTURE.svg

FIGURES.json is what a benchmark wrote with --json (figures.py). Its charts are drawn one below the other, each on a scale of its own."""

import json
import statistics
import sys
from html import escape

LEFT, WIDE, RIGHT, ROW, GAP = 250, 380, 110, 24, 46
OURS, OTHERS, INK = "#2166ac", "#b0b0b0", "#222222"


def draw(figures, top, out):
    """Append the elements of one chart, whose top is at `top`; return where it ends."""
    rows = figures["rows"]
    most = max((max(r["values"]) for r in rows), default=0) or 1
    out.append(f'<text x="10" y="{top + 20}" font-weight="bold">{escape(figures["title"])}</text>')
    for i, row in enumerate(rows):
        y, middle = top + 34 + i * ROW, statistics.median(row["values"])
        low, high = (LEFT + WIDE * v / most for v in (min(row["values"]), max(row["values"])))
        out.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(row["name"])}</text>')
        out.append(f'<rect x="{LEFT}" y="{y + 2}" width="{WIDE * middle / most:.1f}" height="{ROW - 8}" fill="{OURS if row["ours"] else OTHERS}"/>')
        if high > low:
            out.append(f'<line x1="{low:.1f}" y1="{y + ROW / 2 - 2}" x2="{high:.1f}" y2="{y + ROW / 2 - 2}" stroke="{INK}"/>')
        out.append(f'<text x="{LEFT + WIDE + 8}" y="{y + 14}">{middle:.3g} {escape(figures["unit"])}</text>')
    return top + GAP + len(rows) * ROW


def picture(charts):
    out, top = [], 0
    for figures in charts:
        top = draw(figures, top, out)
    wide = LEFT + WIDE + RIGHT
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{top}" viewBox="0 0 {wide} {top}" font-family="sans-serif" '
            f'font-size="13" fill="{INK}">')
    return "\n".join([head, f'<rect width="{wide}" height="{top}" fill="#ffffff"/>', *out, "</svg>"])


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    charts = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as f:
            charts += json.load(f)
    print(picture(charts))


if __name__ == "__main__":
    main()
