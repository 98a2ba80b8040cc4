"""Random programs with models of Transformers: with FlashMoE's experts, fused or not, results and saved files are those
of eager experts.

A program builds a small model twice, with eager experts and with FlashMoE's, and does the same to both: calls with
gradients and without, hooks, patched forwards, adapters, copies, savers, steps. The logits, gradients, names and saved
bits of both are compared, and no parameter may have moved in memory. FLASHMOE_PROGRAMS is the number of programs
(default: 60, or FLASHMOE_EXAMPLES if that is less).
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import random
import warnings

import flashmoe
import pytest
import torch

transformers = pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402
from flashmoe.integrations.transformers import fuse  # noqa: E402
from safetensors.torch import load_file, save_file, save_model  # noqa: E402
from test_transformers import VOCABULARY, config_of  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

PROGRAMS = int(os.environ.get("FLASHMOE_PROGRAMS") or min(60, int(os.environ.get("FLASHMOE_EXAMPLES", "60"))))
INSTALLED = {name for name in ("accelerate", "peft") if importlib.util.find_spec(name)}


def random_model(rng):
    """A model of a random architecture that can be fused, with a random configuration."""
    name = rng.choice(["Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3", "Glm4Moe"])
    changes = {"num_experts_per_tok": rng.randint(1, 3), "num_hidden_layers": 2}
    if name == "Qwen2Moe":
        changes |= {"shared_expert_intermediate_size": rng.choice([24, 48, 40]), "norm_topk_prob": rng.random() < 0.5}
    if name == "Qwen3Moe":
        changes["norm_topk_prob"] = rng.random() < 0.5
    if name in ("DeepseekV3", "Glm4Moe"):
        changes |= {"n_shared_experts": rng.randint(1, 2), "routed_scaling_factor": rng.choice([1.0, 2.5])}
    torch.manual_seed(rng.randrange(2**31))
    return getattr(transformers, f"{name}ForCausalLM")(config_of(name, **changes)).eval()


def block_of(model):
    return next(each for each in model.modules() if hasattr(each, "gate") and hasattr(each, "experts"))


def watched_of(model):
    """The modules of a block whose forward a fused block does not call, by name."""
    block = block_of(model)
    found = {"gate": block.gate, "experts": block.experts}
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is not None:
        found |= {"shared": shared, "shared up": shared.up_proj, "shared act": shared.act_fn}
    if (of_gate := getattr(block, "shared_expert_gate", None)) is not None:
        found["shared gate"] = of_gate
    return found


def halved(value):
    """A module's result, halved. In the tuple that a router returns, only the weights are halved, not the logits."""
    if isinstance(value, torch.Tensor):
        return value * 0.5
    at = 1 if len(value) == 3 and value[1].dtype == torch.float32 else 0  # index 1 of a router's result: its weights
    return (*value[:at], value[at] * 0.5, *value[at + 1 :])


HOOKS = {
    "hook": lambda module: module.register_forward_hook(lambda _, args, output: halved(output)),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:])),
    "backward hook": lambda module: module.register_full_backward_hook(
        lambda _, grads, __: tuple(
            each * 0.5 if each is not None and each.is_floating_point() else each for each in grads
        )
    ),
}


class Patched:
    """Patches a module's forward, so that it returns halved results, until the patch is removed."""

    def __init__(self, module):
        self.module, forward = module, module.forward
        module.forward = lambda *args, **kinds: halved(forward(*args, **kinds))

    def remove(self):
        del self.module.forward


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2.0


