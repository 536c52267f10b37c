#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the lint of includes must find."""
import os
import tempfile
import unittest

import layers


class Arrows(unittest.TestCase):
    def test_wants_know_no_plan_and_plans_no_engine(self):
        self.assertTrue(layers.core_allows("core/load/plan/a.c", '"', "load/want/b.h"))
        self.assertTrue(layers.core_allows("core/load/engine/a.c", '"', "load/load_inner.h"))
        self.assertFalse(layers.core_allows("core/load/want/a.c", '"', "load/plan/b.h"))
        self.assertFalse(layers.core_allows("core/load/plan/a.c", '"', "load/engine/b.h"))
        self.assertFalse(layers.core_allows("core/load/plan/a.c", '"', "load/load_inner.h"))


class Circles(unittest.TestCase):
    def circles(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, includes in files.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w") as f:
                    f.write("".join(f'#include "{name}"\n' for name in includes))
            os.makedirs(os.path.join(root, "fs"), exist_ok=True)
            return {tuple(sorted(c)) for c in layers.circles(layers.modules(root))}

    def test_two_modules_that_include_each_other(self):
        self.assertEqual(self.circles({"core/base/a.h": [], "core/base/a.c": ["base/a.h", "base/b.h"],
                                       "core/base/b.h": ["base/a.h"]}), {("core/base/a", "core/base/b")})

    def test_a_circle_of_three_in_fs(self):
        self.assertEqual(self.circles({"fs/a.h": [], "fs/b.h": [], "fs/c.h": [], "fs/a.c": ["b.h"], "fs/b.c": ["c.h"],
                                       "fs/c.c": ["a.h", "base/x.h"], "core/base/x.h": []}), {("fs/a", "fs/b", "fs/c")})

    def test_a_source_and_its_header_are_one_module(self):
        self.assertEqual(self.circles({"core/base/a.h": [], "core/base/a.c": ["base/a.h"], "core/base/b.c": ["base/a.h"]}), set())

    def test_a_circle_is_an_error(self):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "core/base"))
            for name, other in ("ab", "ba"):
                with open(os.path.join(root, f"core/base/{name}.h"), "w") as f:
                    f.write(f'#include "base/{other}.h"\n')
            text = "\n".join(layers.check_circles(root))
        self.assertIn("in a circle: core/base/a, core/base/b", text)

    def test_functions_in_a_circle_are_an_error_although_no_header_is(self):
        one = {a: {b for b in circle if b != a} for circle in layers.ONE_MODULE for a in circle}
        self.assertEqual(list(layers.check_symbols(one)), [])
        text = "\n".join(layers.check_symbols({**one, "comm/a": {"comm/b"}, "comm/b": {"comm/a"}}))
        self.assertEqual(text, "these need each other's functions in a circle: comm/a, comm/b")

    def test_a_circle_that_is_gone_leaves_the_list(self):
        gone, *left = layers.ONE_MODULE
        text = "\n".join(layers.check_symbols({a: {b for b in circle if b != a} for circle in left for a in circle}))
        self.assertIn("correct the list, which has " + ", ".join(sorted(gone)), text)


if __name__ == "__main__":
    unittest.main()
