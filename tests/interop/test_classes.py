# SPDX-License-Identifier: Apache-2.0
"""Classes by transformers' own lists: a DCP of the state dict of a small random model is shown as save_pretrained writes the model, file by file, to the
byte, whether the names are those of the class or below a key, and whether the config lies beside the steps or `base=` is another save of the class.

    test_classes.py [all | TASK:TYPE ...]       twelve pairs by default; all: every type of every task, with a table at the end (tests/release.sh)"""

import os
import shutil
import subprocess
import sys
import tempfile

try:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers as tf
    from transformers.models.auto import modeling_auto as lists

    from tensor_case import CKPT, SEED, randomise
    from test_families import AUTO, small_config, small_model
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

TASKS = {task: AUTO[task] for task in ("causal", "image", "masked", "seq2seq", "speech")} | {
    "classify": (tf.AutoModelForSequenceClassification, lists.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "tokens": (tf.AutoModelForTokenClassification, lists.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    "answers": (tf.AutoModelForQuestionAnswering, lists.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
}
TWELVE = """causal:bart causal:gpt_neox causal:mixtral image:fuyu image:gemma3 image:llava image:paligemma image:qwen2_5_vl masked:bert seq2seq:qwen2_audio
            classify:t5 tokens:umt5""".split()
# What `all` may find: refused, or told in a warning. No fact says where their embedding is, or what a part's names are in memory; or a class does not
# heed its config (ties, sizes of 0).
KNOWN = {
    "config": """causal:bigbird_pegasus image:vision-encoder-decoder masked:mobilebert seq2seq:encoder-decoder speech:speech-encoder-decoder classify:canine
                 classify:layoutlmv3 classify:lilt classify:markuplm tokens:bros tokens:canine tokens:layoutlmv3 tokens:lilt tokens:markuplm
                 tokens:openai_privacy_filter answers:canine answers:layoutlmv3 answers:lilt answers:lxmert answers:markuplm answers:splinter""".split(),
    "base": """image:vision-encoder-decoder seq2seq:encoder-decoder speech:speech-encoder-decoder tokens:openai_privacy_filter""".split(),
}
WAYS = [(how, key) for how in ("config", "base") for key in ("", "model")]


def state_of(model, key):
    state = model.state_dict()
    return {key: state} if key else state


def differs(got, want):
    """The first file of `want` that `got` has not to the byte; or None."""
    for name in sorted(os.listdir(want)):
        try:
            with open(os.path.join(got, name), "rb") as a, open(os.path.join(want, name), "rb") as b:
                if a.read() != b.read():
                    return f"{name} differs"
        except FileNotFoundError:
            return f"{name} is not there"
    return None


def check(auto, kind, top):
    """{way: what is wrong}"""
    at = lambda name: os.path.join(top, name)
    model = small_model(kind, auto)
    model.save_pretrained(at("base"))
    model = randomise(model)
    model.save_pretrained(at("want"))
    problems = {}
    for how, key in WAYS:
        run = at(f"run.{how}.{key}")
        os.makedirs(run)
        dcp.save(state_of(model, key), checkpoint_id=os.path.join(run, "step-1"), no_dist=True)
        if how == "config":
            shutil.copy(at("want/config.json"), run)
        done = subprocess.run([CKPT, "export", run, at("got"), *(["-o", f"base={at('base')}"] if how == "base" else [])], capture_output=True, text=True)
        wrong = done.stderr.strip() or f"status {done.returncode}" if done.returncode else differs(at("got"), at("want"))
        if wrong or "left out" in done.stderr:
            problems[how, key] = wrong or done.stderr.strip()
        shutil.rmtree(at("got"), ignore_errors=True)
    return problems


def pairs(args):
    if args != ["all"]:
        yield from (pair.split(":") for pair in args or TWELVE)
        return
    for task, (_, known) in TASKS.items():
        for kind in known:
            yield task, kind


def main():
    args, counts, built, news = sys.argv[1:], dict.fromkeys(WAYS, 0), 0, False
    for task, kind in pairs(args):
        torch.manual_seed(SEED)
        try:
            small_config(kind)
        except Exception:
            continue  # the sizes do not fit together
        with tempfile.TemporaryDirectory() as top:
            try:
                problems = check(TASKS[task][0], kind, top)
            except Exception as e:
                print(f"{task}:{kind}: not built ({str(e).splitlines()[0][:100] if str(e) else type(e).__name__})", flush=True)
                continue
        built += 1
        for way in WAYS:
            counts[way] += way not in problems
            news |= way in problems and f"{task}:{kind}" not in KNOWN[way[0]]
            if way in problems:
                print(f"{task}:{kind} {way[0]} {'below ' + way[1] if way[1] else 'flat'}: {problems[way][:300]}", flush=True)
    for (how, key), n in counts.items():
        print(f"{n} of {built} right: {'config.json beside the steps' if how == 'config' else 'base='}, {'below a key' if key else 'flat'}")
    return news or not built


if __name__ == "__main__":
    sys.exit(main())