def saved_by(how, model, folder):
    """Saves the model with the saver `how`. Returns the tensors that the saver has written, by name."""
    folder.mkdir(parents=True)
    if how == "save_pretrained":
        model.save_pretrained(folder)
    elif how == "accelerate":
        from accelerate import Accelerator

        Accelerator(cpu=True).save_model(model, folder)
    elif how == "save_model":
        save_model(model, str(folder / "model.safetensors"))
    elif how == "save_file":
        save_file(model.state_dict(), folder / "model.safetensors")
    elif how == "torch.save":
        torch.save(model.state_dict(), folder / "model.pt")
        return torch.load(folder / "model.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that there is no process group
            dcp.save(model.state_dict(), checkpoint_id=folder)
            state = {name: torch.full_like(each, 7) for name, each in model.state_dict().items()}
            dcp.load(state, checkpoint_id=folder)
        return state
    return load_file(folder / "model.safetensors")


class Program:
    def __init__(self, seed, folder):
        self.rng, self.folder = random.Random(seed), folder
        self.eager = random_model(self.rng)
        self.eager.set_experts_implementation("eager")
        self.ours = copy.deepcopy(self.eager)
        self.ours.set_experts_implementation("flashmoe")
        self.handles, self.done, self.wrapped, self.fused = [], [], False, False

    @property
    def both(self):
        return self.eager, self.ours

    def run(self):
        if self.rng.random() < 0.7:
            self.fuse()
        for _ in range(self.rng.randint(3, 6)):
            getattr(
                self, self.rng.choice(["call", "call", "train", "hook", "unhook", "fuse", "copy", "save", "wrap"])
            )()
        self.call(), self.train(), self.save()
        if self.rng.random() < 0.2:
            self.offload()

    def note(self, *what):
        self.done.append(" ".join(map(str, what)))

    def fuse(self):
        self.note("fuse")
        names = [name for name, _ in self.ours.named_parameters()]
        refused = any(isinstance(each, Patched) and each.fusing for each in self.handles) or self.wrapped
        if refused and not self.fused:
            with pytest.raises(flashmoe.InvalidArgument, match=r"expected .* got "):
                fuse(self.ours)
        elif not refused:
            fuse(self.ours)
            self.fused = True
        assert [name for name, _ in self.ours.named_parameters()] == names

    def tokens(self):
        return torch.tensor([[self.rng.randrange(2, VOCABULARY) for _ in range(self.rng.randint(1, 12))]] * 2)

    def call(self):
        mode = self.rng.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        options = {"output_router_logits": True} if self.rng.random() < 0.2 else {}
        self.note("call", mode.__name__, options)
        places = {name: (each.data_ptr(), each.clone()) for name, each in self.ours.state_dict().items()}
        held, tokens = self.ours.state_dict(), self.tokens()
        with mode():
            try:
                expected, got = (each(tokens, **options).logits for each in self.both)
            except TypeError:  # the architecture has no such option
                expected, got = (each(tokens).logits for each in self.both)
        assert (got - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max()), self.done
        for name, each in self.ours.state_dict().items():
            place, value = places[name]
            assert each.data_ptr() == place == held[name].data_ptr() and torch.equal(each, value), (name, self.done)
            assert not each.is_inference(), (name, self.done)

    def train(self):
        training, tokens = self.rng.random() < 0.5, self.tokens()
        self.note("train" if training else "gradients in eval mode")
        for each in self.both:
            each.train(training).zero_grad()
            each(tokens, labels=tokens).loss.backward()
            each.eval()
        ours = dict(self.ours.named_parameters())
        norms = [each.grad.norm() for each in self.eager.parameters() if each.grad is not None]
        # Some gradients are 0 except for rounding, for example those of a router that gives its one expert the weight
        # 1. If only adapters are trained, all gradients may be such. The loss is about 5, and half a unit in its last
        # place is 2.4e-7.
        noise = 1e-6 * torch.stack(norms).norm() + 1e-7
        for name, parameter in self.eager.named_parameters():
            expected, got = parameter.grad, ours[name].grad
            assert (expected is None) == (got is None), (name, self.done)
            if expected is not None:
                assert (got - expected).norm() <= 1e-4 * expected.norm() + noise, (name, self.done)
        with torch.no_grad():
            for parameter in ours.values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
        self.eager.load_state_dict(self.ours.state_dict())

    def hook(self):
        modules, kind = [watched_of(each) for each in self.both], self.rng.choice([*HOOKS, "patch"])
        name = self.rng.choice(list(modules[0]))
        if self.wrapped or "forward" in vars(modules[1][name]):
            return
        if kind == "pre-hook" and name == "shared act":
            kind = "hook"
        self.note(kind, "on", name)
        for each in modules:
            handle = Patched(each[name]) if kind == "patch" else HOOKS[kind](each[name])
            handle.fusing = name in ("gate", "experts")
            self.handles.append(handle)

    def unhook(self):
        self.note("unhook")
        for each in self.handles:
            each.remove()
        self.handles = []

    def copy(self):
        if self.handles or self.wrapped:
            return
        hooks = any(each._forward_hooks for each in self.ours.modules())  # those of Transformers cannot be pickled
        pickles = self.rng.random() < 0.5 and not hooks
        self.note("pickle" if pickles else "deepcopy")
        self.ours = pickle.loads(pickle.dumps(self.ours)) if pickles else copy.deepcopy(self.ours)

    def wrap(self):
        """Adds a parametrization, or adapters of PEFT. A program does so at most once, and never while hooks or patches
        are on its modules."""
        if self.wrapped or self.handles:
            return
        kind = self.rng.choice(["parametrize", *(["LoRA", "LoRA on gate"] if "peft" in INSTALLED else [])])
        self.note(kind)
        self.wrapped = kind
        if kind == "parametrize":
            for each in self.both:
                parametrize.register_parametrization(block_of(each).gate, "weight", Doubled())
            return
        from peft import LoraConfig, inject_adapter_in_model

        parameters = ["gate.weight"] if kind == "LoRA on gate" else ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(
            r=2, target_modules=["q_proj", "q_a_proj", "shared_expert_gate"], target_parameters=parameters
        )
        for each in self.both:
            inject_adapter_in_model(config, each)
            torch.manual_seed(3)
            for name, parameter in each.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.1)

    def save(self):
        if self.wrapped:
            how = "torch.save"
        else:
            others = ["accelerate"] if "accelerate" in INSTALLED else []
            how = self.rng.choice(["save_pretrained", "save_file", "save_model", "torch.save", "DCP", *others])
        self.note(how)
        place = self.folder / str(len(self.done))
        expected, got = (saved_by(how, model, place / name) for model, name in zip(self.both, "eo", strict=True))
        assert sorted(got) == sorted(expected), self.done
        for name, each in expected.items():
            assert torch.equal(got[name], each), (name, self.done)
        if how == "torch.save":
            self.ours.load_state_dict(got)

    def offload(self):
        """Offloads our model with Accelerate. This is a program's last step, because parameters are elsewhere then."""
        if "accelerate" not in INSTALLED or self.handles or self.wrapped:
            return
        from accelerate import cpu_offload

        self.note("offload")
        cpu_offload(self.ours, execution_device=torch.device("cpu"))
        tokens = self.tokens()
        with torch.no_grad():
            expected, got = (each(tokens).logits for each in self.both)
        assert (got - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max()), self.done


@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.filterwarnings("ignore:.*the block runs as Transformers has it:UserWarning")
def test_program(seed, tmp_path):
    program = Program(seed, tmp_path)
    try:
        program.run()
    except Exception as error:
        error.add_note(f"program {seed}: {type(program.eager).__name__}, {'; '.join(program.done)}")
        raise
