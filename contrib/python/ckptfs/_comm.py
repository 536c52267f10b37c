# SPDX-License-Identifier: Apache-2.0
"""From a torch process group to a comm of libckptfs_load."""

import os
import socket
import sys
from ctypes import byref, c_char_p, c_void_p

from ._library import library, nccl_library, new, to_device

TIMEOUT_MS = 300 * 1000


def _own_address():
    """Under which address the others reach this machine: the one from which it would reach rank 0."""
    to = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.connect(address)  # sends nothing
            return s.getsockname()[0]
    except OSError:
        return "127.0.0.1"


class Comm:
    """The ranks that load together. `ranks`: {global rank: rank here}. `device`: the CUDA device that this rank's tensors are on, or None.
    If every rank has one, and the library for NCCL is there, loads go straight to device memory; else `device` is None: through the host."""

    def __init__(self, group=None, device=None):
        self._comm, self.group, self.device = None, None, device
        self._meshes = {}  # of torch: few, but every parameter has one
        dist = _distributed()
        if dist is None or (group is None and not dist.is_initialized()):
            self.rank, self.size, self.ranks = 0, 1, {0: 0}
        else:
            self.group = group if group is not None else dist.group.WORLD
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError("this process is not in process_group")
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            self.ranks = {g: i for i, g in enumerate(dist.get_process_group_ranks(self.group))}
        if device is not None and nccl_library() is None:
            self.device = None
        if self.size == 1:
            self._comm = new(library().comm_self)
        elif dist.get_backend(self.group) == "mpi" and self.group is dist.group.WORLD:
            self.device = None
            self._comm = new(library().comm_from_env)
        else:
            self._comm = self._tcp(dist)
        if self.device is not None:
            try:
                to_device(self._comm, self.device, _stream(self.device))
            except BaseException:
                self.close()
                raise

    def _tcp(self, dist):
        lib = library()
        tcp = new(lib.tcp_listen, _own_address().encode())
        told = [None] * self.size
        dist.all_gather_object(told, (lib.tcp_address(tcp).decode(), self.device is not None), group=self.group)
        if not all(has_device for _, has_device in told):
            self.device = None
        table = (c_char_p * self.size)(*[address.encode() for address, _ in told])
        comm = c_void_p()
        lib.tcp_connect(tcp, self.rank, self.size, table, TIMEOUT_MS, byref(comm))
        return comm

    def mesh(self, device_mesh):
        """A DeviceMesh's dimensions, and its ranks here. KeyError: one is not in the group."""
        if device_mesh not in self._meshes:
            mesh = device_mesh.mesh
            self._meshes[device_mesh] = (list(mesh.shape), [self.ranks[int(g)] for g in mesh.flatten().tolist()])
        return self._meshes[device_mesh]

    @property
    def handle(self):
        return self._comm

    def close(self):
        if self._comm:
            library().comm_free(self._comm)
        self._comm = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _stream(device):
    import torch
    return torch.cuda.current_stream(device).cuda_stream


def _distributed():
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    import torch.distributed as dist
    return dist if dist.is_available() else None
