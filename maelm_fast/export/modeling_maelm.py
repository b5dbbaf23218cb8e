"""MAE-LM encoders for Hugging Face transformers, as remote code: this file travels with the weights and stands alone.

The encoder's relative position bias follows the positions of the tokens; they count from each sequence's first real
token, so left and right padding give the same result. MaeLmForMaskedLM is the whole pretraining network: its encoder
does not attend to [MASK], its decoder does the predicting.

Shapes: B sequences, L padded length, d hidden size, H heads, V vocabulary, P positions.
"""
# ruff: noqa: RUF012 (the class attributes are declared, and mutable, in PreTrainedModel)

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


class MaeLmConfig(PretrainedConfig):
    """relative_bias: "none", "t5" or "released" (the ceil rule of the authors' code). decoder_kind: "self", "cross" or
    "none"; with "none" the encoder reads [MASK] as RoBERTa does. max_position_embeddings is the longest sequence."""

    model_type = "maelm"

    def __init__(
        self,
        *,
        vocab_size: int = 32768,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 512,
        relative_bias: str = "t5",
        relative_buckets: int = 32,
        relative_max_distance: int = 128,
        decoder_kind: str = "self",
        decoder_layers: int = 4,
        decoder_relative_bias: bool = False,
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        classifier_dropout: float = 0.1,
        layer_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        bos_token_id: int = 0,
        pad_token_id: int = 1,
        eos_token_id: int = 2,
        mask_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id, self.pad_token_id, self.eos_token_id = bos_token_id, pad_token_id, eos_token_id
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.relative_bias = relative_bias
        self.relative_buckets = relative_buckets
        self.relative_max_distance = relative_max_distance
        self.decoder_kind = decoder_kind
        self.decoder_layers = decoder_layers
        self.decoder_relative_bias = decoder_relative_bias
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.classifier_dropout = classifier_dropout
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id


def _log_bucket(d: int, exact: int, buckets: int, furthest: int, up: bool) -> int:
    """exact + buckets * log(d/exact) / log(furthest/exact), rounded down (at most exact + buckets - 1) or up (at most
    exact + buckets), by comparing integers."""
    i = 0
    if up:
        while i < buckets and furthest**i * exact**buckets < d**buckets * exact**i:
            i += 1
    else:
        while i < buckets - 1 and d**buckets * exact ** (i + 1) >= furthest ** (i + 1) * exact**buckets:
            i += 1
    return exact + i


def bucket(distance: int, rule: str, buckets: int, max_distance: int) -> int:
    """Bucket of distance = key position - query position."""
    half, exact, d = buckets // 2, buckets // 4, abs(distance)
    if rule == "t5":  # each sign has half of the buckets
        magnitude = d if d < exact else _log_bucket(d, exact, half - exact, max_distance, up=False)
        return magnitude + (half if distance > 0 else 0)
    magnitude = d if d < exact else _log_bucket(d, exact, half - 1 - exact, max_distance - 1, up=True)
    return half - 1 + (magnitude if distance > 0 else -magnitude)  # symmetric about the centre


class MaeLmRelativeBias(nn.Embedding):
    """One table (buckets, H) shared by the layers of a stack. The buckets of distances -(P-1) to P-1 are stored with
    the weights: transformers builds models on the meta device, where a buffer that is not stored would be lost."""

    buckets: Tensor

    def __init__(self, config: MaeLmConfig, rule: str) -> None:
        super().__init__(config.relative_buckets, config.num_attention_heads)
        reach = range(1 - config.max_position_embeddings, config.max_position_embeddings)
        line = [bucket(d, rule, config.relative_buckets, config.relative_max_distance) for d in reach]
        self.register_buffer("buckets", torch.tensor(line))

    def forward(self, positions: Tensor) -> Tensor:
        """positions: (B or 1, L). Returns (B or 1, H, L, L)."""
        distance = positions[:, None, :] - positions[:, :, None]
        return self.weight[self.buckets[distance + self.buckets.shape[0] // 2]].permute(0, 3, 1, 2)


class MaeLmAttention(nn.Module):
    def __init__(self, config: MaeLmConfig, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout_p = config.num_attention_heads, dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None, memory: Tensor | None, empty: Tensor | None) -> Tensor:
        """x: (B, L, d). mask: added to the scaled scores. memory: (B, L, d), what is attended to; x if None.
        empty: (B,) True for sequences with nothing to attend to; their attention is 0."""
        d = x.shape[-1]
        if memory is None:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        elif type(self.qkv) is not nn.Linear:  # an adapter stands in its place
            q, (k, v) = self.qkv(x)[..., :d], self.qkv(memory)[..., d:].chunk(2, dim=-1)
        else:
            q = F.linear(x, self.qkv.weight[:d], self.qkv.bias[:d])
            k, v = F.linear(memory, self.qkv.weight[d:], self.qkv.bias[d:]).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout_p if self.training else 0.0)
        mixed = mixed.transpose(1, 2).flatten(2)
        if empty is not None:
            mixed = mixed.masked_fill(empty[:, None, None], 0.0)
        out: Tensor = self.out(mixed)
        return out


class MaeLmBlock(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual and LayerNorm."""

    def __init__(self, config: MaeLmConfig, hidden_dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.attention = MaeLmAttention(config, attention_dropout)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(config.hidden_size, config.intermediate_size)
        self.ffn_out = nn.Linear(config.intermediate_size, config.hidden_size)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, empty: Tensor | None = None
    ) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask, memory, empty)))
        result: Tensor = self.ffn_norm(x + self.dropout(self.ffn_out(F.gelu(self.ffn_in(x)))))
        return result


class MaeLmPreTrainedModel(PreTrainedModel):
    config_class = MaeLmConfig
    config: MaeLmConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _no_split_modules = ["MaeLmBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^head\."]  # fine-tuning leaves them behind


class MaeLmModel(MaeLmPreTrainedModel):
    """The encoder."""

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__(config)
        self.token_embedding: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        rule = config.relative_bias
        self.relative_bias = MaeLmRelativeBias(config, rule) if rule != "none" else None
        dropouts = config.hidden_dropout_prob, config.attention_probs_dropout_prob
        self.blocks = nn.ModuleList(MaeLmBlock(config, *dropouts) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.token_embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        visible: Tensor | None = None,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """input_ids: (B, L). attention_mask: (B, L), 1 for real tokens. position_ids: (B, L); by default 0, 1, ... from
        each sequence's first real token. visible: (B, L), the tokens that may be attended to, if not all real ones."""
        x = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        places, steps = _positions(self.config, x.shape[1], x.device, attention_mask, position_ids)
        x = self.dropout(self.embedding_norm(x + self.position_embedding(places)))
        bias = self.relative_bias(steps) if self.relative_bias is not None else None
        mask = _additive_mask(bias, attention_mask if visible is None else visible, x.dtype)
        layers = [x]
        for block in self.blocks:
            layers.append(block(layers[-1], mask))
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(last_hidden_state=layers[-1], hidden_states=tuple(layers) if wanted else None)
        return output.to_tuple() if return_dict is False else output


def _positions(
    config: MaeLmConfig, length: int, device: torch.device, attention_mask: Tensor | None, position_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(places, steps): positions to embed, and positions (1 or B, L) whose differences are the tokens' distances."""
    if position_ids is not None:
        return position_ids, position_ids
    if length > config.max_position_embeddings:
        raise ValueError(f"sequences of {length} tokens; this model reads at most {config.max_position_embeddings}")
    steps = torch.arange(length, device=device)[None, :]
    if attention_mask is None:
        return steps, steps
    return (steps - attention_mask.long().argmax(dim=1, keepdim=True)).clamp(min=0), steps


def _additive_mask(bias: Tensor | None, keys: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scaled scores, or None. A sequence without keys attends to everything: no NaN arises."""
    if keys is None:
        return None if bias is None else bias.to(dtype)
    blocked = ~keys.bool() & keys.bool().any(dim=1, keepdim=True)
    bias = torch.zeros(1, 1, 1, keys.shape[1], device=keys.device) if bias is None else bias
    return bias.to(dtype).masked_fill(blocked[:, None, None, :], torch.finfo(dtype).min)


class MaeLmDecoder(nn.Module):
    """Fills the places of [MASK] with its embedding, has positions of its own, and no dropout."""

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__()
        self.config = config
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        rule = "t5" if config.relative_bias == "none" else config.relative_bias
        self.relative_bias = MaeLmRelativeBias(config, rule) if config.decoder_relative_bias else None
        self.blocks = nn.ModuleList(MaeLmBlock(config, 0.0, 0.0) for _ in range(config.decoder_layers))

    def forward(
        self,
        encoded: Tensor,
        masked: Tensor,
        visible: Tensor,
        mask_embedding: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """encoded: (B, L, d). masked, visible: (B, L) bool. Returns (B, L, d)."""
        places, steps = _positions(self.config, encoded.shape[1], encoded.device, attention_mask, position_ids)
        x: Tensor = torch.where(masked[..., None], mask_embedding.to(encoded.dtype), encoded)
        x = self.embedding_norm(x + self.position_embedding(places))
        bias = self.relative_bias(steps) if self.relative_bias is not None else None
        cross = self.config.decoder_kind == "cross"
        mask = _additive_mask(bias, visible if cross else attention_mask, x.dtype)
        for block in self.blocks:
            x = block(x, mask, encoded, ~visible.any(dim=1)) if cross else block(x, mask)
        return x


class MaeLmHead(nn.Module):
    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.projection = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(F.gelu(self.dense(x))))
        return logits


class MaeLmForMaskedLM(MaeLmPreTrainedModel):
    """Encoder, decoder and head. Put [MASK] where tokens are to be predicted: those places are hidden from the encoder
    and predicted by the decoder. `logits` (B, L, V) has scores everywhere; pretraining taught only those at [MASK]."""

    _tied_weights_keys = {"head.projection.weight": "encoder.token_embedding.weight"}
    _keys_to_ignore_on_load_unexpected = []

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__(config)
        self.encoder = MaeLmModel(config)
        self.decoder = MaeLmDecoder(config) if config.decoder_kind != "none" else None
        self.head = MaeLmHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head.projection

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.head.projection = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """labels: (B, L), -100 where no loss is wanted. hidden_states are the encoder's."""
        masked, visible = input_ids == self.config.mask_token_id, None
        if self.decoder is not None:
            visible = ~masked if attention_mask is None else ~masked & attention_mask.bool()
        encoded = self.encoder(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            visible=visible,
        )
        x = encoded.last_hidden_state
        if self.decoder is not None:
            table: Any = self.encoder.token_embedding.weight
            mask_embedding = table[self.config.mask_token_id]
            x = self.decoder(
                x, masked, visible, mask_embedding, attention_mask=attention_mask, position_ids=position_ids
            )
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) if labels is not None else None
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output.to_tuple() if return_dict is False else output


class MaeLmForSequenceClassification(MaeLmPreTrainedModel):
    """The first real token's vector -> dropout -> dense -> tanh -> dropout -> linear."""

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.encoder = MaeLmModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """labels: (B,) classes; (B,) numbers if there is one label; (B, labels) zeros and ones if
        config.problem_type is "multi_label_classification"."""
        encoded = self.encoder(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
        )
        x = encoded.last_hidden_state
        if attention_mask is None:
            first = x[:, 0]
        else:
            first = x[torch.arange(x.shape[0], device=x.device), attention_mask.long().argmax(dim=1)]
        logits = self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(first)))))
        loss = self._loss(logits.float(), labels) if labels is not None else None
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output.to_tuple() if return_dict is False else output

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.problem_type == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, labels.float())
        if self.config.problem_type == "regression" or self.num_labels == 1:
            return F.mse_loss(logits.reshape(labels.shape), labels.float())
        return F.cross_entropy(logits, labels.long())


