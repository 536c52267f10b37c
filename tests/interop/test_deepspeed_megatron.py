# SPDX-License-Identifier: Apache-2.0
"""Models that Megatron-DeepSpeed saved, in the form of one module and in that of a pipeline, with tensor parallelism: they are refused by
name, and view=raw shows a module's own names. What it saved without DeepSpeed's engine is Megatron-LM's, and shown."""

import sys
import unittest

try:
    import megatron_deepspeed_writer as mds
    from megatron_deepspeed_case import ModelCase, llama
    from tensor_case import export, read_all
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


class Refused(ModelCase):
    def test_by_name(self):
        cfg, sd = llama()
        for tp, pp in ((1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)):
            run = self.path(f"{tp}{pp}")
            mds.save_layers(mds.Model(sd, cfg, 4), run, tp, pp) if pp else mds.save_modules(mds.Model(sd, cfg, 4), run, tp)
            for options in ((), ("dtype=float32",), ("view=dcp",)):
                self.refused(run, "mp_rank_00_model_states.pt': a model of Megatron-DeepSpeed", *options)

    def test_raw(self):
        cfg, sd = llama()
        for tp in (1, 2):
            model, run = mds.Model(sd, cfg), self.path(f"raw{tp}")
            mds.save_modules(model, run, tp)
            done = export(run, run + ".out", "view=raw")
            self.assertEqual(done.returncode, 0, done.stderr)
            want = {f"language_model.encoder.layers.{i}.{name}": t for i, layer in enumerate(model.layers) for name, (t, rule) in layer.items()}
            got = read_all(run + ".out")
            self.same({name: got[name] for name in want}, want, run)
        mds.save_layers(mds.Model(sd, cfg), self.path("layers"), 2)
        self.refused(self.path("layers"), "convert the tag by DeepSpeed's ds_to_universal", "view=raw", "allow_partial")


class WithoutTheEngine(ModelCase):
    def test_as_megatron_did(self):
        cfg, sd = llama()
        for name, needle, others in (("ranks", "", {}), ("fpdt", "all queries before all keys and values", {"ds_sequence_parallel_fpdt": False}),
                                     ("glu", "glu_activation", {"glu_activation": "swiglu"})):
            run = self.path(name)
            mds.save_ranks(mds.Model(sd, cfg, 4), run, 2, **others)
            self.refused(run, needle) if needle else self.served(run, sd, cfg, "vocab_size=60")

    def test_queries_apart(self):
        """Grouped queries as the code of July to November 2023 had them."""
        cfg, sd = llama()
        model = mds.Model(sd, cfg)
        for layer in model.layers:
            w = layer.pop("self_attention.query_key_value.weight")[0]
            layer |= {"self_attention.query.weight": (w[:32], mds.COL), "self_attention.key_value.weight": (w[32:], mds.COL)}
        run = self.path("run")
        mds.save_ranks(model, run)
        self.refused(run, "are two projections")


if __name__ == "__main__":
    unittest.main()
