# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a view go where, and what is said of the rest."""

from ._library import CkptError
from ._names import Names, is_adapter
from ._objects import Opaque, flattened, gathered, is_whole
from ._targets import Copy
from ._tensors import is_sharded_tensor, loses, memory
from ._view import torch_dtype


class Match:
    """One rank's tensors and one view's.

    Attributes:
        pairs: [(entry, the view's name)].
        copies: The same with a Copy for each further name of one memory that the view has a tensor
            for.
        lacking: For each part the entries that the view has nothing for.
        values: [(what is not a tensor, its stored value)].
    """

    def __init__(self, view, parts, key_mapping):
        self.view, self.parts = view, parts
        self.pairs, self.copies, self.lacking, self.mismatched = [], [], [], []
        stored = view.keys()
        self._unused, self._filled = set(stored), {}
        for part in parts:
            names = Names(
                stored,
                key_mapping,
                part.model,
                lambda source, part=part: self._hooked(part, source),
            )
            self.lacking.append([e for e in part.entries if not self._place(e, names.find(e.name))])
        # tied: its twin is loaded
        self.lacking = [[e for e in lacking if not self._twin(e)] for lacking in self.lacking]
        self._shown = Names(stored, key_mapping).source
        self.values, self._lost_values = [], []
        self._match_values(key_mapping)
        self._stored = stored

    def _hooked(self, part, source):

        def like(stored):
            info = self.view._tensors[stored]
            return info.shape, torch_dtype(info.dtype)

        names, errors = part.run_pre_hooks(source, like)
        self._unused -= set(source.values()) - set(names.values())  # hooks have dropped them
        self.mismatched += errors
        return names

    def _match_values(self, key_mapping):
        """Match what is not a tensor, which only views of the framework's own names have."""
        wanted = [value for part in self.parts for value in part.values]
        if not wanted or not self.view.is_raw():
            for value in wanted:
                if value.name in self._shown:
                    self._unused.discard(self._shown[value.name])
                    self.mismatched.append(
                        f"{value.name} is a tensor in the checkpoint, but not in what is to be "
                        "filled: give it a torch.Tensor."
                    )
            return
        objects = flattened(self.view.objects())
        names = Names(objects, key_mapping)
        objects = {name: objects[source] for name, source in names.source.items()}
        for value in wanted:
            stored = (
                objects[value.name]
                if value.name in objects
                else self._gathered(objects, value.name)
            )
            if value.put is not None and is_whole(stored):
                self.values.append((value, stored))
            else:
                self._lost_values.append(value.name)

    def _gathered(self, objects, name):
        """Return a value that was taken apart when it was saved, unless it has tensors in it."""
        has_tensors = any(shown.startswith(name + ".") for shown in self._shown)
        return Opaque("nothing") if has_tensors else gathered(objects, name)

    def _place(self, entry, source):
        if source is None:
            return False
        self._unused.discard(source)
        if list(entry.tensor.shape) != self.view._tensors[source].shape:
            import torch

            self.mismatched.append(
                f"size mismatch for {entry.name}: copying a param with shape "
                f"{torch.Size(self.view._tensors[source].shape)} from checkpoint, "
                f"the shape in current model is {torch.Size(entry.tensor.shape)}."
            )
        elif loses(self.view._tensors[source].dtype, entry.tensor.dtype):
            self.mismatched.append(
                f"dtype mismatch for {entry.name}: {self.view._tensors[source].dtype} from "
                f"checkpoint can't be copied to {entry.tensor.dtype} of the current model."
            )
        elif not self._twin(entry):
            self._filled[memory(entry.tensor)] = entry
            self.pairs.append((entry, source))
        elif (
            not is_sharded_tensor(entry.tensor)
            and (self._filled[memory(entry.tensor)], source) not in self.pairs
        ):
            self.copies.append((Copy(entry, self._filled[memory(entry.tensor)]), source))
        return True

    def _twin(self, entry):
        """Return whether an entry has the memory of one that is filled."""
        first = self._filled.get(memory(entry.tensor)) if memory(entry.tensor) is not None else None
        if first is not None and entry is not first and entry not in first.twins:
            first.twins.append(entry)
        return first is not None

    def check_initialise(self):
        for part, lacking in zip(self.parts, self.lacking):
            part.check_initialise([e.tensor for e in lacking])

    def word(self, other):
        """Return this rank's findings for the other ranks, in values that JSON has.

        `unused` has a bit for each of the view's tensors, 1 if none of this rank's tensors uses it.
        `other` says whether there is another view to try.
        """
        import torch

        unused = "".join("1" if name in self._unused else "0" for name in self._stored)
        missing = [e.name for lacking in self.lacking for e in lacking] + self._lost_values
        return {
            "missing": missing,
            "mismatched": self.mismatched,
            "stored": len(self._stored),
            "unused": hex(int(unused or "0", 2)),
            "other": other,
            "seed": torch.initial_seed(),
            "copies": bool(self.copies),
            "adapter": any(is_adapter(e.name) for part in self.parts for e in part.entries),
        }

    def unexpected(self, findings):
        """Return the names of the view's tensors that no rank uses."""
        shown = {v: k for k, v in self._shown.items()}
        bits = bin(int(findings["unused"], 16))[2:].zfill(len(self._stored))
        return [shown[name] for name, bit in zip(self._stored, bits) if bit == "1"]


