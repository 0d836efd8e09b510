"""Checks that the engine's tokens are those of plain transformers: a fast wrong answer is worth nothing.

Many prompts of mixed lengths go through the engine at once, greedily, with logprobs: prompts in chunks, then decode
steps of the whole batch. A second model with the same weights and transformers' own eager attention in the same dtype
then computes reference logits for each token of some answers, with one forward pass over prompt and answer. Random
weights suffice: their tokens mean nothing, but still follow from the logits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.messages import TokenLogprobs
from baton.sampling import SamplingParams
from baton_kernels.experts.arranged import as_published
from baton_kernels.quantized_linear import dequantize
from benchmarks.engine.bench import Bench, drain, note
from benchmarks.harness.checks import WrongAnswers
from engine.model.experts import NAMES, expert_modules, weights_of
from engine.model.linear_method import linear_layers, method_of
from engine.model.load.loader import load_model
from engine.model.load.skeleton import build_skeleton, fill_with_dummies, move_empty
from engine.model.quantization.expert_weights import store_values
from engine.model.quantization.linear import QuantizedLinear

ANSWER_TOKENS = 16
NUM_LOGPROBS = 5
MAX_SEQUENCES = 256
MAX_COMPARED = 32
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
SHORT_TOKENS = (1, 200)
LONG_TOKENS = (1000, 2500)  # more than one chunk


@dataclass(frozen=True, slots=True)
class Limits:
    """Tolerances for an answer to be correct. `min_agreement`: share of tokens that are the reference's argmax. The
    others are in standard deviations of the reference's logits: how far a token's logit may be below the best one, and
    a logprob from the reference's. A wrong token is 4 below; two attentions in bf16 differ by at most 0.3, and agree on
    8 of 10 tokens with random weights, whose best logits are close together."""

    min_agreement: float
    max_shortfall: float
    max_logprob_error: float

    def times(self, factor: float) -> Limits:
        return Limits(self.min_agreement, self.max_shortfall * factor, self.max_logprob_error * factor)


FOUR_BITS = 2**0.5
"""The reference has 4-bit weights rounded to 16 bits, as large an error again as that of all else; the kernels multiply
by the codes."""
LIMITS = {
    torch.float32: Limits(0.98, 0.01, 0.01),
    torch.float16: Limits(0.9, 0.2, 0.2),
    torch.bfloat16: Limits(0.6, 0.6, 0.6),
}


@dataclass(slots=True)
class Answer:
    """One sequence's greedy tokens, and the engine's logprobs for each."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well the engine's tokens agree with the reference; see `Limits`. mean_logprob_error: the mean over tokens of
    each one's largest error."""

    num_sequences: int
    num_compared_tokens: int
    agreement: float
    max_shortfall: float
    max_logprob_error: float
    mean_logprob_error: float


def rounds_inputs(bench: Bench) -> bool:
    """Whether many rows of inputs are rounded to 8 bits."""
    methods = map(method_of, bench.built.runner.model.modules())
    return any(isinstance(method, QuantizedLinear) and not method.weight.four_bits for method in methods)


def has_four_bits(bench: Bench) -> bool:
    methods = map(method_of, bench.built.runner.model.modules())
    return any(isinstance(method, QuantizedLinear) and method.weight.four_bits for method in methods)


def rounds_kv(bench: Bench) -> bool:
    return bool(bench.built.layout.layers[0].scale_dtype)


@torch.inference_mode()
def as_usual(answers: list[Answer], reference: Any, *, weights: bool, kv: bool) -> Agreement:
    """The reference with fp8 as vLLM has it, compared with itself, at the tokens of the answers. Spoils its weights.

    What 8 bits change depends on the model and its depth, so there are no fixed limits. weights: quantized online, a
    scale per weight, and one per row of inputs. kv: a scale per layer for its keys, and one for its values; here the
    keys before they are rotated, which does not change their lengths.
    """
    exact = [_logits(reference, answer) for answer in answers]
    for name, module in linear_layers(reference):
        if weights and name != "lm_head":
            scale = module.weight.abs().max().float() / LARGEST_FP8
            module.weight.copy_((module.weight.float() / scale).to(torch.float8_e4m3fn).float() * scale)
            module.register_forward_pre_hook(_rounded_inputs)
        if kv and name.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(_rounded_output)
    for _, experts in expert_modules(reference) if weights else ():
        _round_experts(experts)
    agreed, num_tokens, shortfall, errors = 0, 0, 0.0, list[Tensor]()
    for answer, logits in zip(answers, exact, strict=True):
        rounded = _logits(reference, answer)
        deviation = logits.std(dim=-1)
        top = rounded.topk(NUM_LOGPROBS, dim=-1).indices
        below = logits.max(dim=-1).values - logits.gather(1, top[:, :1])[:, 0]
        agreed += int((logits.argmax(dim=-1) == top[:, 0]).sum())
        num_tokens += len(answer.tokens)
        shortfall = max(shortfall, float((below / deviation).max()))
        apart = (rounded.log_softmax(dim=-1) - logits.log_softmax(dim=-1)).gather(1, top).abs().amax(dim=-1)
        errors.append(apart / deviation)
    return _agreement(len(answers), num_tokens, agreed, shortfall, torch.cat(errors))


