#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A long run, by hand: one daemon for each format, a writer that adds, rotates and saves steps again, readers that know what each save
holds; and what the daemons use over time. Nothing may grow, and no read may mix two saves.

usage: tests/mount/soak.py [--hours 6] [--every SECONDS] [--pause SECONDS] [--svg FILE] [--json FILE] [FORMAT ...]

Every line of the JSON is {"format", "s", "rss_kib", "fds", "threads", "waiting", "reads"}; the SVG plots them. The status is 1 if a read
was mixed, or if in the last quarter a daemon has on average more than in the second one: by 4 MiB, 8 descriptors or 2 threads."""

import argparse
import json
import os
import statistics
import sys
import threading
import time

from mountlib import CKPTFS, Case, Mount, need_fuse
from test_resave import FORMATS, Readers, Writer, make_saves

LIMITS = {"rss_kib": 4096, "fds": 8, "threads": 2}
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def usage_of(pid, mnt):
    with open(f"/proc/{pid}/status") as f:
        status = dict(line.split(":", 1) for line in f)
    try:
        with open(os.path.join(mnt, ".ckptfs", "stats.json")) as f:
            waiting = json.load(f).get("waiting", 0)
    except (OSError, ValueError):
        waiting = -1
    return {"rss_kib": int(status["VmRSS"].split()[0]), "fds": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"]), "waiting": waiting}


class Calm(Readers):
    """Readers with pauses, so that hours of them leave the machine usable."""

    pause = 0.2

    def loop(self, act, who):
        while not self.stop.wait(self.pause):
            act(who)


class Soak(Case):
    def runTest(self):
        pass


def soak(name, seconds, every, lines, bad):
    case, fmt = Soak(), FORMATS[name]
    case.setUp()
    try:
        saves = make_saves(fmt, os.path.join(case.tmp, "saves"))
        writer = Writer(fmt, saves, case.run_dir, seconds, 1)
        turn = writer.turn
        writer.turn = lambda: (turn(), time.sleep(1))
        readers = Calm(case, fmt, saves, case.run_dir)
        writer.add()
        writer.add()
        begin = time.monotonic()
        with Mount(case.run_dir, case.mnt, "-o", f"view={fmt.view}", program=CKPTFS) as m:
            readers.start()
            writer.start()
            while writer.is_alive():
                lines.append({"format": name, "s": round(time.monotonic() - begin), **usage_of(m.process.pid, case.mnt), "reads": sum(readers.seen.values())})
                writer.join(every)
            readers.end()
        bad += [f"{name}: {who} read {what}, which is no save" for who, what in readers.bad]
        if writer.failed:
            bad.append(f"{name}: the writer failed: {writer.failed}")
        print(f"{name}: saves {dict(writer.done)}, reads {dict(sorted(readers.seen.items()))}", flush=True)
    finally:
        case.doCleanups()


def growth(name, lines):
    """What the last quarter has more than the second, on average."""
    mine = [x for x in lines if x["format"] == name]
    n = len(mine) // 4
    return {key: statistics.mean(x[key] for x in mine[-n:]) - statistics.mean(x[key] for x in mine[n:2 * n]) for key in LIMITS} if n else {}


def plot(lines, path):
    """Four curves of every format, one below the other."""
    keys, wide, high = ("rss_kib", "fds", "threads", "waiting"), 900, 130
    end = max(x["s"] for x in lines) or 1
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 120}" height="{(high + 30) * len(keys) + 30}" font-family="sans-serif" font-size="12">']
    for row, key in enumerate(keys):
        top, most = 20 + row * (high + 30), max(max(x[key] for x in lines), 1)
        out.append(f'<text x="0" y="{top - 6}">{key}, at most {most}</text><rect x="0" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#aaa"/>')
        for color, name in zip(COLORS, dict.fromkeys(x["format"] for x in lines)):
            points = " ".join(f"{x['s'] / end * wide:.1f},{top + high - max(x[key], 0) / most * high:.1f}" for x in lines if x["format"] == name)
            out.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
    for i, (color, name) in enumerate(zip(COLORS, dict.fromkeys(x["format"] for x in lines))):
        out.append(f'<text x="{wide + 6}" y="{40 + 16 * i}" fill="{color}">{name}</text>')
    out.append(f'<text x="0" y="{(high + 30) * len(keys) + 20}">0 to {end / 3600:.1f} hours</text></svg>')
    with open(path, "w") as f:
        f.write("\n".join(out) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--hours", type=float, default=6)
    p.add_argument("--every", type=float, default=10)
    p.add_argument("--pause", type=float, default=Calm.pause, help="seconds between the reads of each reader")
    p.add_argument("--svg")
    p.add_argument("--json")
    p.add_argument("format", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    a = p.parse_args()
    a.format = a.format or list(FORMATS)
    need_fuse()
    Calm.pause = a.pause
    lines, bad = [], []
    threads = [threading.Thread(target=soak, args=(name, a.hours * 3600, a.every, lines, bad)) for name in a.format]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if a.json:
        with open(a.json, "w") as f:
            f.writelines(json.dumps(x) + "\n" for x in lines)
    if a.svg:
        plot(lines, a.svg)
    for name in a.format:
        grown = growth(name, lines)
        print(f"{name}: grown by {({k: round(v, 1) for k, v in grown.items()})}")
        bad += [f"{name}: {key} has grown by {grown[key]:.1f}" for key, most in LIMITS.items() if grown.get(key, 0) > most]
    print("\n".join(bad) or "good")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
