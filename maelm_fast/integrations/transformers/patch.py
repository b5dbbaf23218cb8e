"""patch(): a Hugging Face encoder that somebody has, on our ops, in the loop that they have.

    model = patch(AutoModelForMaskedLM.from_pretrained("roberta-base"))     # then train it as before
    unpatch(model)                                                          # bit for bit what it was

Only this instance changes: some of its modules get a `forward` of their own, its config a copy of its own that says
which attention runs. Parameters, their names, save_pretrained and what it saves stay as they are.

Padding leaves at the base model's door and returns at its exit, as zeros: poolers and heads see what they always saw.
What needs more than that, for one call, runs as stock does, which is said once (why_stock).

Shapes: B sequences padded to L, T tokens without padding, M tokens to predict, d hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.config import require
from maelm_fast.integrations.transformers.attention import NAME
from maelm_fast.integrations.transformers.families import FAMILIES, Family
from maelm_fast.ops import PaddedLayout

log = logging.getLogger(__name__)

IGNORED = -100  # a label that asks for nothing
TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", "task_type_ids", "position_ids")  # (B, L, ...)
PACKED_BY = ("cu_seq_lens_q", "sequence_lengths", "layout", "position_ids")
DECODERS_INPUTS = ("past_key_values", "use_cache", "encoder_hidden_states", "encoder_attention_mask")
MEANS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")
"""Whose loss is a mean over the labels that are not IGNORED."""
READS_NO_PADDING = ("ForMaskedLM", "ForTokenClassification", "Model")
"""Classes that do nothing with a padded column, if they have no pooler."""


@dataclass
class Patch:
    """What patch() did to `model`. implementation: of attention, before. unpad, attention, head: what was asked for,
    head only of a model that has one. base_inputs, inputs: names of what the base model and the model take, in order.
    padding_read: of which padded columns the states mean something to what follows the base model. layout: of the batch
    that is on its way through the base model, packed. places: modules, and under which name they were given what. told:
    why something ran as stock does, so that it is said once."""

    model: nn.Module
    model_type: str
    implementation: str
    unpad: bool
    attention: bool
    head: bool
    base_inputs: tuple[str, ...]
    inputs: tuple[str, ...]
    padding_read: Literal["none", "first", "all"]
    layout: PaddedLayout | None = None
    places: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def dispatches(self) -> bool:
        """Whether its attention is chosen by name."""
        return not self.family.attention


class Patched:
    """Stands in a module's own attribute where its class has a method. It is a bound method but for two things: it can
    be pickled, and it has the signature of the method, by which Trainer knows what to give."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, name: str = "forward") -> None:
        self.__func__, self.__self__, self.name = function, module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        stock = inspect.signature(getattr(type(self.__self__), self.name))
        return stock.replace(parameters=list(stock.parameters.values())[1:])


