#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every extern declaration has a comment, no comment begins with a word that seldom begins a sentence, and no line of a
document is longer than 120 columns: words.py SOURCE_DIR

Rows of tables, which Markdown cannot break, may be longer.

A comment's first sentence has a subject and a verb. One that begins with "Of", "As", "What" or "The same" hardly ever
has, so no comment in core, fs and include may begin so, not even if it is a whole sentence.

A declaration is a function or a variable in a header, at the left margin. Its comment stands before it, on its own line or
lines, or behind it. Declarations that follow each other without an empty line share the comment before the first one.
"""
import glob
import os
import re
import sys

COLUMNS = 120
COMMENT = re.compile(r"/\*.*?\*/", re.S)
LITERAL_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|" + COMMENT.pattern, re.S)
FRAGMENT = re.compile(r"/\*[*\s]*(Of|As|What|The\s[*\s]*same)\b")
EXTERN = re.compile(r"(?!typedef\b|static\b|CKPT_VEC\b)(extern .*|\w[^{}=]*\(.*\));")


def chunks(text):
    """Groups, which empty lines separate, of statements at the left margin: (line number, code, whether it has a comment).
    A comment on lines of its own is a statement without code."""
    blank = COMMENT.sub(lambda m: "\n".join("\1" * len(p) for p in m.group().split("\n")), text)
    group, statement, start = [], "", 0
    for number, line in enumerate(blank.split("\n") + [""], 1):
        if statement:
            statement += " " + line.strip()
        elif line.strip() == "":
            if group:
                yield group
            group = []
            continue
        else:
            statement, start = line, number
        if statement.startswith("#"):
            if not statement.endswith("\\"):
                statement = ""
            continue
        code = statement.replace("\1", "").strip()
        if code == "" or (code.endswith((";", "}")) and code.count("{") == code.count("}")):
            group.append((start, code, "\1" in statement))
            statement = ""


def undocumented(text):
    """Line numbers of extern declarations without a comment."""
    for group in chunks(text):
        covered = False
        for number, code, comment in group:
            covered = covered or comment
            if EXTERN.fullmatch(code) and not covered:
                yield number
            if code.endswith("};"):
                covered = False


def fragments(text):
    """(line number, word) of comments whose first sentence begins with a word that seldom begins one."""
    for found in LITERAL_OR_COMMENT.finditer(text):
        begins = FRAGMENT.match(found.group())
        if begins:
            yield text.count("\n", 0, found.start()) + 1, re.sub(r"[*\s]+", " ", begins.group(1))


def sources(root):
    for top in ("include", "core", "fs"):
        for folder, dirs, files in os.walk(os.path.join(root, top)):
            dirs.sort()
            for name in sorted(files):
                if name.endswith((".c", ".h")):
                    yield os.path.relpath(os.path.join(folder, name), root)


def documents(root):
    for pattern in ("README.md", "contrib/*.md", "contrib/docs/**/*.md"):
        for path in sorted(glob.glob(os.path.join(root, pattern), recursive=True)):
            yield os.path.relpath(path, root)


def check(root):
    for path in sources(root):
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        for number in undocumented(text) if path.endswith(".h") else ():
            yield "%s:%d: an extern declaration without a comment" % (path, number)
        for number, word in fragments(text):
            yield "%s:%d: a comment begins with \"%s\": begin with a subject and a verb" % (path, number, word)
    for path in documents(root):
        with open(os.path.join(root, path), encoding="utf-8") as f:
            for number, line in enumerate(f.read().split("\n"), 1):
                if len(line) > COLUMNS and not line.startswith("|"):
                    yield "%s:%d: %d columns, at most %d" % (path, number, len(line), COLUMNS)


def main():
    bad = list(check(sys.argv[1]))
    print("\n".join(bad) if bad else "every extern declaration has a comment, none begins with a fragment's word, "
          "no document is wider than %d columns" % COLUMNS)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
