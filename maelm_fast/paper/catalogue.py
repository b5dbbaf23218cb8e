"""What each figure and table of the paper needs: which models are pretrained, and what is then done with them.

A row is one line of the table or one curve of the figure. Rows of one configuration, also of other experiments, share
one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maelm_fast.errors import unknown
from maelm_fast.paper import printed
from maelm_fast.paper.printed import PaperTable


@dataclass(frozen=True)
class Row:
    """A model to pretrain: variants (presets.variant) of a setting of the scale, none for MAE-LM itself."""

    label: str
    variants: tuple[str, ...] = ()
    setting: str = "base"
    group: str = ""
    printed: str = ""
    """The paper's number of this row, where it has a single one."""

    @property
    def title(self) -> str:
        """The label, with the setting where it is not base: tables have one label in several."""
        return self.label if self.setting == "base" else f"{self.label}, {self.setting}"


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    rows: tuple[Row, ...]
    use: Literal["nothing", "scores", "checkpoints", "ranks", "prompting"] = "nothing"
    """What is done downstream. scores: fine-tuning on every task; checkpoints: on the first task there is, from every
    checkpoint; both with a randomly initialised encoder beside the models. ranks: fine-tuning on the first task there
    is, and effective ranks after it. prompting: zero-shot and few-shot."""
    tasks: tuple[str, ...] = ()
    wanted: str = ""
    """The paper's quantities that need the tasks, as the beginning of a sentence."""
    instead: str = ""
    """What there is without them, a sentence."""
    table: PaperTable | None = None
    notes: tuple[str, ...] = ()

    @property
    def separable(self) -> bool:
        """Whether each row says something without the others: ablations and sweeps, which are long."""
        return len(self.rows) > 3

    @property
    def one_task(self) -> bool:
        """Whether the first of the tasks that is there is the only one."""
        return self.use in ("checkpoints", "ranks")


GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")
"""In the order of the paper's columns."""
_ALL = (*GLUE, "squad_v2")
FIRST_CHOICES = ("mnli", "qnli", "sst2", "qqp", "mrpc", "cola", "rte", "stsb")
"""MNLI, as in the paper, and what takes its place, best first: more data and less noise."""
_MLM = Row("MLM", ("mlm",))
_MAE_LM = Row("MAE-LM")
_TABLE_2_VARIANTS = (
    "- mlm enc_mask_dec dec_resets_mask random_replace misaligned no_relative self_cross causal_cross cross "
    "decoder_2_layers decoder_6_layers decoder_512 decoder_1024"
).split()
_LARGE = (Row("RoBERTa", ("mlm",), "large++", "large++"), Row("MAE-LM", (), "large++", "large++"))


def _table_2() -> tuple[Row, ...]:
    lines = [(group, *row) for group, rows in printed.TABLE_2.groups for row in rows]
    return tuple(
        Row(label, () if variant == "-" else (variant,), group=group, printed=glue)
        for (group, label, glue), variant in zip(lines, _TABLE_2_VARIANTS, strict=True)
    )


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "fig1",
            "Figure 1: effective rank in an MLM-pretrained model, by layer",
            (_MLM,),
            notes=("The paper measures the released RoBERTa base; here the MLM is pretrained by this command.",),
        ),
        Experiment(
            "fig3",
            "Figure 3: intermediate checkpoints against pretraining time",
            (_MLM, _MAE_LM),
            use="checkpoints",
            tasks=FIRST_CHOICES,
            wanted="The paper's quantity, MNLI accuracy of fine-tuned checkpoints, is",
            instead="In its place stand validation loss and effective rank.",
        ),
        Experiment(
            "fig4",
            "Figure 4: share delta of the [MASK] tokens that the encoder sees",
            (Row("0"), *(Row(delta, (f"delta_{delta}",)) for delta in ("0.25", "0.5", "0.75", "1"))),
            use="scores",
            tasks=_ALL,
            wanted="The paper's quantities, GLUE average and SQuAD EM, are",
        ),
        Experiment(
            "fig5",
            "Figure 5: effective rank of MLM and MAE-LM, by layer",
            (_MLM, _MAE_LM),
            use="ranks",
            tasks=FIRST_CHOICES,
            wanted="Figure 5(b), ranks after fine-tuning on MNLI, is",
        ),
        Experiment(
            "fig6",
            "Figure 6: effective rank in a model pretrained with BERT's masking, by layer",
            (Row("MLM, BERT masking", ("bert_masking",)),),
        ),
        Experiment(
            "table1",
            "Table 1: MLM and MAE-LM in the base and base++ settings",
            (
                Row("RoBERTa (Ours)", ("mlm",), group="base"),
                Row("MAE-LM", group="base"),
                Row("MAE-LM", setting="base++", group="base++"),
            ),
            use="scores",
            tasks=_ALL,
            wanted="GLUE and SQuAD results of our own are",
            table=printed.TABLE_1,
        ),
        Experiment(
            "table2",
            "Table 2: ablations",
            _table_2(),
            use="scores",
            tasks=GLUE,
            wanted="The GLUE column of our own is",
            table=printed.TABLE_2,
        ),
        Experiment(
            "table6",
            "Table 6: large models",
            _LARGE,
            use="scores",
            tasks=_ALL,
            wanted="GLUE and SQuAD results of our own are",
            table=printed.TABLE_6,
            notes=("The paper takes its RoBERTa and BART numbers from their authors; here an MLM is pretrained.",),
        ),
        Experiment(
            "table7",
            "Table 7: zero-shot and few-shot prompting",
            _LARGE,
            use="prompting",
            tasks=GLUE,
            wanted="All three groups of results of our own are",
            instead="Here is the pretraining of the pair to be compared.",
            table=printed.TABLE_7,
            notes=("The paper takes its RoBERTa numbers from Gao et al. (2021); here an MLM is pretrained.",),
        ),
    )
}


def get(name: str) -> Experiment:
    """The experiment of that name, or UserError listing the names there are."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]
