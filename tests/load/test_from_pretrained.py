# SPDX-License-Identifier: Apache-2.0
"""ckptfs.transformers: the model, its dtypes and its logits are those that transformers loads from the official conversion."""

import os
import shutil
import subprocess
import sys
import warnings

from built import MEGATRON, NANOTRON, PACKAGE, need_transformers_5, skip
from runner import run_in_folders

try:
    import torch
    import transformers
except ImportError as e:
    skip(e)
need_transformers_5(transformers)

from ckptfs.transformers import from_pretrained, tokenizer_from_pretrained  # noqa: E402

warnings.simplefilter("ignore")
transformers.utils.logging.disable_progress_bar()


def same(got, want):
    a, b = got.state_dict(), want.state_dict()
    assert type(got) is type(want) and list(a) == list(b)
    for k in a:
        assert a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]), k
    ids = torch.arange(8)[None]
    assert torch.equal(got(ids).logits if hasattr(got(ids), "logits") else got(ids)[0], want(ids).logits if hasattr(want(ids), "logits") else want(ids)[0])


def cases():
    for name in ("llama_tp2_pp2_tied", "llama_tp1_pp1_untied_interleaved", "qwen2_moe_epbranch_tp1_dp2_ep2"):
        yield os.path.join(NANOTRON, name), os.path.join(NANOTRON, name + ".expected"), {}
    yield os.path.join(MEGATRON, "run"), os.path.join(MEGATRON, "expected"), {"base": os.path.join(MEGATRON, "base")}
    yield os.path.join(NANOTRON, "llama_tp2_pp2_tied.expected"), os.path.join(NANOTRON, "llama_tp2_pp2_tied.expected"), {}


def models_are_those_of_the_official_conversion(top):
    for run, expected, options in cases():
        same(from_pretrained(run, **options), transformers.AutoModelForCausalLM.from_pretrained(expected, dtype="auto"))


def another_class_and_dtype(top):
    run = os.path.join(NANOTRON, "llama_tp2_pp2_tied")
    for cls in (transformers.AutoModel, transformers.LlamaModel, transformers.AutoModelForCausalLM):
        same(from_pretrained(run, cls, dtype=torch.float64), cls.from_pretrained(run + ".expected", dtype=torch.float64))


def the_tokenizer_beside_it(top):
    from tokenizers import Tokenizer, models
    run = shutil.copytree(os.path.join(NANOTRON, "llama_tp2_pp2_tied.expected"), top)
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")),
                                         unk_token="[UNK]").save_pretrained(run)
    assert tokenizer_from_pretrained(run)("a")["input_ids"] == transformers.AutoTokenizer.from_pretrained(run)("a")["input_ids"]
    other = tokenizer_from_pretrained(os.path.join(NANOTRON, "llama_tp2_pp2_tied"), base=run)
    assert other("b")["input_ids"] == [1]


def what_is_missing_is_said(top):
    for call, words in ((lambda: from_pretrained(os.path.join(MEGATRON, "run"), options={"view": "raw"}), "config.json"),
                        (lambda: from_pretrained(os.path.join(top, "nowhere")), "nowhere")):
        try:
            call()
        except Exception as e:
            assert words in str(e), e
        else:
            raise AssertionError("no error")
    os.makedirs(os.path.join(top, "transformers"))
    with open(os.path.join(top, "transformers", "__init__.py"), "w", encoding="utf-8") as f:
        f.write("raise ImportError('none here')\n")
    done = subprocess.run([sys.executable, "-c", "import ckptfs.transformers as t\ntry:\n t.from_pretrained('x')\nexcept ImportError as e:\n print(e)"],
                          capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=f"{top}:{PACKAGE}"))
    assert "pip install transformers" in done.stdout, done


run_in_folders((models_are_those_of_the_official_conversion, another_class_and_dtype, the_tokenizer_beside_it, what_is_missing_is_said))