def combined(words):
    """Return the findings of all ranks together.

    That is the union of what is missing and of what does not fit, and the tensors that no rank
    uses.
    """
    unused = int(words[0]["unused"], 16)
    for word in words:
        unused &= int(word["unused"], 16)
    return {
        "missing": _union(words, "missing"),
        "mismatched": _union(words, "mismatched"),
        "unused": hex(unused),
        "seed": words[0]["seed"],
        "other": all(word["other"] for word in words),
        "copies": any(word["copies"] for word in words),
        "adapter": any(word["adapter"] for word in words),
        "same": len({word["stored"] for word in words}) == 1,
    }


def _union(words, key):
    return list(dict.fromkeys(text for word in words for text in word[key]))


def result_of(match, findings, strict, lenient, chosen=False):
    """Return the result of load_state_dict, or raise an error in torch's words.

    `lenient`: missing names are not an error. `chosen`: there are no unexpected names.
    """
    result = _result(findings["missing"], [] if chosen else match.unexpected(findings))
    if not findings["same"]:
        raise CkptError(
            "conflict", "the ranks see different checkpoints: their numbers of tensors differ"
        )
    adapter = next(filter(is_adapter, match.view.keys()), None)
    if adapter and result.missing_keys and not findings["adapter"]:
        raise CkptError(
            "unsupported",
            f"the checkpoint is of a PEFT model or adapter (it has '{adapter}'), and what is to be "
            "loaded has no adapter: lora='merge' adds the adapter to the weights of base=, a model "
            "directory; else wrap the model by peft first",
        )
    lines = []
    if strict and not lenient and result.missing_keys:
        lines.append(f"Missing key(s) in state_dict: {_quoted(result.missing_keys)}. ")
    if strict and result.unexpected_keys:
        lines.append(f"Unexpected key(s) in state_dict: {_quoted(result.unexpected_keys)}. ")
    lines += findings["mismatched"]
    if lines:
        name = ", ".join(dict.fromkeys(part.name for part in match.parts)) or "an empty list"
        raise RuntimeError(
            "Error(s) in loading state_dict for {}:\n\t{}".format(name, "\n\t".join(lines))
        )
    return result


def _quoted(names):
    return ", ".join(f'"{name}"' for name in names)


def _result(missing, unexpected):
    from torch.nn.modules.module import _IncompatibleKeys

    class Loaded(_IncompatibleKeys):
        stats = None

    return Loaded(missing, unexpected)
