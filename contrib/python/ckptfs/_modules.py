# SPDX-License-Identifier: Apache-2.0
"""The modules of a model: new memory for parameters and buffers, and initialisation."""

import contextlib
import zlib

from ._library import CkptError, warn
from ._names import spellings, without_wrappers
from ._tensors import dressed, home, home_of, is_dtensor


class Modules:
    """A model's modules while it is being loaded. Nothing of the model changes before finish()."""

    def __init__(self, model):
        self.model = model
        self._new = {}  # {id of the old: (new, old)}

    def replace(self, old, new):
        """Note that a parameter or buffer will be another tensor; tied ones stay tied."""
        self._new[id(old)] = (new, old)

    def run_pre_hooks(self, names, like, strict):
        """Run load_state_dict's pre-hooks on a state dict of stand-ins on the meta device.

        `names` is {name: stored name}, and like(stored) gives shape and dtype. Hooks may rename,
        drop and repeat entries; CkptError "unsupported" for one that computes values, which are not
        there yet. Returns {name: stored name} as the hooks leave it, and their error messages.
        Names are those of the model's state dict: a wrapper whose hooks keep its own part of a name
        out of the state dict, as torch's for activation checkpoints, puts it back in such a hook.
        """
        import torch

        hooked = [
            (n, m)
            for n, m in self.model.named_modules(remove_duplicate=False)
            if m._load_state_dict_pre_hooks
        ]
        if not hooked:
            return names, []
        state = {
            n: torch.empty(like(stored)[0], dtype=like(stored)[1], device="meta")
            for n, stored in names.items()
        }
        source, errors = {id(t): names[n] for n, t in state.items()}, []
        stand_ins = list(state.values())  # keeps their ids
        for name, module in hooked:
            for hook in module._load_state_dict_pre_hooks.values():
                hook(state, f"{name}." if name else "", {}, strict, [], [], errors)
        made = [n for n, t in state.items() if id(t) not in source]
        if made:
            raise CkptError(
                "unsupported",
                f"a load_state_dict pre-hook of the model makes '{made[0]}' from values, which are "
                "not read yet: load a state dict, and give it to the model's own load_state_dict",
            )
        del stand_ins
        shown = self._shown_names()
        return {shown(n): source[id(t)] for n, t in state.items()}, errors

    def _shown_names(self):
        """Return a function that gives a tensor's name in the state dict for its place's name.

        The place's name has all modules on the way to the tensor, so those of wrappers too.
        """
        places, names = {}, {}  # {id: names}, both in the order of the modules
        for path, module in self.model.named_modules(remove_duplicate=False):
            for _, key, t in _slots(module, False):
                if key not in module._non_persistent_buffers_set:
                    places.setdefault(id(t), []).append(f"{path}.{key}" if path else key)
        for name, t in self.model.state_dict(keep_vars=True).items():
            names.setdefault(id(t), []).append(name)
        shown = {}
        for t, at in places.items():
            # A tied tensor has several of both; hooks may have dropped some of its names.
            same = set(at) & set(names.get(t, ()))
            shown.update({n: n for n in same})
            shown.update(
                zip(
                    (n for n in at if n not in same),
                    (n for n in names.get(t, ()) if n not in same),
                )
            )
        plain = {spelt: name for at, name in reversed(shown.items()) for spelt in spellings(at)}
        return lambda name: shown.get(name) or plain.get(without_wrappers(name)) or name

    def extra_state_setter(self, name):
        """Return the function that takes "layer._extra_state", or None."""
        owner, _, key = name.rpartition(".")
        try:
            return (
                self.model.get_submodule(owner).set_extra_state if key == "_extra_state" else None
            )
        except AttributeError:
            return None

    def finish(self, result):
        """Give the model its new tensors, and do what torch does after load_state_dict."""
        self._swap()
        _revive(self.model)
        for module in self.model.modules():
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, result)

    def _swap(self):
        for table, key, t in _slots(self.model):
            if id(t) in self._new:
                table[key] = self._new[id(t)][0]
        self._new = {}

    # ---- what the checkpoint lacks ----

    def check_initialise(self, tensors):
        """Raise CkptError "unsupported" if a class can't initialise one of these tensors."""
        lost = [
            name for name, module, _ in self._owners(tensors) if not _ways(self.model, name, module)
        ]
        if lost:
            modules = ", ".join(name or "the model itself" for name in lost)
            raise CkptError(
                "unsupported",
                f"missing='init': {modules} lack{'s' if len(lost) == 1 else ''} parameters, and "
                "neither the class has reset_parameters() nor a transformers model around it "
                "_init_weights()",
            )

    def initialise(self, tensors, seed, dtype=None):
        """Fill these parameters and buffers of the model as their classes do for a new model.

        Each is made whole, on every rank from the same random numbers, and a DTensor keeps its
        part: replicas are equal, and the model is the same under any mesh. `seed` must be equal on
        all ranks.
        """
        wanted, made = {id(t): t for t in tensors}, {}
        for name, module, own in reversed(
            self._owners(tensors)
        ):  # children first, as when they are made
            with _seeded(seed ^ zlib.crc32(name.encode())):
                self._initialise(name, module, own, wanted, made)
        for key, whole in made.items():
            if dtype is not None and whole.is_floating_point():
                whole = whole.to(dtype)
            self.replace(wanted[key], dressed(wanted[key], _part(wanted[key], whole)))

    def _owners(self, tensors):
        """Return [(name, module, tensors)] of the modules that have these tensors."""
        ids = {id(t) for t in tensors}
        found = []
        for name, module in self.model.named_modules():
            own = [t for _, _, t in _slots(module, False) if id(t) in ids]
            if own:
                found.append((name, module, own))
        return found

    def _initialise(self, name, module, own, wanted, made):
        import torch

        for way in _ways(self.model, name, module):
            with _set_aside(module, wanted, made), torch.no_grad():
                way()
            if not any(_is_untouched(made[id(t)]) for t in own):
                return
        raise CkptError(
            "unsupported",
            f"missing='init': the class of '{name}', {type(module).__name__}, leaves a parameter "
            "as it is",
        )


