# SPDX-License-Identifier: Apache-2.0
"""The few data structures of nanotron that ckptfs.nanotron uses, under nanotron's module names: nanotron is not on PyPI. Written from the description
of its format and of its published classes: NanotronParameter with sharded and tied information, slice pairs and their text, TensorMetadata."""

import dataclasses
import re
import sys
import types

import torch


@dataclasses.dataclass
class SlicesPair:
    local_slices: tuple
    global_slices: tuple


@dataclasses.dataclass
class ShardedInfo:
    global_ranks: tuple
    local_global_slices_pairs: tuple
    unsharded_shape: tuple


@dataclasses.dataclass
class TiedInfo:
    name: str
    root_module: torch.nn.Module

    def get_full_name_from_module_id_to_prefix(self, module_id_to_prefix):
        return module_id_to_prefix[id(self.root_module)] + self.name


class NanotronParameter(torch.nn.Parameter):
    def __new__(cls, tensor, requires_grad=True):
        new = torch.nn.Parameter.__new__(cls, tensor.detach(), requires_grad)
        new.sharded = new.tied = None
        return new

    def mark_as_sharded(self, global_ranks, local_global_slices_pairs, unsharded_shape):
        self.sharded = ShardedInfo(global_ranks, local_global_slices_pairs, unsharded_shape)

    def mark_as_tied(self, name, root_module):
        self.tied = TiedInfo(name, root_module)

    is_sharded = property(lambda self: self.sharded is not None)
    is_tied = property(lambda self: self.tied is not None)

    def get_sharded_info(self):
        return self.sharded

    def get_tied_info(self):
        return self.tied


def slices(text):
    """A tuple of slices: "0,16,None|None,None,None"."""
    return tuple(slice(*[None if bound == "None" else int(bound) for bound in part.split(",")]) for part in text.split("|"))


def pairs(text):
    return tuple(SlicesPair(*map(slices, pair.split("#"))) for pair in text.split(";"))


@dataclasses.dataclass
class TensorMetadata:
    version: str
    local_global_slices_pairs: tuple
    unsharded_shape: tuple

    @classmethod
    def from_str_dict(cls, texts):
        assert set(texts) == {"version", "local_global_slices_pairs", "unsharded_shape"}, texts
        shape = re.sub(r"np\.int\d+\((\d+)\)", r"\1", texts["unsharded_shape"])
        return cls(texts["version"], pairs(texts["local_global_slices_pairs"]), tuple(int(n) for n in re.findall(r"\d+", shape)))


class ParallelContext:
    """Ranks in nanotron's order: of consecutive ones tp varies fastest, then dp, then pp."""

    def __init__(self, tp, pp, dp):
        import torch.distributed as dist
        self.world_pg, me = dist.group.WORLD, dist.get_rank()
        ranks = torch.arange(tp * pp * dp).reshape(pp, dp, tp)
        assert ranks.numel() == dist.get_world_size()
        self.pp_rank, _, self.tp_rank = (int(i) for i in (ranks == me).nonzero()[0])
        self.tp_pg = self._mine(dist, ranks.reshape(-1, tp), me)
        self.pp_pg = self._mine(dist, ranks.permute(1, 2, 0).reshape(-1, pp), me)

    @staticmethod
    def _mine(dist, rows, me):
        groups = [(row, dist.new_group(row)) for row in rows.tolist()]
        return next(group for row, group in groups if me in row)


def install():
    """Make them importable as nanotron's."""
    modules = {"nanotron": {}, "nanotron.parallel": {}, "nanotron.parallel.parameters": {"NanotronParameter": NanotronParameter, "SlicesPair": SlicesPair},
               "nanotron.serialize": {}, "nanotron.serialize.metadata": {"TensorMetadata": TensorMetadata}}
    for name, content in modules.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
