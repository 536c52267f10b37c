# SPDX-License-Identifier: Apache-2.0
"""The figures of a benchmark as JSON, which plot.py draws: [{"title", "unit", "rows": [{"name", "values": [one for each round], "ours"}]}]."""

import json


def add_option(parser):
    parser.add_argument("--json", metavar="FILE", help="write the figures of all rounds there; plot.py makes a picture of them")


def chart(title, unit, values, ours):
    """values: {name: numbers, one for each round}; ours: is the one of that name ckptfs?"""
    return {"title": title, "unit": unit, "rows": [{"name": name, "values": list(numbers), "ours": ours(name)} for name, numbers in values.items() if numbers]}


def write(path, charts):
    """Nothing is written without a path."""
    if path:
        with open(path, "w", encoding="utf-8") as f:
            json.dump(charts, f, indent=1)
            f.write("\n")
