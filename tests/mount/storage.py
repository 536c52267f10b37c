# SPDX-License-Identifier: Apache-2.0
"""A folder as storage at a distance (slow_fs.c), for tests and benchmarks."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time


class Storage:
    """Shown at `at`, until the end of the with statement; `counts` are its requests then. The latency is that of each request, the rate (bytes a second) that
    of all together. When it is to hang, it answers so many requests more."""

    def __init__(self, build, folder, latency_us=1000, rate=1e9, top=None, hang_after=0):
        self.at = tempfile.mkdtemp(dir=top)
        self.end_of_hang = None
        self.server = subprocess.Popen([os.path.join(build, "tests", "slow_fs"), folder, self.at, str(latency_us), str(rate), f"hang_after={hang_after}"], stdout=subprocess.PIPE)
        end = time.monotonic() + 30
        while not os.path.ismount(self.at):
            assert self.server.poll() is None and time.monotonic() < end
            time.sleep(0.01)

    def hang(self, seconds=90):
        """No request is answered any more, until go_on(), or at last after so many seconds: who waits cannot be killed."""
        self.server.send_signal(signal.SIGUSR1)
        self.end_of_hang = threading.Timer(seconds, self.go_on)
        self.end_of_hang.start()

    def go_on(self):
        if self.end_of_hang:
            self.end_of_hang.cancel()
        self.server.send_signal(signal.SIGUSR2)

    def unmount(self, seconds):
        """A process that was killed while it waited is gone for its parent before its files are closed: for so long, busy is no
        failure. 0: it is left to its processes, since something else has failed."""
        end = time.monotonic() + seconds
        while (done := subprocess.run(["fusermount3", "-u", self.at], capture_output=True, text=True)).returncode:
            if time.monotonic() > end:
                subprocess.run(["fusermount3", "-u", "-z", self.at], check=True)
                if seconds:
                    raise AssertionError(done.stderr)
                return
            time.sleep(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.go_on()
        try:
            self.unmount(0 if exc[0] else 10)
        except BaseException:
            self.server.terminate()
            raise
        self.counts = json.loads(self.server.communicate()[0])
        os.rmdir(self.at)
