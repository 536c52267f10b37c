# SPDX-License-Identifier: Apache-2.0
"""Names of a model's tensors, and what a checkpoint calls them."""

import re

from ._library import CkptError

WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)"
)  # FSDP, torch.compile, activation checkpoints
# peft has the adapter's name in its names, and does not save it
ADAPTER = re.compile(
    r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.[^.]+(?=\.weight$|\.bias$|$)"
)
SAVED_WITH_ADAPTER = re.compile(r"\.(?:modules_to_save\.[^.]+|original_module)(?=\.)")


def is_adapter(name):
    """Is it the name of a LoRA's tensor, or of what one is put around?"""
    return (
        re.search(r"\.(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer)(\.|$)", name)
        is not None
    )


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
        name = name[len("module.") :]
        yield name
    plain = SAVED_WITH_ADAPTER.sub("", ADAPTER.sub(r".\1", name))
    if plain != name:
        yield plain
    bare = re.sub(r"^base_model\.model\.", "", plain).replace(".base_layer.", ".")
    if bare != plain:
        yield bare


class Names:
    """What the tensors of a view are called in a model: by key_mapping, patterns as transformers' from_pretrained has them (the first that
    matches renames), by the model's own hooks, and with its wrappers, its tied weights and its prefix taken into account.

    stored: the view's names. model: torch's, or None. hooks: a function of {name: name in the view} that gives another such dict.
    """

    def __init__(self, stored, key_mapping=None, model=None, hooks=None):
        self.tied = tied_names(model)
        self.prefix = base_prefix(model)
        self.source = {}  # {name: name in the view}
        for name in stored:
            shown = _renamed(name, key_mapping or {})
            if shown in self.source:
                raise CkptError(
                    "conflict",
                    f"key_mapping gives '{shown}' to '{self.source[shown]}' and '{name}'",
                )
            self.source[shown] = name
        if hooks is not None:
            self.source = hooks(self.source)

    def find(self, name):
        """The view's tensor for a name of the model's; for a tied weight that was not saved, the one that it is tied to. None: missing."""
        names = list(_spellings(name))
        names += [_clean(self.tied[n]) for n in names if n in self.tied]
        if self.prefix:
            names += [
                n.removeprefix(self.prefix) if n.startswith(self.prefix) else self.prefix + n
                for n in names
            ]
        return next((self.source[n] for n in names if n in self.source), None)


def base_prefix(model):
    """ "model." of a transformers model: its task's classes have the base model under that name, the base model's own class has not, and
    from_pretrained loads either from what the other has saved. None: there is no such thing.
    """
    while model is not None and not hasattr(model, "base_model_prefix"):
        model = getattr(
            model, "module", getattr(model, "_orig_mod", None)
        )  # DistributedDataParallel, torch.compile
    prefix = getattr(model, "base_model_prefix", None)
    return f"{prefix}." if isinstance(prefix, str) and prefix else None


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
