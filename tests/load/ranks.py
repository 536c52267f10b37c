# SPDX-License-Identifier: Apache-2.0
"""What a launcher tells ranks that run as processes of this machine."""

import os
import random
import socket

SLOW = float(os.environ.get("CKPTFS_SLOW", "1"))  # a sanitizer's build takes that much longer
PORTS = range(20000, 32000)  # below those that Linux gives to whoever connects


def free_port():
    """A port that nobody has, nor the next one."""
    while True:
        port = random.choice(PORTS)
        try:
            for p in (port, port + 1):
                socket.create_server(("127.0.0.1", p)).close()
            return port
        except OSError:
            pass


def launched(n, **more):
    """What the environment of each of a job's n ranks has more, but for RANK."""
    return {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CKPTFS_MEET_TIMEOUT": "60", **more}
