# SPDX-License-Identifier: Apache-2.0
"""The interface of vLLM that ckptfs.vllm uses, under vLLM's module names: its registry of load formats, BaseModelLoader, the plug-in entry points and
the world group. It is written from its published sources."""

import abc
import sys
import types
from types import SimpleNamespace

import torch

FORMATS = {}


class BaseModelLoader(abc.ABC):
    def __init__(self, load_config):
        self.load_config = load_config

    @abc.abstractmethod
    def download_model(self, model_config):
        ...

    @abc.abstractmethod
    def load_weights(self, model, model_config):
        ...

    def load_model(self, vllm_config, model_config, prefix=""):
        model = vllm_config.make_model()
        self.load_weights(model, model_config)
        return model.eval()


def register_model_loader(load_format):
    def register(cls):
        if not issubclass(cls, BaseModelLoader):
            raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
        FORMATS[load_format] = cls
        return cls
    return register


def get_model_loader(load_config):
    return FORMATS[load_config.load_format](load_config)


def load_config(**extra):
    return SimpleNamespace(load_format="ckptfs", model_loader_extra_config=extra)


def get_world_group():
    return SimpleNamespace(cpu_group=torch.distributed.group.WORLD)


def load_general_plugins(entry_points):
    """What vLLM does with the entry points of its group, in each process, and perhaps more than once."""
    for point in entry_points:
        point.load()()


def install():
    """Make them importable as vLLM's."""
    modules = {"vllm": {}, "vllm.distributed": {"get_world_group": get_world_group}, "vllm.model_executor": {},
               "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader, "get_model_loader": get_model_loader},
               "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader}}
    for name, content in modules.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
