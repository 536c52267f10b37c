# SPDX-License-Identifier: Apache-2.0
"""Values of a checkpoint that are not tensors: from the library's JSON to Python's values."""

from __future__ import annotations

import argparse
from typing import Any, Callable


class Opaque:
    """A value of a checkpoint that only code of its own could make. None of that code was run.

    Attributes:
        name: What the pickle calls the value: "module.Class", as text.
        state: The values that it kept, if they are known: a dict, or None.
    """

    def __init__(self, name: str, state: dict[str, Any] | None = None):
        self.name, self.state = name, state

    def __repr__(self):
        return f"<ckptfs.Opaque {self.name}>"

    def __eq__(self, other):
        return isinstance(other, Opaque) and (self.name, self.state) == (other.name, other.state)

    __hash__ = None  # type: ignore[assignment]  # as Python has it for what can be changed


MARKS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": bytes.fromhex,
    "$text": lambda v: bytes.fromhex(v).decode("utf-8", "surrogatepass"),
    "$tuple": lambda v: tuple(map(value, v)),
    "$dict": lambda v: {_key(k): value(x) for k, x in v},
}


def value(j):
    """Return a Python value for what ckpt_view_objects writes."""
    if isinstance(j, list):
        return [value(v) for v in j]
    if not isinstance(j, dict):
        return j
    mark = next(iter(j), "")
    if mark in MARKS:
        return MARKS[mark](j[mark])
    if mark != "$object":
        return {k: value(v) for k, v in j.items()}
    state = {k: value(v) for k, v in j["state"].items()} if "state" in j else None
    return (
        argparse.Namespace(**state)
        if j[mark] == "argparse.Namespace" and state is not None
        else Opaque(j[mark], state)
    )


def _key(j):
    """Return a value as a dict's key; one that can't be hashed is given by its text."""
    key = value(j)
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key


def is_open(v):
    """Return whether torch's distributed checkpoints look into this list, because it has dicts."""
    return isinstance(v, list) and any(isinstance(x, dict) or is_open(x) for x in v)


def flattened(objects):
    """Return the same values under the names that torch gives them since 2.4.

    Before, a list of dicts was one value.
    """
    out = {}

    def add(name, v):
        if isinstance(v, dict) or is_open(v):
            for key, x in v.items() if isinstance(v, dict) else enumerate(v):
                add(f"{name}.{key}", x)
        else:
            out[name] = v

    for name, v in objects.items():
        add(name, v)
    return out


def gathered(objects, name):
    """Return the dict or list of all "name.key", which distributed checkpoints have taken apart.

    Opaque("nothing") if there are no such names.
    """
    inside = {}
    for full, v in objects.items():
        if full.startswith(name + "."):
            at, keys = inside, full[len(name) + 1 :].split(".")
            for key in keys[:-1]:
                at = at.setdefault(key, {})
                if not isinstance(at, dict):
                    return Opaque("nothing")
            at[keys[-1]] = v
    return _with_lists(inside) if inside else Opaque("nothing")


def _with_lists(v):
    if not isinstance(v, dict):
        return v
    v = {k: _with_lists(x) for k, x in v.items()}
    return list(v.values()) if v and list(v) == [str(i) for i in range(len(v))] else v


def is_whole(v):
    """Return whether nothing in a value is opaque."""
    if isinstance(v, dict):
        return all(is_whole(x) for pair in v.items() for x in pair)
    if isinstance(v, (list, tuple)):
        return all(map(is_whole, v))
    if isinstance(v, argparse.Namespace):
        return is_whole(vars(v))
    return not isinstance(v, Opaque)
