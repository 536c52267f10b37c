# SPDX-License-Identifier: Apache-2.0
"""A folder as storage at a distance (slow_fs.c), for tests and benchmarks."""

import json
import os
import subprocess
import tempfile
import time


class Storage:
    """Shown at `at`, until the end of the with statement; `counts` are its requests then. The latency is that of each request, the rate (bytes a second) that
    of all together."""

    def __init__(self, build, folder, latency_us=1000, rate=1e9, top=None):
        self.at = tempfile.mkdtemp(dir=top)
        self.server = subprocess.Popen([os.path.join(build, "tests", "slow_fs"), folder, self.at, str(latency_us), str(rate)], stdout=subprocess.PIPE)
        end = time.monotonic() + 30
        while not os.path.ismount(self.at):
            assert self.server.poll() is None and time.monotonic() < end
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["fusermount3", "-u", self.at], check=True)
        self.counts = json.loads(self.server.communicate()[0])
        os.rmdir(self.at)