def _slots(model, recurse=True):
    """Return [(table, key, tensor)] of parameters and buffers."""
    modules = model.modules() if recurse else (model,)
    return [
        (table, key, t)
        for m in modules
        for table in (m._parameters, m._buffers)
        for key, t in table.items()
        if t is not None
    ]


def _part(old, whole):
    """Return this rank's part of a whole tensor."""
    if not is_dtensor(old):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.detach(), old.device_mesh, old.placements, src_data_rank=None)


@contextlib.contextmanager
def _seeded(seed):
    """Use random numbers from a seed; the caller's generators are as before afterwards."""
    import torch

    devices = (
        [torch.cuda.current_device()]
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else []
    )
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _set_aside(module, wanted, made):
    """Give a module other tensors while it is initialised.

    Those that are wanted become whole tensors with memory, made[id]. All others become stand-ins on
    the meta device, which initialisation may write to.
    """
    import torch

    before = _slots(module)
    try:
        for table, key, t in before:
            if id(t) in wanted and id(t) not in made:
                made[id(t)] = _untouched(torch.empty(t.shape, dtype=t.dtype, device=home_of(t)))
            shadow = (
                made[id(t)]
                if id(t) in wanted
                else torch.empty(t.shape, dtype=t.dtype, device="meta")
            )
            table[key] = (
                torch.nn.Parameter(shadow, t.requires_grad)
                if isinstance(t, torch.nn.Parameter)
                else shadow
            )
        yield
    finally:
        for table, key, t in before:
            table[key] = t


def _untouched(t):
    """Fill a tensor with a value that initialisation does not leave behind."""
    return t.fill_(float("nan")) if t.is_floating_point() or t.is_complex() else t.zero_()


def _is_untouched(t):
    """Return whether _untouched()'s value is still there."""
    return (t.is_floating_point() or t.is_complex()) and bool(t.numel()) and bool(t.isnan().all())


def _ways(model, name, module):
    """Return functions that initialise a module, the best first.

    They are that of the transformers model that the module belongs to, and those of its own class.
    """
    found = _transformers_model(model, name)
    ways = [lambda: found._init_weights(module)] if found is not None else []
    return ways + [
        getattr(module, n)
        for n in ("reset_parameters", "_reset_parameters")
        if callable(getattr(module, n, None))
    ]


def _transformers_model(model, name):
    """Return the innermost model of transformers that contains a module, or None."""
    owner = model
    found = owner if hasattr(owner, "_init_weights") else None
    for part in name.split(".") if name else ():
        owner = getattr(owner, part)
        found = owner if hasattr(owner, "_init_weights") else found
    return found


def _revive(model):
    """Compute buffers that are not saved and are still on the meta device.

    transformers' models can do that for theirs (rotary frequencies); of others a warning tells.
    """
    import torch

    lost = []
    for name, module in model.named_modules():
        meta = [
            k
            for k in module._non_persistent_buffers_set
            if module._buffers.get(k) is not None and module._buffers[k].is_meta
        ]
        if not meta:
            continue
        # Initialisation must not touch parameters.
        has_parameters = any(True for _ in module.parameters())
        owner = None if has_parameters else _transformers_model(model, name)
        if owner is None:
            lost += [f"{name}.{k}" if name else k for k in meta]
            continue
        for k in meta:
            module._buffers[k] = torch.empty_like(module._buffers[k], device=home())
        with torch.no_grad():
            owner._init_weights(module)
    if lost:
        warn(f"not saved, so still on the meta device: {', '.join(lost)}")
