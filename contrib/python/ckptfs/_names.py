# SPDX-License-Identifier: Apache-2.0
"""Names of a model's tensors, and what a checkpoint calls them."""

import re

from ._library import CkptError

WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")  # FSDP, torch.compile, activation checkpoints
# peft has the adapter's name in its names, and does not save it
ADAPTER = re.compile(r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.[^.]+(?=\.weight$|\.bias$|$)")
SAVED_WITH_ADAPTER = re.compile(r"\.(?:modules_to_save\.[^.]+|original_module)(?=\.)")


def _clean(name):
    """Without what wrappers of modules put into names."""
    name = WRAPPERS.sub(r"\1", name)
    while ".." in name:
        name = name.replace("..", ".")
    return name.strip(".")


def _spellings(name):
    """The name, and what it is without the modules around it."""
    name = _clean(name)
    yield name
    while name.startswith("module."):  # DistributedDataParallel
        name = name[len("module."):]
        yield name
    plain = SAVED_WITH_ADAPTER.sub("", ADAPTER.sub(r".\1", name))
    if plain != name:
        yield plain
    bare = re.sub(r"^base_model\.model\.", "", plain).replace(".base_layer.", ".")
    if bare != plain:
        yield bare


class Names:
    """What the tensors of a view are called in the model: by key_mapping, patterns as transformers' from_pretrained has them (the first
    that matches renames), and with the wrappers and tied weights of the model taken into account."""

    def __init__(self, view, key_mapping=None, tied=None):
        self.tied = tied or {}
        self.source = {}  # {name: name in the view}
        for stored in view.keys():
            name = _renamed(stored, key_mapping or {})
            if name in self.source:
                raise CkptError("conflict", f"key_mapping gives '{name}' to '{self.source[name]}' and '{stored}'")
            self.source[name] = stored

    def find(self, name):
        """The view's tensor for a name of the model's; for a tied weight that was not saved, the one that it is tied to. None: missing."""
        for spelling in _spellings(name):
            if spelling in self.source:
                return self.source[spelling]
        for spelling in _spellings(name):
            if spelling in self.tied:
                return self.source.get(_clean(self.tied[spelling]))
        return None


def _renamed(name, key_mapping):
    for pattern, replacement in key_mapping.items():
        new_name, hits = re.subn(pattern, re.sub(r"\(.*\)", "", replacement.lstrip("^")), name)
        if hits:
            return new_name
    return name


def tied_names(model):
    """{name: the name that it is tied to}, as transformers' models know it."""
    found = {}
    for module in model.modules() if model is not None else ():
        keys = getattr(module, "all_tied_weights_keys", None)
        if isinstance(keys, dict):
            found.update({k: v for k, v in keys.items() if k not in found})
    return found