class MaeLmForTokenClassification(MaeLmPreTrainedModel):
    """Every token's vector -> dropout -> linear."""

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.encoder = MaeLmModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> TokenClassifierOutput | tuple[Tensor, ...]:
        """labels: (B, L) classes, -100 where no loss is wanted."""
        encoded = self.encoder(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten().long()) if labels is not None else None
        output = TokenClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output.to_tuple() if return_dict is False else output


class MaeLmForQuestionAnswering(MaeLmPreTrainedModel):
    """Two linear outputs per token: where the answer starts and ends. The first token stands for "no answer"."""

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__(config)
        self.encoder = MaeLmModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringModelOutput | tuple[Tensor, ...]:
        """start_positions, end_positions: (B,) tokens; one outside the sequence does not count. Padding cannot win."""
        encoded = self.encoder(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
        )
        logits = self.qa_outputs(encoded.last_hidden_state)
        if attention_mask is not None:
            logits = logits.masked_fill(~attention_mask.bool()[..., None], torch.finfo(logits.dtype).min)
        start, end = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = 0.5 * (self._loss(start.float(), start_positions) + self._loss(end.float(), end_positions))
        output = QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=encoded.hidden_states
        )
        return output.to_tuple() if return_dict is False else output

    @staticmethod
    def _loss(logits: Tensor, targets: Tensor) -> Tensor:
        outside = logits.shape[1]
        return F.cross_entropy(logits, targets.clamp(0, outside), ignore_index=outside)


for _class, _auto in (
    (MaeLmModel, "AutoModel"),
    (MaeLmForMaskedLM, "AutoModelForMaskedLM"),
    (MaeLmForSequenceClassification, "AutoModelForSequenceClassification"),
    (MaeLmForTokenClassification, "AutoModelForTokenClassification"),
    (MaeLmForQuestionAnswering, "AutoModelForQuestionAnswering"),
):
    _class.register_for_auto_class(_auto)  # save_pretrained then writes this file beside the weights
