# SPDX-License-Identifier: Apache-2.0
"""Pipelines with the layers of Megatron-DeepSpeed's GPTModelPipe, which an installed DeepSpeed trains, saves and converts to universal
checkpoints (deepspeed_writer.py)."""

import torch
import torch.distributed as dist

import deepspeed_writer as writer
import megatron_deepspeed_writer as mds


class Transformer(torch.nn.Module):
    """A layer with these parameters. Its forward's gradients differ from element to element, and not between tensor-parallel ranks
    that have the same parameter."""

    def __init__(self, tensors):
        super().__init__()
        for name, t in tensors.items():
            *path, last = name.split(".")
            writer.inside(self, path).register_parameter(last, torch.nn.Parameter(t.float()))

    def forward(self, x):
        for p in self.parameters():
            x = x + used(p)
        return x


class Other(Transformer):
    """An embedding, a norm or a head: partition_method counts the transformer layers only."""

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight


def used(p):
    return (p * p * torch.linspace(0.1, 1, p.numel(), dtype=p.dtype).view(p.shape)).sum() / p.numel()


def logits(embedding, x):
    return x + used(embedding.word_embeddings_weight)


def specs_of(layers, tied):
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    kind = lambda local: Transformer if "input_layernorm.weight" in local else Other
    specs = [lambda x: x] + [LayerSpec(kind(local), local) for _, local in layers] + [lambda x: x]
    if tied:
        specs[1] = TiedLayerSpec("embed", Other, layers[0][1], tied_weight_attr="word_embeddings_weight")
        specs.insert(-1, TiedLayerSpec("embed", Other, layers[0][1], forward_fn=logits, tied_weight_attr="word_embeddings_weight"))
    return specs


def local_layers(layers, t, tp):
    return [(number, mds.part(layer, t, tp)) for number, layer in layers]


def set_masters(module, layers, last):
    """Give the optimizer these masters. The last stage's copy of what is not tied has values that nothing uses."""
    from deepspeed.utils import safe_set_full_fp32_param
    named = {f"{number}.{name}": t for number, local in layers for name, t in local.items()}
    for name, p in module.named_parameters():
        t = named[name.replace("tied_modules.embed.", "1.")]
        safe_set_full_fp32_param(p, torch.full_like(t, 7) if last and "position_embeddings" in name else t)


def write(deepspeed, world, rank, at):
    """The pipeline that at.plan describes. It takes a step without a learning rate, so that its masters are those of the plan."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    plan = torch.load(at + ".plan", weights_only=False)
    tp, pp = plan["tp"], plan["pp"]
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=world // tp // pp)
    t = topology.get_coord(rank).model
    layers = local_layers(plan["layers"], t, tp)
    model = PipelineModule(layers=specs_of(layers, plan["tied"]), topology=topology, loss_fn=lambda out, _: out.float().mean(), partition_method="type:transformer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    config = writer.config_of(plan["zero"]) | {"gradient_accumulation_steps": 1, "pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    set_masters(engine.module, layers, pp > 1 and topology.get_coord(rank).pipe == pp - 1)
    x = torch.ones(1, dtype=writer.DTYPES[plan["zero"]["dtype"]])
    engine.train_batch(data_iter=iter([(x, x)] * 4))
    engine.save_checkpoint(at, client_state=plan["client"])
    masters, moments = writer.live_states(engine)
    torch.save({"masters": masters, "moments": moments}, f"{at}.want-{rank}")
    dist.barrier()
    if rank == 0:
        writer.convert(at, "global_step1")
    dist.barrier()
    engine.destroy()
