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
