#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No family's name stands in C: names.py SOURCE_DIR

String literals of core/**/*.[ch] must not have a word that is a name of Hugging Face's models (hub_names.txt: words of the parameters of three and
more of transformers' models) or a model type (model_types.txt: transformers' config mapping). Such knowledge is data (core/recipe/data). Both lists
were made with transformers 5; comments, identifiers and #include lines do not count."""
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# Model types that are words of English too.
ENGLISH = {"align", "altclip", "bark", "bit", "clap", "clip", "dots", "fast", "flava", "git", "mask", "opt", "sam", "splinter", "time", "vit"}

# Other frameworks' own words that Hugging Face has too: where, which, why.
ALLOWED = [
    (r"core/format/megatron/(layout|mesh|name|ranks|writer_plan)\.c",
     {"word_embeddings", "language_model", "self_attention", "query_key_value", "mlp", "linear_fc1", "linear_fc2", "dense_h_to_4h", "dense_4h_to_h",
      "input_layernorm", "post_attention_layernorm", "final_layernorm", "final_norm"},
     "Megatron's own modules, by which its layouts and the age of its names are told"),
    (r"core/format/deepspeed/load\.c", {"language_model"}, "Megatron-DeepSpeed's own module, by which its models are told"),
]

WORD = re.compile(r"[A-Za-z0-9_]+")
# A comment, a character, a string (which alone has a group), or any other character.
TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|'(?:\\.|[^'\\\n])*'|\"((?:\\.|[^\"\\\n])*)\"|^[ \t]*#[ \t]*include[^\n]*", re.S | re.M)


def words_of(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as f:
        return set(f.read().split())


def literals(text):
    for m in TOKEN.finditer(text):
        if m.group(1) is not None:
            yield text.count("\n", 0, m.start()) + 1, re.sub(r"\\.", " ", m.group(1))


def allowed(path):
    return set().union(*(words for where, words, _ in ALLOWED if re.fullmatch(where, path)))


def findings(root, forbidden):
    for folder, dirs, files in os.walk(os.path.join(root, "core")):
        dirs.sort()
        for name in sorted(files):
            path = os.path.relpath(os.path.join(folder, name), root)
            if not name.endswith((".c", ".h")):
                continue
            with open(os.path.join(root, path), encoding="utf-8") as f:
                text = f.read()
            for line, literal in literals(text):
                for word in sorted(set(WORD.findall(literal)) & (forbidden - allowed(path))):
                    yield "%s:%d: '%s' is a name of models in C; say it in core/recipe/data" % (path, line, word)


def check_itself(forbidden):
    """What must be found, and what must not, is."""
    text = '/* "lm_head" */ #include "mlp"\n// "wte"\nint lm_head; f("a.lm_head.b", \'"\', "x\\"q_proj\\n");'
    found = [w for _, s in literals(text.replace("*/ #", "*/\n#")) for w in WORD.findall(s) if w in forbidden]
    assert found == ["lm_head", "q_proj"], found


def main():
    types = words_of("model_types.txt")
    forbidden = (types | {t.replace("-", "_") for t in types} | words_of("hub_names.txt")) - ENGLISH
    check_itself(forbidden)
    bad = list(findings(sys.argv[1], forbidden))
    print("\n".join(bad) if bad else "no family's name stands in C")
    sys.exit(1 if bad else 0)


main()
