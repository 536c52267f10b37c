#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the lint of comments and columns must find."""
import os
import tempfile
import unittest

import words


class Declarations(unittest.TestCase):
    def lines(self, text):
        return list(words.undocumented(text))

    def test_a_function_without_a_comment(self):
        self.assertEqual(self.lines("int f(int a);\n"), [1])

    def test_a_function_of_two_lines(self):
        self.assertEqual(self.lines("int f(int a,\n      int b);\n\nint g(void);\n"), [1, 4])

    def test_a_variable(self):
        self.assertEqual(self.lines("extern const char name[];\n"), [1])

    def test_a_comment_before_or_behind(self):
        self.assertEqual(self.lines("/* Does f. */\nint f(int a);\n\nint g(void); /* does g */\n"), [])

    def test_a_group_shares_its_comment(self):
        self.assertEqual(self.lines("/* Both. */\nint f(int a);\nint g(void);\n\nint h(void);\n"), [5])

    def test_a_comment_before_a_type_is_the_type_s(self):
        self.assertEqual(self.lines("/* A pair. */\nstruct s {\n    int a; /* one */\n};\nint f(struct s *s);\n"), [5])

    def test_types_static_functions_and_macros_need_none(self):
        self.assertEqual(self.lines("#define M(x) \\\n    f(x);\nstruct s;\ntypedef int fn(void);\n"
                                    "static inline int f(int a)\n{\n    return g(a);\n}\n"), [])


class Comments(unittest.TestCase):
    def lines(self, text):
        return list(words.fragments(text))

    def test_a_comment_that_begins_with_no_sentence(self):
        self.assertEqual(self.lines("/* Of this rank: */\nint a; /* As b. */\n/*\n * What a\n * tells. */\n"
                                    "/* The\n * same. */\n"), [(1, "Of"), (2, "As"), (3, "What"), (6, "The same")])

    def test_other_beginnings(self):
        self.assertEqual(self.lines("/* Often a. As b. */\n/* The sameness of a is b. */\nint a; /* of a */\n"), [])

    def test_text_is_no_comment(self):
        self.assertEqual(self.lines("f(\"/* As a */\", '\"'); /* Says \"As a\". */\ng(\"a/*\"); /* As b. */\n"),
                         [(2, "As")])

    def test_files(self):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "core"))
            for name in ("a.c", "a.h", "a.py"):
                with open(os.path.join(root, "core", name), "w") as f:
                    f.write("\n/* As b. */\n")
            self.assertEqual([line.split(": ")[0] for line in words.check(root)], ["core/a.c:2", "core/a.h:2"])


class Documents(unittest.TestCase):
    def test_a_wide_line(self):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "contrib"))
            for name, width in (("README.md", 121), ("contrib/A.md", 120)):
                with open(os.path.join(root, name), "w") as f:
                    f.write("short\n" + "x" * width + "\n| " + "x" * width + " |\n")
            self.assertEqual(list(words.check(root)), ["README.md:2: 121 columns, at most 120"])


if __name__ == "__main__":
    unittest.main()
