"""The model card (README.md) of an export: what it is for, how it is used, what it was trained on and how far it came.

It says what the run's own files say, and what they do not say, its licence above all, it calls unstated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast.data.token_store import Manifest
from maelm_fast.errors import UserError
from maelm_fast.export.mapping import own_holds_all
from maelm_fast.training.rundir import LoadedRun, RunRecord


@dataclass(frozen=True)
class About:
    """What only whoever exports knows. metrics: rows of the run's metrics.jsonl. license: of the weights, as the hub
    spells licences ("apache-2.0"). repo: where the export will be found; None for the directory itself."""

    metrics: Iterable[Mapping[str, Any]] = ()
    license: str | None = None
    repo: str | None = None


def card(run: LoadedRun, format: str, architecture: str, about: About) -> str:
    """README.md of an export of `run` in `format`, whose class in config.json is `architecture`."""
    fills = architecture.endswith("ForMaskedLM")
    front = ["library_name: transformers", f"pipeline_tag: {'fill-mask' if fills else 'feature-extraction'}"]
    front += [f"license: {about.license}"] if about.license else []
    parts = [
        "\n".join(["---", *front, "tags: [maelm_fast]", "---"]),
        f"A text encoder pretrained with maelm_fast by {_objective(run)}.",
        "## What it is for\n\n" + _purpose(run, format, fills),
        "## Use\n\n" + _use(run, format, fills, about.repo or "."),
        "## How far it came\n\n" + _metrics(run, about.metrics),
        "## Data and licence\n\n" + _data(run.record) + "\n\n" + _license(about.license),
        "## Details\n\n" + _table(_details(run, architecture)),
    ]
    return "\n\n".join(parts) + "\n"


def _objective(run: LoadedRun) -> str:
    model, masking = run.config.model, run.config.masking
    if model.decoder == "none":
        return "masked language modelling"
    if masking.shown or masking.policy == "random" or model.decoder == "causal_cross":
        return "an ablation of MAE-LM (arXiv 2302.02060), which the details below describe"
    return "MAE-LM (arXiv 2302.02060): masked tokens are removed from its input and predicted by a decoder"


def _purpose(run: LoadedRun, format: str, fills: bool) -> str:
    text = (
        "To be fine-tuned: sequence classification, token classification, question answering, sentence embeddings. As "
        "it is, without fine-tuning, its vectors are those of a masked language model."
    )
    if fills:
        return f"{text} It also fills in `<mask>`, as in pretraining."
    why = (
        "the network that predicted masked tokens is not part of this directory, and AutoModelForMaskedLM would put "
        "random weights in its place"
    )
    other = ""
    if format != "own" and own_holds_all(run.config):
        other = " (`maelm-fast export RUN --format own` writes it)"
    return f"{text}\n\n**Not for fill-mask:** {why}{other}."


def _use(run: LoadedRun, format: str, fills: bool, name: str) -> str:
    own = format == "own"
    trust = ", trust_remote_code=True" if own else ""
    lines = [
        "```python",
        "import torch",
        f"from transformers import AutoModel, AutoTokenizer{', pipeline' if fills else ''}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = AutoModel.from_pretrained("{name}"{trust})',
        'batch = tokenizer(["A sentence.", "Another one."], padding=True, return_tensors="pt")',
        "with torch.no_grad():",
        "    vectors = model(**batch).last_hidden_state  # (2, length, hidden size); ignore those of padding",
    ]
    if fills:
        lines += ["", f'fill = pipeline("fill-mask", model="{name}"{trust})', 'print(fill("the <mask> is here."))']
    notes = [
        f"Inputs have at most {run.config.model.max_positions} tokens. For fine-tuning there are "
        "AutoModelForSequenceClassification, AutoModelForTokenClassification and AutoModelForQuestionAnswering, whose "
        "heads start from random values."
    ]
    if own:
        notes.append(
            "The architecture is not part of transformers: its code is `modeling_maelm.py` beside this file, hence "
            "`trust_remote_code=True`. Where maelm_fast is installed, `import "
            "maelm_fast.integrations.transformers.modeling` makes it known, and the argument is not needed."
        )
    elif format == "layoutlmv3":
        notes.append("It is a text encoder in the LayoutLMv3 class: no boxes, no images; their tables are zeros.")
    else:
        notes.append(
            "A pooler, where a class has one, is not part of the pretrained model and starts from random values."
        )
    return "\n".join([*lines, "```"]) + "\n\n" + "\n\n".join(notes)


def _metrics(run: LoadedRun, metrics: Iterable[Mapping[str, Any]]) -> str:
    """Of the last evaluation that the checkpoint had seen."""
    optim = run.config.optim
    rows = {"steps": f"{run.step:,} of {optim.max_steps:,}, of {optim.batch_size:,} sequences each"}
    known = [row for row in metrics if row["step"] <= run.step]
    if tokens := max((row.get("tokens") or 0 for row in known), default=0):
        rows["tokens"] = f"{tokens:,}, visible and masked"
    evaluated = next((row for row in reversed(known) if row.get("val_loss") is not None), None)
    if evaluated is None:
        return _table(rows) + "\n\nThe run's validation loss is not known here."
    where = "" if evaluated["step"] == run.step else f", at step {evaluated['step']:,}"
    rows["validation loss"] = f"{evaluated['val_loss']:.4f} nats per masked token{where}"
    if evaluated.get("val_accuracy") is not None:
        rows["validation accuracy"] = f"{evaluated['val_accuracy']:.2%} of the masked tokens"
    if evaluated.get("unigram_nats") is not None:
        rows["for comparison"] = f"{evaluated['unigram_nats']:.4f} nats, for a model that knows token frequencies alone"
    return _table(rows)


def _data(record: RunRecord) -> str:
    store = f"Pretrained on the token store `{Path(record.data).name}`"
    short = record.data_fingerprint[:12]
    try:
        manifest = Manifest.read(Path(record.data))
    except UserError:
        manifest = None
    if manifest is None or manifest.fingerprint != record.data_fingerprint:
        return (
            f"{store} (fingerprint `{record.data_fingerprint[:12]}`), which is not where it was: its texts are unknown."
        )
    train = manifest.splits["train"]
    inputs = [str(source["source"]) for source in manifest.options["inputs"]]
    sources = [name if name.startswith("hf:") else Path(name).name for name in inputs]
    shown = ", ".join(f"`{source}`" for source in sources[:5]) + (" ..." if len(sources) > 5 else "")
    return f"{store} (fingerprint `{short}`): {train.tokens:,} tokens from {shown}."


def _license(license: str | None) -> str:
    if license:
        return f"The weights' licence, as their publisher states it: {license}."
    return (
        "The weights' licence is not stated: that is for their publisher to do (`maelm-fast export --license`), who "
        "has to look at the texts'."
    )


def _details(run: LoadedRun, architecture: str) -> dict[str, str]:
    model, masking = run.config.model, run.config.masking
    bias = "none"
    if model.relative_bias != "none":
        bias = f"{model.relative_bias}, {model.relative_buckets} buckets up to distance {model.relative_max_distance}"
    decoder = "none: the encoder itself was trained on [MASK], as RoBERTa is"
    if model.decoder != "none":
        width = model.decoder_config.hidden_size
        layers = f"{model.decoder_layers} layer{'' if model.decoder_layers == 1 else 's'} of {width}"
        decoder = f"{model.decoder}, {layers}, used in pretraining only"
    falling = "" if masking.rate_end is None else f", falling to {masking.rate_end:g},"
    return {
        "architecture": architecture,
        "encoder": f"{model.num_layers} layers of {model.hidden_size}, {model.num_heads} heads, "
        f"feed-forward {model.ffn_size}",
        "positions": f"{model.max_positions}, learned, {model.positions} in pretraining",
        "relative position bias": bias,
        "decoder": decoder,
        "vocabulary": f"{model.vocab_size:,} tokens, byte-level BPE",
        "masking": f"{masking.rate:g}{falling} of the tokens, policy {masking.policy}, {masking.shown:g} shown",
        "preset": run.record.preset,
    }


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