def patch(model: Any, *, unpad: bool = True, attention: bool = True, norm: bool = True, head: bool = True) -> Any:
    """The model itself, patched: a PreTrainedModel of transformers whose config.model_type is one of FAMILIES, its base
    model alone or with a task's head.

    unpad: padded batches run as one row of their tokens. `last_hidden_state` and `hidden_states` come back (B, L, d), 0
    where stock has the states of padding; positions are those that stock would have used. attention: `maelm`, ours;
    unpad needs it. norm: dropout, residual and LayerNorm as one op, in the families that end a sublayer so: all but
    ModernBERT. head: a masked-LM model in training mode that is given labels takes only the tokens with a label through
    its head and to the loss, and returns no logits; in evaluation mode it returns the logits that it always did.

    With any of them a loss that is a mean over labels becomes their sum over `num_items_in_batch` where the caller
    gives that, as Trainer does, so that accumulating gradients is exact; stock's encoders ignore it.

    Dropout draws its seeds from PyTorch's generator: reproducible under torch.manual_seed, other bits than stock's.

    Raises UserError for another model type, a decoder, a model that is patched or wrapped already; when called, for
    labels at padding, whose states are never computed."""
    from transformers import PreTrainedModel

    require(
        isinstance(model, PreTrainedModel),
        f"patch: {type(model).__name__} is no model of transformers; give the one inside (of a SentenceTransformer: "
        "model[0].auto_model), before anything wraps it",
    )
    config = model.config
    require(
        config.model_type in FAMILIES,
        f"patch: model type '{config.model_type}' is not supported; there are: {', '.join(FAMILIES)}. Attention alone "
        f"may be: attn_implementation='{NAME}'",
    )
    decodes = getattr(config, "is_decoder", False) or config.is_encoder_decoder or "CausalLM" in type(model).__name__
    require(not decodes, "patch: a decoder, with causal or cross-attention; only encoders are supported")
    require(attention or not unpad, "patch: unpad=True needs attention=True: no other keeps a packed row's texts apart")
    base, family = model.base_model, FAMILIES[config.model_type]
    require(
        unpad or not attention or not family.attention,
        f"patch: attention without unpad is chosen by name, which {config.model_type} cannot: attention=False too",
    )
    require(
        not any("maelm_patch" in module.__dict__ for module in model.modules()),
        "patch: the model is patched already; unpatch(model) first",
    )
    require(
        _is_stock(base),
        f"patch: {type(base).__name__} is not a class of transformers' own, and its forward may be anything: give the "
        "encoder inside it",
    )
    pooler = getattr(base, "pooler", None)
    state = Patch(
        model,
        config.model_type,
        config._attn_implementation,
        unpad,
        attention,
        head and _has_plain_decoder(model),
        _inputs_of(base),
        _inputs_of(model),
        _padding_read(model, pooler),
    )
    put: list[tuple[Any, str, Callable[..., Any]]] = [(base, "forward", run_base)] if attention else []
    put += [(pooler, "forward", pool)] if unpad and pooler is not None else []
    put += [(model, "forward", run_task)] if model is not base and _is_stock(model) else []
    for module in filter(_is_stock, base.modules()):
        name = type(module).__name__
        put += [(module, m, function) for (kind, m), function in family.attention.items() if attention and name == kind]
        put += [(module, "forward", f) for ending, f in family.norm.items() if norm and name.endswith(ending)]
    for module, name, _ in put:
        require(
            name not in module.__dict__,
            f"patch: {type(module).__name__} has a {name} of its own already, put there by accelerate, by hooks or by "
            "you; patch before that",
        )
    for module, name, function in put:
        setattr(module, name, Patched(function, module, name))
        module.maelm_patch = state
    model.maelm_patch, state.places = state, put
    if attention:
        _own_config(model)
        if state.dispatches:
            model.set_attn_implementation(NAME)
    return model


def unpatch(model: Any) -> Any:
    """The model as patch() found it; it keeps the config of its own. Raises UserError if it is not patched, or was
    wrapped since."""
    state = model.__dict__.get("maelm_patch")
    require(state is not None, "unpatch: it is not patched")
    require(state.model is model, f"unpatch: it was patched as part of a {type(state.model).__name__}; give that")
    for module, name, function in state.places:
        require(
            getattr(module.__dict__.get(name), "__func__", None) is function,
            f"unpatch: the {name} of {type(module).__name__} has been wrapped since (accelerate does it for mixed "
            "precision): unwrap it first, accelerator.unwrap_model(model, keep_fp32_wrapper=False)",
        )
    for module, name, _ in state.places:
        delattr(module, name)
        module.__dict__.pop("maelm_patch", None)
    model.__dict__.pop("maelm_patch", None)
    model.config._attn_implementation = state.implementation
    return model


def run_base(base: Any, *args: Any, **kwargs: Any) -> Any:
    """The base model: its tokens go in as one row, (1, T), and their states come out as a batch, (B, L, d)."""
    state: Patch = base.maelm_patch
    inputs = dict(zip(state.base_inputs, args, strict=False)) | kwargs
    if state.dispatches and _is_packed(inputs):
        return type(base).forward(base, **inputs)
    if why := _why_stock(base, inputs):
        return _as_stock(base, inputs, why)
    layout = _layout(inputs)
    if why := _why_stock_batch(state, layout):
        return _as_stock(base, inputs, why)
    if not state.unpad:
        return type(base).forward(base, **inputs)
    inputs["position_ids"] = _positions(base, inputs, layout)
    packed = {name: _packed(inputs[name], layout) for name in TOKENS if inputs.get(name) is not None}
    shared = {"layout": layout} if state.dispatches else {}
    state.layout = layout
    try:
        out = type(base).forward(base, **inputs | packed | shared | {"attention_mask": None})
    finally:
        state.layout = None
    if isinstance(out, tuple):
        return _padded(out, layout)
    for name, found in out.items():
        out[name] = _padded(found, layout)
    return out


