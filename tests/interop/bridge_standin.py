# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge needs to build and load models on a CPU under Python 3.11: import this first.

TransformerEngine's and mamba_ssm's modules have their parameters and extra states here (norms, too, as since TransformerEngine 2), but
compute nothing. Other libraries that are imported and not needed have classes that do nothing; CUDA's calls do nothing, either."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import itertools
import sys
import types
import typing

import torch
import torch.cuda.random
import typing_extensions

VERSION = {"transformer_engine": "2.11.0", "mamba_ssm": "2.2.5", "causal_conv1d": "1.5.0"}
NAMES = ("transformer_engine", "transformer_engine_torch", "mamba_ssm", "causal_conv1d", "fla", "modelopt", "nvidia_resiliency_ext", "diffusers", "datasets",
         "megatron.energon", "flash_attn", "wandb", "timm", "einops", "tensorboard", "torch.utils.tensorboard")


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def anything(name):
    members = {"__init__": lambda self, *a, **k: None, "__call__": lambda self, *a, **k: None, "__class_getitem__": classmethod(lambda c, k: c), "__module__": __name__}
    return Anything(name, (), members)


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, anything(name))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(tuple(f"{n}." for n in NAMES)) or name in NAMES else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__version__ = VERSION.get(module.__name__.split(".")[0], "2.8.0")
        vars(module).update(OWN.get(module.__name__, {}))
        parent, _, name = module.__name__.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], name, module)


# ---- modules with parameters ----


def parameter(dtype, *shape):
    return torch.nn.Parameter(torch.randn(*shape).to(dtype or torch.get_default_dtype()))


class Base(torch.nn.Module):
    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def set_tensor_parallel_group(self, group):
        self.tp_group = group

    def init_fp8_metadata(self, num_gemms=1):
        pass

    def set_sizes(self, inputs, outputs, tp_size, parallel_mode):
        self.in_features = inputs // tp_size if parallel_mode == "row" else inputs
        self.out_features = outputs // tp_size if parallel_mode == "column" else outputs
        self.tp_size, self.parallel_mode = tp_size, parallel_mode


class Linear(Base):
    def __init__(self, in_features, out_features, *, tp_size=1, bias=True, parallel_mode=None, params_dtype=None, **other):
        super().__init__()
        self.set_sizes(in_features, out_features, tp_size, parallel_mode)
        self.use_bias = bias
        self.weight = parameter(params_dtype, self.out_features, self.in_features)
        self.bias = parameter(params_dtype, self.out_features) if bias else torch.Tensor()
        for p in self.parameters():
            p.tensor_model_parallel = parallel_mode == "column" or (parallel_mode == "row" and p is self.weight)
            p.partition_dim, p.partition_stride = int(parallel_mode == "row"), 1


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, normalization="LayerNorm", params_dtype=None, **other):
        super().__init__(in_features, out_features, params_dtype=params_dtype, **other)
        self.normalization = normalization
        self.layer_norm_weight = parameter(params_dtype, in_features)
        self.layer_norm_bias = parameter(params_dtype, in_features) if normalization == "LayerNorm" else None


class GroupedLinear(Base):
    def __init__(self, num_gemms, in_features, out_features, *, tp_size=1, bias=True, parallel_mode=None, params_dtype=None, **other):
        super().__init__()
        self.set_sizes(in_features, out_features, tp_size, parallel_mode)
        self.num_gemms, self.use_bias, self.fp8_meta, self.fp8, self.fp8_calibration = num_gemms, bias, {"fp8_checkpoint": False}, False, False
        for i in range(num_gemms):
            setattr(self, f"weight{i}", parameter(params_dtype, self.out_features, self.in_features))
            if bias:
                setattr(self, f"bias{i}", parameter(params_dtype, self.out_features))


class RMSNorm(Base):
    def __init__(self, normalized_shape, params_dtype=None, **other):
        super().__init__()
        self.weight = parameter(params_dtype, normalized_shape)


class LayerNorm(RMSNorm):
    def __init__(self, normalized_shape, params_dtype=None, **other):
        super().__init__(normalized_shape, params_dtype)
        self.bias = parameter(params_dtype, normalized_shape)


class DotProductAttention(Base):
    def __init__(self, num_attention_heads=None, kv_channels=None, softmax_type="vanilla", tp_size=1, **other):
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = parameter(None, num_attention_heads // tp_size)


class GatedNorm(torch.nn.Module):
    def __init__(self, hidden_size, dtype=None, **other):
        super().__init__()
        self.weight = parameter(dtype, hidden_size)


class States:
    def __init__(self, *args, **kwargs):
        self.states_ = {}

    def reset(self):
        self.states_ = {}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        self.states_[name] = seed

    def fork(self, name=""):
        return contextlib.nullcontext()


def nothing(*args, **kwargs):
    return contextlib.nullcontext()


OWN = {
    "transformer_engine.pytorch": dict(Linear=Linear, LayerNormLinear=LayerNormLinear, GroupedLinear=GroupedLinear, RMSNorm=RMSNorm, LayerNorm=LayerNorm,
                                       DotProductAttention=DotProductAttention, fp8_model_init=nothing, fp8_autocast=nothing),
    "transformer_engine.pytorch.fp8": dict(fp8_autocast=nothing, fp8_model_init=nothing),
    "transformer_engine.pytorch.distributed": dict(CudaRNGStatesTracker=States),
    "transformer_engine.pytorch.cpu_offload": dict(get_cpu_offload_context=lambda *a, **k: (contextlib.nullcontext(), lambda x: x)),
    "mamba_ssm.ops.triton.layernorm_gated": dict(RMSNorm=GatedNorm),
}

# ---- Python 3.12, versions, CUDA ----


def batched(items, n, *, strict=False):
    items = iter(items)
    while batch := tuple(itertools.islice(items, n)):
        yield batch


def on_cpu(make):
    def made(*args, **kwargs):
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


typing.override = typing_extensions.override
itertools.batched = batched
sys.meta_path.insert(0, Finder())
for module in ("", ".pytorch", ".common", ".common.recipe", ".pytorch.distributed", ".pytorch.fp8"):
    importlib.import_module(f"transformer_engine{module}")
stated = importlib.metadata.version
importlib.metadata.version = lambda name: VERSION.get(name.replace("-", "_")) or stated(name)
for maker in ("arange", "zeros", "ones", "empty", "full", "tensor", "rand", "randn"):
    setattr(torch, maker, on_cpu(getattr(torch, maker)))
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda *a: (9, 0)
torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=1 << 34, name="none")
torch.cuda.default_generators = [torch.Generator(), torch.Generator()]
for call in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"):
    setattr(torch.cuda, call, lambda *a, **k: None)
torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *a, **k: self
