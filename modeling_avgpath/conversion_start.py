# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""How a mixer of another kind begins with the weights of a softmax layer.

What decides the start: a softmax layer returns averages of its values. A memory that is read at the query returns what it
has fitted there, times constants: the op's scale, the gate, the nonlinearity of the convolution. Those constants are
undone in the output projection, so that a read at a stored key gives back the value that was stored with it.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .memory_identity import IdentityMixer
from .mixer import RecurrentMixer
from .softmax_models import SoftmaxLayer

# Root mean square at which a stream enters a short convolution. SiLU(x) = x/2 + x^2/4 - ... is close to x/2 there, so a
# kernel of one tap is the identity but for the half; it bends outliers of ten times the size by a quarter.
LINEAR_RANGE = 0.1
SMALLEST_EIGENVALUE = 1e-3  # of the keys' second moment that is inverted, relative to their mean
DEFAULT_STRENGTH = 0.5  # the step size of a memory of which nothing is known


@dataclass(frozen=True)
class InputMoments:
    """First and second moment of a layer's input: `mean` `[hidden_size]`, `second` `[hidden_size, hidden_size]`."""

    mean: torch.Tensor
    second: torch.Tensor

    @classmethod
    def isotropic(cls, norm: nn.Module) -> "InputMoments":
        """Those behind an RMSNorm of which nothing is known but its weight."""
        weight = norm.weight.detach().float()
        return cls(torch.zeros_like(weight), torch.diag(weight.square()))

    def of_rows(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Mean square `[...]` of each row of `weight x + bias`, weight `[..., hidden_size]`."""
        square = (weight @ self.second * weight).sum(-1)
        if bias is not None:
            square = square + 2 * bias * (weight @ self.mean) + bias.square()
        return square.clamp(min=0)


@dataclass(frozen=True)
class QueryFit:
    """What a calibration knows of the heads of one layer.

    Attributes:
        weight, bias: `[H, D, D]`, `[H, D]`, from a query to the mean key that its head attends to.
        gate: `[H, hidden_size]`, whose product with the input is the logit of the attention off the sink.
        constant: `[hidden_size]`, whose product with the input is close to 1.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    gate: torch.Tensor
    constant: torch.Tensor


@dataclass(frozen=True)
class HeadSettings:
    """Choices for the heads of one recurrent layer.

    Attributes:
        exponent: `[H]`, p of the factor C^(-p/2) before the keys, C their second moment: 0 leaves them, 1 whitens them.
        span: `[num_states]`, tokens after which a state has decayed to 1/e; `None` leaves the memory's initial decay.
        strength: `[num_states]`, the step size beta, between 0 and 1.
    """

    exponent: torch.Tensor
    span: torch.Tensor | None
    strength: torch.Tensor


@dataclass(frozen=True)
class HeadWeights:
    """Projections of a softmax layer with one key and value head for each query head, in fp32.

    Attributes:
        query, key, value: `[H, D, hidden_size]`; norms of queries and keys are folded in (see `read_heads`).
        query_bias: `[H, D]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_bias: torch.Tensor


def read_heads(layer: SoftmaxLayer, moments: InputMoments) -> HeadWeights:
    """The projections of a softmax layer, key heads repeated by head.

    A norm is replaced by its weight over the typical size of what it norms. That is exact for directions, which are all
    that a memory with unit keys looks at. Key biases are left out: without rotary embedding a constant in all keys adds
    the same to all scores of a query, which softmax does not see. Value biases have no place in a recurrent layer.
    """
    attention, size = layer.attention, layer.head_dim
    query, key, value = (
        projection.weight.detach().float().unflatten(0, (-1, size))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    bias = attention.q_proj.bias
    query_bias = torch.zeros_like(query[..., 0]) if bias is None else bias.detach().float().view(-1, size)
    if layer.q_norm is not None:
        factor = _norm_factor(layer.q_norm, query, moments, query_bias)
        query, query_bias = query * factor[..., None], query_bias * factor
        key = key * _norm_factor(layer.k_norm, key, moments)[..., None]
    key, value = (x.repeat_interleave(layer.groups, dim=0) for x in (key, value))
    return HeadWeights(query, key, value, query_bias)


def _norm_factor(norm: nn.Module, weight: torch.Tensor, moments: InputMoments, bias=None) -> torch.Tensor:
    """`[H, D]`: the weight of an RMSNorm, of each head or of all joined, over what it divides by on average."""
    scale = norm.weight.detach().float()
    square = moments.of_rows(weight, bias)
    square = square.mean(-1, keepdim=True) if scale.numel() == weight.shape[1] else square.mean()
    return scale.view(-1, weight.shape[1]) * square.clamp(min=1e-12).rsqrt()


def power(matrices: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """C^(-p/2) of positive semidefinite `[H, D, D]`, scaled to mean eigenvalue 1 first, with p `[H]`."""
    values, vectors = torch.linalg.eigh(matrices.double())
    values = values / values.mean(-1, keepdim=True).clamp(min=1e-30)
    factors = values.clamp(min=SMALLEST_EIGENVALUE) ** (-exponent.double()[:, None] / 2)
    return (vectors * factors[:, None] @ vectors.mT).float()


@torch.no_grad()
def start_mixer(
    mixer: nn.Module,
    layer: SoftmaxLayer,
    moments: InputMoments | None = None,
    settings: HeadSettings | None = None,
    fit: QueryFit | None = None,
) -> None:
    """Write the weights of a softmax layer into a mixer of another kind, in place.

    Args:
        mixer: fresh, of a model whose head shapes are those of `layer`.
        moments: of the layer's input; by default those of any input behind its norm.
        settings, fit: what a calibration has found; by default decay as initialised, step size 1/2, an identity query map.
    """
    moments = InputMoments.isotropic(layer.block.input_layernorm) if moments is None else moments
    if isinstance(mixer, IdentityMixer) or mixer.readout is not None:
        _start_scored(mixer, layer, moments)
    else:
        _start_query_read(mixer, layer, moments, settings, fit)
    if isinstance(mixer, RecurrentMixer):
        _start_memory(mixer, settings, fit)


def _copy_linear(target: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    target.weight.copy_(weight)
    if target.bias is not None:
        target.bias.zero_() if bias is None else target.bias.copy_(bias)


def _start_scored(mixer: nn.Module, layer: SoftmaxLayer, moments: InputMoments) -> None:
    """Mixers that score keys as the softmax layer does: key heads stay grouped, norms and rotary embedding stay."""
    attention = layer.attention
    scale = dict.fromkeys("qkv", 1.0)
    for name in mixer.conv_streams if getattr(mixer, "has_conv", False) else ():
        projection = getattr(attention, f"{name}_proj")
        bias = None if projection.bias is None else projection.bias.detach().float()
        scale[name] = _to_linear_range(moments.of_rows(projection.weight.detach().float(), bias).mean()).item()
        _start_conv(getattr(mixer, f"{name}_conv1d"))
    if isinstance(mixer, RecurrentMixer) and not mixer.has_unit_keys and not mixer.has_conv:
        square = moments.of_rows(attention.v_proj.weight.detach().float()).mean()
        scale["v"] = square.clamp(min=1e-12).rsqrt().item()
    for name in "qkv":
        if hasattr(mixer, f"{name}_proj"):
            source = getattr(attention, f"{name}_proj")
            bias = None if source.bias is None else source.bias * scale[name]
            _copy_linear(getattr(mixer, f"{name}_proj"), source.weight * scale[name], bias)
    if mixer.q_norm is not None:
        mixer.q_norm.load_state_dict(layer.q_norm.state_dict())
        mixer.k_norm.load_state_dict(layer.k_norm.state_dict())
    gain = 1.0
    if isinstance(mixer, RecurrentMixer):
        # The sink keeps its share of the scores and its small value in the memory: the gate has nothing to do yet.
        gain = _gate_gain(mixer, None)
        if mixer.o_norm is not None:
            gain *= moments.of_rows(attention.v_proj.weight.detach().float()).mean().sqrt().item()
        else:
            gain *= (2 if mixer.has_conv and "v" in mixer.conv_streams else 1) / scale["v"]
    elif mixer.g_proj is not None:
        mixer.g_proj.load_state_dict(attention.g_proj.state_dict())
    _start_output(mixer, layer, torch.full((layer.num_heads,), gain))


def _start_query_read(
    mixer: RecurrentMixer,
    layer: SoftmaxLayer,
    moments: InputMoments,
    settings: HeadSettings | None,
    fit: QueryFit | None,
) -> None:
    heads = read_heads(layer, moments)
    key, value, query, query_bias = heads.key, heads.value, heads.query, heads.query_bias
    size = layer.head_dim
    map_weight = torch.eye(size, device=query.device).repeat(layer.num_heads, 1, 1)
    map_bias = query_bias
    if fit is not None:
        map_weight = fit.weight
        map_bias = fit.bias + torch.einsum("hoi,hi->ho", fit.weight, query_bias)
    if settings is not None and bool(settings.exponent.any()):
        factor = power(key @ moments.second @ key.mT, settings.exponent)
        key, map_weight = factor @ key, factor @ map_weight
        map_bias = torch.einsum("hoi,hi->ho", factor, map_bias)
    mapped = map_weight @ query

    # Sizes: what enters a convolution goes into its linear range; keys and values of TTT are taken to unit size, for which
    # its learning rate is made. Unit keys forget their size in any case.
    ones = torch.ones(layer.num_heads, device=query.device)
    scale = {"q": ones, "k": ones, "v": ones}
    mean_square = {
        "q": moments.of_rows(mapped, map_bias if mixer.query_map is not None else None).mean(-1),
        "k": moments.of_rows(key).mean(-1),
        "v": moments.of_rows(value).mean(-1),
    }
    for name in "qkv":
        if mixer.has_conv and name in mixer.conv_streams:
            scale[name] = _to_linear_range(mean_square[name])
            _start_conv(getattr(mixer, f"{name}_conv1d"))
        elif not mixer.has_unit_keys:
            scale[name] = mean_square[name].clamp(min=1e-12).rsqrt()
    if mixer.query_map is not None:
        mixer.query_map.weight.copy_(map_weight)
        mixer.query_map.bias.copy_(map_bias * scale["q"][:, None])
    else:
        query = mapped
    for name, weight in (("q", query), ("k", key), ("v", value)):
        _copy_linear(getattr(mixer, f"{name}_proj"), (weight * scale[name][:, None, None]).flatten(0, 1))

    gain = _gate_gain(mixer, fit) * ones
    if mixer.o_norm is not None:
        gain = gain * mean_square["v"].sqrt()
    else:
        gain = gain / scale["v"]
        if mixer.has_conv and "v" in mixer.conv_streams:
            gain = gain * 2  # SiLU(x) is close to x / 2
        if not memory_name(mixer).startswith(("mesa", "ttt")):
            gain = gain * mixer.key_dim**0.5  # the op's scale
    _start_output(mixer, layer, gain)


def memory_name(mixer: nn.Module) -> str:
    """The memory of a mixer, such as `delta_net`."""
    return mixer.config.mixer_specs[mixer.layer_idx].memory


def _to_linear_range(mean_square: torch.Tensor) -> torch.Tensor:
    return LINEAR_RANGE * mean_square.clamp(min=1e-12).rsqrt()


def _start_conv(conv: nn.Conv1d) -> None:
    """A kernel whose last tap, the present token's, is 1."""
    conv.weight.zero_()
    conv.weight[..., -1] = 1


def _gate_gain(mixer: RecurrentMixer, fit: QueryFit | None) -> float:
    """Start the output gate at a constant, or at what the calibration says; returns what undoes it.

    A sigmoid is 1/2 at weight 0. SiLU and GELU would close there, so their gate stays as initialised.
    """
    if mixer.g_proj is None:
        return 1.0
    if mixer.gate_activation != "sigmoid":
        return 1.0
    if fit is None:
        mixer.g_proj.weight.zero_()
        return 2.0
    mixer.g_proj.weight.copy_(fit.gate.repeat_interleave(mixer.value_dim, dim=0))
    return 1.0


def _start_output(mixer: nn.Module, layer: SoftmaxLayer, gain: torch.Tensor) -> None:
    """The output projection, with a factor `[H]` on what it reads of each head."""
    source = layer.attention.o_proj
    gain = gain.to(source.weight.device).repeat_interleave(layer.head_dim)
    _copy_linear(mixer.o_proj, source.weight * gain, source.bias)


def _start_memory(mixer: RecurrentMixer, settings: HeadSettings | None, fit: QueryFit | None) -> None:
    """Constant gates: step size and decay that do not depend on the text, until they are trained.

    A projection without bias gives a constant through the direction of the input that is nearly one (`QueryFit.constant`);
    without a calibration the step size is the 1/2 of a sigmoid at zero.
    """
    memory = memory_name(mixer)
    states = mixer.num_states
    strength = torch.full((states,), DEFAULT_STRENGTH) if settings is None else settings.strength.cpu()
    bias = torch.logit(strength.clamp(1e-3, 1 - 1e-3)).to(mixer.o_proj.weight.device)
    if memory.startswith("ttt"):
        mixer.learnable_ttt_lr_weight.zero_()
        mixer.learnable_ttt_lr_bias.copy_(bias[:, None])
        return
    if hasattr(mixer, "b_proj"):
        mixer.b_proj.weight.zero_()
        if mixer.b_proj.bias is not None:
            mixer.b_proj.bias.copy_(bias)
        elif fit is not None:
            if mixer.config.linear_allow_neg_eigval:  # which doubles it
                bias = torch.logit((strength / 2).clamp(min=1e-3)).to(bias.device)
            mixer.b_proj.weight.copy_(bias[:, None] * fit.constant)
    if not hasattr(mixer, "a_proj"):
        return
    mixer.a_proj.weight.zero_()
    if settings is None or settings.span is None:
        return
    rate = (1 / settings.span).to(bias.device)  # per token
    if memory == "gated_delta_net":
        mixer.A_log.zero_()
        mixer.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))  # the inverse of softplus
    else:
        mixer.a_proj.bias.copy_(-torch.log(torch.expm1(rate)))  # logsigmoid of it is -rate


@torch.no_grad()
def read_memory(
    mixer: nn.Module, hidden_states: torch.Tensor, position_embeddings=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a mixer hands its output projection `[B, T, H * D]`, gate included, and what it returns `[B, T, hidden_size]`."""
    seen = []
    handle = mixer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        output, _ = mixer(hidden_states, position_embeddings=position_embeddings)
    finally:
        handle.remove()
    return seen[0], output


def explained(reads: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squared cosine `[H]` between `reads` and `targets` `[..., H, D]`: the share that the best factor explains."""
    reads, targets = (x.float().flatten(0, -3) for x in (reads, targets))
    inner = (reads * targets).sum((0, 2))
    norms = reads.square().sum((0, 2)) * targets.square().sum((0, 2))
    return inner.square() / norms.clamp(min=1e-30)


def best_factor(reads: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The factor `[H]` on `reads` that brings them closest to `targets` `[..., H, D]`."""
    reads, targets = (x.float().flatten(0, -3) for x in (reads, targets))
    return (reads * targets).sum((0, 2)) / reads.square().sum((0, 2)).clamp(min=1e-30)