def pool(pooler: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A pooler, which reads each text's first token: of a packed row they are taken out."""
    layout = pooler.maelm_patch.layout
    if layout is not None:
        hidden_states = hidden_states[0].index_select(0, layout.queries.cu_seqlens[:-1])[:, None]
    return type(pooler).forward(pooler, hidden_states, *args, **kwargs)


def run_task(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A model with a task's head."""
    state: Patch = model.maelm_patch
    inputs = dict(zip(state.inputs, args, strict=False)) | kwargs
    labels, items = inputs.get("labels"), inputs.pop("num_items_in_batch", None)
    if labels is None:
        return type(model).forward(model, **inputs)
    name, asked = type(model).__name__, labels != IGNORED
    if state.attention and name.endswith(("ForMaskedLM", "ForTokenClassification")):
        _check_labels(asked, inputs.get("attention_mask"))
    returns_dict = inputs.pop("return_dict", None)
    if returns_dict is None:
        returns_dict = model.config.return_dict
    if state.head and model.training:
        out = _masked_lm(model, inputs, asked, items)
    else:
        out = type(model).forward(model, **inputs, return_dict=True)
        if items is not None and name.endswith(MEANS):
            out.loss = out.loss * asked.sum() / items
    return out if returns_dict else out.to_tuple()


def _masked_lm(model: Any, inputs: dict[str, Any], asked: Tensor, items: Tensor | int | None) -> Any:
    """Head and loss of the tokens with a label, and no logits."""
    from transformers.modeling_outputs import MaskedLMOutput

    state: Patch = model.maelm_patch
    labels = inputs.pop("labels")
    out = model.base_model(**inputs, return_dict=True)
    states = out.last_hidden_state
    rows = asked.flatten().nonzero().squeeze(1)
    decoder = model.get_output_embeddings()
    bias = decoder.weight.new_zeros(decoder.out_features) if decoder.bias is None else decoder.bias
    loss, _ = ops.masked_cross_entropy(
        state.family.transform(model, states.flatten(0, 1).index_select(0, rows.to(states.device))),
        decoder.weight,
        bias,
        labels.flatten()[rows].to(states.device, torch.int32),
        vocab_size=decoder.out_features,
    )
    loss = loss / (rows.shape[0] if items is None else items)
    return MaskedLMOutput(loss=loss, hidden_states=out.hidden_states, attentions=out.attentions)


def _check_labels(asked: Tensor, mask: Any) -> None:
    if not isinstance(mask, Tensor) or mask.shape != asked.shape:
        return
    stray = asked & (mask == 0).to(asked.device)
    why = f"labels stand at padding (attention_mask is 0), where a patched model computes nothing: make them {IGNORED}"
    if torch.compiler.is_compiling():  # a number would end the graph
        torch._assert_async(~stray.any(), why)
    else:
        require(not stray.any(), why)


def _is_packed(inputs: dict[str, Any]) -> bool:
    """Whether it is one row that its caller packed, and says how, to the attention."""
    tokens = _tokens(inputs)
    given = any(inputs.get(name) is not None for name in PACKED_BY)
    return given and tokens.shape[0] == 1 and inputs.get("attention_mask") is None


def _why_stock(base: Any, inputs: dict[str, Any]) -> str:
    """What of these inputs needs stock's attention; "" if nothing."""
    require(
        inputs.get("cu_seq_lens_q") is None,
        f"cu_seq_lens_q: a packed row is a batch of 1 without attention_mask, and not for {type(base).__name__} if its "
        "attention is not chosen by name; give padded batches, which are packed here",
    )
    if inputs.get("output_attentions") or getattr(base.config, "output_attentions", False):
        return "attention weights are asked for (output_attentions)"
    if given := [name for name in DECODERS_INPUTS if not (inputs.get(name) is None or inputs[name] is False)]:
        return f"{', '.join(given)} is for decoders"
    mask = inputs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return "the attention mask is not (batch, length)"
    return ""


def _why_stock_batch(state: Patch, layout: PaddedLayout) -> str:
    """What of this batch needs the states of padding; "" if nothing."""
    if 0 in layout.queries.lengths:
        return "a row is padding throughout"
    if state.padding_read == "all" and layout.rows is not None:
        return "question answering chooses among all columns, padding too"
    if state.padding_read == "first" and layout.rows is not None:
        tokens = layout.queries
        if tokens.positions.index_select(0, tokens.cu_seqlens[:-1]).any():
            return "the first column, which a pooler or head reads, is padding (left-padded)"
    return ""


def _as_stock(base: Any, inputs: dict[str, Any], why: str) -> Any:
    """The base model with the attention it came with, on the batch as it came."""
    state: Patch = base.maelm_patch
    require(
        not (base.training and any(getattr(m, "gradient_checkpointing", False) for m in base.modules())),
        f"{why}: such a call runs as stock does, and not under gradient checkpointing, which would compute it again as "
        "patched",
    )
    if why not in state.told:
        state.told.add(why)
        log.warning("%s runs as without patch() where %s", type(base).__name__, why)
    with _attention(base.config, state.implementation):
        return type(base).forward(base, **inputs)


@contextlib.contextmanager
def _attention(config: Any, implementation: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _tokens(inputs: dict[str, Any]) -> Tensor:
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if (ids is None) == (embeddings is None):
        raise ValueError("give either input_ids or inputs_embeds")  # stock's error
    tokens = embeddings if ids is None else ids
    assert isinstance(tokens, Tensor)
    return tokens


def _layout(inputs: dict[str, Any]) -> PaddedLayout:
    tokens, mask = _tokens(inputs), inputs.get("attention_mask")
    if mask is None:
        return PaddedLayout.full(tokens.shape[0], tokens.shape[1], tokens.device)
    return ops.layout_from_mask(mask.to(tokens.device), inputs.get("sequence_lengths"))


def _positions(base: Any, inputs: dict[str, Any], layout: PaddedLayout) -> Tensor:
    """(B, L): those that the caller gave, else those that stock would have made of the padded batch."""
    ids: Tensor | None = inputs.get("input_ids")
    given: Tensor | None = inputs.get("position_ids")
    if given is not None:
        return given
    columns = torch.arange(layout.shape[1], device=layout.queries.positions.device).expand(layout.shape)
    if not base.maelm_patch.family.positions_skip_padding:
        return columns
    padding: int = base.embeddings.padding_idx
    if ids is None:
        return columns + padding + 1
    tokens = ids.ne(padding)
    return tokens.cumsum(1) * tokens + padding


def _packed(x: Tensor, layout: PaddedLayout) -> Tensor:
    """(B, L, ...) or, for the whole batch, (1, L, ...) -> (1, T, ...)."""
    return ops.unpad(x.expand(layout.shape[0], *x.shape[1:]), layout)[None]


def _padded(found: Any, layout: PaddedLayout) -> Any:
    """Of an output the states, (1, T, d) -> (B, L, d), in tuples too; the rest as it is."""
    if isinstance(found, tuple):
        return tuple(_padded(part, layout) for part in found)
    if isinstance(found, Tensor) and found.dim() == 3 and found.shape[:2] == (1, layout.queries.num_tokens):
        return ops.repad(found[0], layout)
    return found


def _own_config(model: Any) -> None:
    """Models built from one config object share it, and with it the attention that it names."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            module.config = own


def _is_stock(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _inputs_of(model: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def _has_plain_decoder(model: Any) -> bool:
    """Whether it is a masked-LM model whose last layer is a Linear with nothing in it or around it."""
    return type(model).__name__.endswith("ForMaskedLM") and type(model.get_output_embeddings()) is nn.Linear


def _padding_read(model: Any, pooler: Any) -> Literal["none", "first", "all"]:
    name = type(model).__name__
    if name.endswith("ForQuestionAnswering"):
        return "all"
    return "none" if pooler is None and name.endswith(READS_NO_PADDING) else "first"
