# SPDX-License-Identifier: Apache-2.0
"""Casts give torch's bits: all 16-bit inputs, many 32- and 64-bit ones around every boundary."""

import itertools
import os
import subprocess
import sys
import unittest

try:
    import numpy as np
    import torch
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

DUMP = os.path.join(os.environ.get("CKPTFS_BUILD", "build/dev"), "tests", "cast_dump")
TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
UINT = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32, "F64": np.uint64}
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def ours(bits, source, target, *how):
    command = [DUMP, source, target, *how]
    out = subprocess.run(command, input=bits.tobytes(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(out.stdout, dtype=UINT[target])


def theirs(bits, source, target):
    """torch's vector body: NaNs of its scalar tail differ, so there must be none."""
    n = len(bits)
    padded = np.concatenate([bits, np.zeros(-n % 4096, dtype=bits.dtype)])
    t = torch.from_numpy(padded.view(f"i{padded.itemsize}")).view(TYPES[source])
    r = t.to(TYPES[target])
    return r.view(SIGNED[r.element_size()]).numpy().view(UINT[target])[:n]


def samples(source):
    if source in ("F16", "BF16"):
        return np.arange(65536, dtype=np.uint32).astype(np.uint16)
    rng = np.random.default_rng(11)
    width = 8 * np.dtype(UINT[source]).itemsize
    parts = [rng.integers(0, 2**width, 1 << 20, dtype=UINT[source])]
    real = {"F32": np.float32, "F64": np.float64}[source]
    # Every 16-bit value, the midpoints between neighbours, and what lies next to both.
    for narrow in ("F16", "BF16"):
        t = torch.from_numpy(samples(narrow).view(np.int16)).view(TYPES[narrow])
        with np.errstate(all="ignore"):
            v = t.to(TYPES[source]).numpy()
            mid = ((v[:-1].astype(np.float64) + v[1:].astype(np.float64)) / 2).astype(real)
        for base in (v, mid):
            b = base.view(UINT[source])
            parts += [b, b + UINT[source](1), b - UINT[source](1)]
    if source == "F64":
        f = rng.integers(0, 2**32, 1 << 19, dtype=np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            b = f.astype(np.float64).view(np.uint64)
        # Midpoints of neighbouring floats and what lies next to them.
        parts += [b + np.uint64(k) for k in (0, 1 << 28, (1 << 28) + 1, (1 << 28) - 1)]
    nan = {
        "F32": [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF, 0x7F801FFF, 0x7F802000],
        "F64": [0x7FF0000000000001, 0x7FF8000000000000, 0xFFF0000000000001, 0xFFFFFFFFFFFFFFFF],
    }
    parts.append(np.array(nan[source], dtype=UINT[source]))
    return np.concatenate(parts)


def as_double(bits, dtype):
    t = torch.from_numpy(bits.copy().view(f"i{bits.itemsize}"))
    return t.view(TYPES[dtype]).double().numpy()


class Cast(unittest.TestCase):
    def check(self, source, target, how):
        bits = samples(source)
        got = ours(bits, source, target, *how)
        want = theirs(bits, source, target)
        bad = np.nonzero(got != want)[0]
        nans = np.isnan(as_double(bits, source))
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            bad = bad[~nans[bad]]
        self.assertEqual([(hex(bits[i]), hex(got[i]), hex(want[i])) for i in bad[:8]], [])
        self.assertTrue((np.isnan(as_double(got, target)) == nans).all())

    def test_all_pairs(self):
        for source, target in itertools.product(TYPES, TYPES):
            for how in ((), ("plain",)):
                with self.subTest(source=source, target=target, how=how):
                    self.check(source, target, how)


if __name__ == "__main__":
    unittest.main()
