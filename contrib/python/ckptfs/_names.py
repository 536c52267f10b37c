# SPDX-License-Identifier: Apache-2.0
"""Names of a model's tensors, and what a checkpoint calls them."""

import re

from ._library import CkptError

# FSDP, torch.compile, activation checkpoints.
WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")
# peft has the adapter's name in a model's names, and does not save it.
ADAPTER = re.compile(
    r"\.(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.[^.]+(?=\.weight$|\.bias$|$)"
)
SAVED_WITH_ADAPTER = re.compile(r"\.(?:modules_to_save\.[^.]+|original_module)(?=\.)")


def is_adapter(name):
    """Return whether it is the name of a LoRA's tensor, or of one that a LoRA is put around."""
    return (
        re.search(r"\.(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer)(\.|$)", name)
        is not None
    )


def without_wrappers(name):
    """Return a name without what wrappers of modules put into names."""
    name = WRAPPERS.sub(r"\1", name)
    while ".." in name:
        name = name.replace("..", ".")
    return name.strip(".")


def spellings(name):
    """Yield the name, and what it is without the modules around it."""
    yield name
    name = without_wrappers(name)
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
    """What the tensors of a view are called in a model.

    Names are changed by key_mapping, by the model's own hooks, and by its wrappers, its tied
    weights and its prefix. key_mapping has patterns as transformers' from_pretrained does; the
    first one that matches renames.

    Args:
        stored: The view's names.
        key_mapping: {pattern: replacement}, or None.
        model: The torch model, or None.
        hooks: A function of {name: name in the view} that returns another such dict, or None.
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
        """Return the view's tensor for a name of the model's, or None if it is missing.

        For a tied weight that was not saved it is the tensor that the weight is tied to.
        """
        names = list(spellings(name))
        names += [without_wrappers(self.tied[n]) for n in names if n in self.tied]
        if self.prefix:
            names += [
                n.removeprefix(self.prefix) if n.startswith(self.prefix) else self.prefix + n
                for n in names
            ]
        return next((self.source[n] for n in names if n in self.source), None)


def base_prefix(model):
    """Return the prefix of a transformers model, such as "model.", or None.

    A class for a task has the base model under that name, the base model's own class does not, and
    from_pretrained loads either from a checkpoint of the other.
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
    """Return {name: the name that it is tied to}, as transformers' models know it."""
    found = {}
    for module in model.modules() if model is not None else ():
        keys = getattr(module, "all_tied_weights_keys", None)
        if isinstance(keys, dict):
            found.update({k: v for k, v in keys.items() if k not in found})
    return found