def _agreement(num_sequences: int, num_tokens: int, agreed: int, shortfall: float, errors: Tensor) -> Agreement:
    return Agreement(
        num_sequences, num_tokens, agreed / num_tokens, shortfall, float(errors.max()), float(errors.mean())
    )


def _round_experts(module: Any) -> None:
    """A scale per expert and matrix, and one per row of either product's inputs."""
    for name in NAMES:
        for weight in getattr(module, name):
            weight.copy_(_rounded(weight, weight.abs().max()))
    gate = module._apply_gate
    module._apply_gate = lambda gate_up: _rounded((x := gate(gate_up)), x.abs().amax(-1, keepdim=True))
    module.register_forward_pre_hook(lambda _, inputs: (*_rounded_inputs(module, inputs[:1]), *inputs[1:]))


def _rounded_inputs(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_rounded(inputs[0], inputs[0].abs().amax(-1, keepdim=True)),)


def _rounded_output(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return _rounded(output, output.abs().max())


def _rounded(x: Tensor, peak: Tensor) -> Tensor:
    scale = peak.float().clamp(min=1e-12) / LARGEST_FP8
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def is_quantized(bench: Bench) -> bool:
    return bench.settings.quantization is not None or "quantization_config" in bench.built.checkpoint.stated


def check(bench: Bench, reference: Any) -> dict[str, Any]:
    """Compare the engine with a transformers model. Raises WrongAnswers."""
    answers = _ask(bench)
    chosen = answers[:2] + Random(1).sample(answers[2:], min(len(answers) - 2, MAX_COMPARED - 2))
    found = compare(chosen, reference, len(answers))
    note(str(found))
    weights, kv = rounds_inputs(bench), rounds_kv(bench)
    if not weights and not kv:
        judge(found, LIMITS[bench.dtype].times(FOUR_BITS if has_four_bits(bench) else 1))
        return {name: round(value, 4) for name, value in asdict(found).items()}
    usual = as_usual(chosen, reference, weights=weights, kv=kv)
    note(f"with 8 bits and a scale per tensor: {usual}")
    judge_like(found, usual)
    return {name: round(value, 4) for name, value in asdict(found).items()} | {"usual": asdict(usual)}


def judge(found: Agreement, limits: Limits) -> None:
    """Raises WrongAnswers."""
    if found.agreement < limits.min_agreement:
        raise WrongAnswers(
            f"only {found.agreement:.0%} of {found.num_compared_tokens} greedy tokens are the reference's"
        )
    if found.max_shortfall > limits.max_shortfall:
        raise WrongAnswers(f"a token's logit is {found.max_shortfall:.2f} deviations below the reference's best")
    if found.max_logprob_error > limits.max_logprob_error:
        raise WrongAnswers(f"a logprob is {found.max_logprob_error:.2f} deviations from the reference's")


def judge_like(found: Agreement, usual: Agreement) -> None:
    """Raises WrongAnswers. The worst of some hundred tokens says little where a small change may change any."""
    if found.agreement < usual.agreement - 0.05:
        raise WrongAnswers(
            f"{found.agreement:.0%} of the greedy tokens are the reference's, {usual.agreement:.0%} usually"
        )
    if found.mean_logprob_error > 1.2 * usual.mean_logprob_error:
        raise WrongAnswers(
            f"a logprob is {found.mean_logprob_error:.3f} deviations from the reference's, "
            f"{usual.mean_logprob_error:.3f} usually"
        )


def _ask(bench: Bench) -> list[Answer]:
    """Answers to two long prompts and many short ones, as many as run at once."""
    config = bench.engine.config
    total = min(MAX_SEQUENCES, config.max_num_seqs)
    rng = Random(0)
    spans = [LONG_TOKENS] * 2 + [SHORT_TOKENS] * (total - 2)
    longest = min(config.max_model_len, bench.engine.blocks.num_total * config.block_size // total) - ANSWER_TOKENS
    prompts = [bench.prompt(min(rng.randint(*span), longest)) for span in spans]
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, num_logprobs=NUM_LOGPROBS)
    answers = {}
    for prompt in prompts:
        seq = bench.sequence(prompt, sampling)
        bench.engine.add(seq)
        answers[seq.attempt_id] = Answer(prompt, [], [])
    for result in drain(bench.engine):
        for sampled in result.sampled:
            assert sampled.logprobs is not None
            answers[sampled.sequence.attempt_id].tokens.append(sampled.token)
            answers[sampled.sequence.attempt_id].logprobs.append(sampled.logprobs)
    return list(answers.values())


@torch.inference_mode()
def compare(answers: list[Answer], reference: Any, num_sequences: int) -> Agreement:
    """Compare each token of the answers with the reference's logits given the same preceding tokens."""
    agreed, num_tokens, shortfall, errors = 0, 0, 0.0, list[Tensor]()
    for answer in answers:
        logits = _logits(reference, answer)
        tokens = torch.tensor(answer.tokens, device=logits.device)
        deviation = logits.std(dim=-1)
        below = logits.max(dim=-1).values - logits.gather(1, tokens[:, None])[:, 0]
        agreed += int((logits.argmax(dim=-1) == tokens).sum())
        num_tokens += len(answer.tokens)
        shortfall = max(shortfall, float((below / deviation).max()))
        errors.append(_logprob_errors(logits, answer) / deviation)
    return _agreement(num_sequences, num_tokens, agreed, shortfall, torch.cat(errors))


def _logits(reference: Any, answer: Answer) -> Tensor:
    """The reference's logits for each token of the answer: [num_tokens, vocab_size], fp32."""
    ids = torch.tensor([[*answer.prompt, *answer.tokens[:-1]]], device=reference.device)
    output = reference(input_ids=ids, use_cache=False, logits_to_keep=len(answer.tokens))
    logits: Tensor = output.logits[0].float()
    return logits


def _logprob_errors(logits: Tensor, answer: Answer) -> Tensor:
    """The largest error among the logprobs reported for each token: [num_tokens]."""
    entries = [((token, said.logprob), *said.top) for token, said in zip(answer.tokens, answer.logprobs, strict=True)]
    width = min(map(len, entries))
    ids = torch.tensor([[token for token, _ in row[:width]] for row in entries], device=logits.device)
    ours = torch.tensor([[value for _, value in row[:width]] for row in entries], device=logits.device)
    return (logits.log_softmax(dim=-1).gather(1, ids) - ours).abs().amax(dim=-1)


def reference_of(bench: Bench) -> Any:
    """A plain transformers model with the same weights: those before they were quantized while loading; of a checkpoint
    that is quantized, what they stand for."""
    checkpoint = bench.built.checkpoint
    is_dummy, on_cpu = bench.settings.load_format == "dummy", bench.built.device.type == "cpu"
    if is_dummy and (bench.settings.quantization is not None or (on_cpu and not is_quantized(bench))):
        # The same are drawn again: the served model's may be packed by now, and gone in this form.
        model = build_skeleton(checkpoint.config, bench.dtype, "eager")
        move_empty(model, bench.built.device)
        fill_with_dummies(model)
        return model
    if is_dummy and not is_quantized(bench):
        model = build_skeleton(checkpoint.config, bench.dtype, "eager")
        _share_weights(bench.built.runner.model, model)
        move_empty(model, bench.built.device)
        return model
    if is_quantized(bench):  # loaded once more, for the same reason
        model = build_skeleton(checkpoint.config, bench.dtype, "eager")
        move_empty(model, bench.built.device)
        asked = bench.settings
        again = load_model(checkpoint, asked.dtype, bench.built.device, asked.load_format, asked.quantization)
        _copy_weights(again, model)
        return model
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=bench.dtype, attn_implementation="eager", trust_remote_code=False, local_files_only=True
    )
    return loaded.to(bench.built.device).eval()


@torch.no_grad()
def _share_weights(served: Any, reference: Any) -> None:
    """The reference gets no memory of its own: with twice its weights, a large model leaves none for KV."""
    own = dict(served.named_parameters())
    for name, parameter in reference.named_parameters():
        assert own[name].shape == parameter.shape, "the served model has its weights in another form"
        parameter.data = own[name].data


@torch.no_grad()
def _copy_weights(served: Any, reference: Any) -> None:
    own = dict(served.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in own and own[name].dtype == parameter.dtype:
            parameter.copy_(own[name])
    for name, module in linear_layers(reference):
        method = method_of(served.get_submodule(name))
        if isinstance(method, QuantizedLinear):
            columns = slice(None) if method.columns is None else method.columns
            module.weight[:, columns] = dequantize(method.weight, module.weight.dtype)
    for name, experts in expert_modules(reference):
        of = weights_of(served.get_submodule(name))
        if of is not None and of.gate_up_scale is not None:
            of = as_published(of) if of.arranged else of
            assert of.gate_up_scale is not None
            assert of.down_scale is not None
            store_values(experts, (of.gate_up, of.gate_up_scale), (of.down, of.down_scale), reference.dtype)
