"""Indices that an embedding looks up, in export and in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import onnxremat
from onnxremat.errors import UsageError
from onnxremat.exporters import ExportError, InputSpec, export_torch
from onnxremat.runtime.trainer import Trainer


class Tagger(nn.Module):
    """Tokens and segments with tables of their own, and offsets that count from the end on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.segments = nn.Embedding(50, 8), nn.Embedding(3, 8)
        self.biases = nn.Parameter(torch.randn(7, 8))

    def forward(self, ids: torch.Tensor, segments: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids.reshape(-1).long()) + self.segments(segments).reshape(-1, 8) + self.biases[offsets].reshape(-1, 8)


class Columns(nn.Module):
    """Each column of the input has a table of its own, and the last is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, 4) for rows in (9, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (table(x[:, i]) for i, table in enumerate(self.tables))
        return torch.cat([first, second, x[:, 2:].float()], 1)


def specs(high: int = 50) -> list[InputSpec]:
    return [InputSpec.parse(text) for text in (f"ids=2x4:int32:{high}", "segments=2x4:int64:3", "offsets=2x4:int64:7")]


def test_tables_that_inputs_are_looked_up_in_are_known() -> None:
    assert export_torch(Tagger(), specs(), loss="mse").source["table_rows"] == {"ids": 50, "segments": 3}


def test_of_columns_with_tables_of_their_own_nothing_is_said() -> None:
    """Rows of one are none of the other: a bound for the whole input would refuse what is right."""
    assert export_torch(Columns(), [InputSpec.parse("x=6x3:int64:9")], loss="mse").source["table_rows"] == {}


def test_indices_drawn_beyond_the_table_are_refused() -> None:
    with pytest.raises(ExportError, match=r"input ids: they are drawn from \[0, 51\), and .* a table of 50 rows; write ids=2x4:int32:50"):
        export_torch(Tagger(), specs(51), loss="mse")


def test_a_batch_with_indices_that_are_no_row(tmp_path: Path) -> None:
    """torch refuses them as well; the kernel would count -1 from the end, as the last row.  Where torch counts from the end, so does the step."""
    artifact = onnxremat.compile(Tagger(), tmp_path / "tagger", inputs=specs(), loss="mse", budget="100%", costs="analytic", verify=False)
    trainer = Trainer(artifact, capped=False)
    batch = {spec.name: spec.sample(np.random.default_rng(0)) for spec in (*artifact.inputs, *artifact.labels)}
    for name, value, rows in (("ids", -1, 50), ("ids", 50, 50), ("segments", 3, 3)):
        wrong = batch[name].copy()
        wrong[1, 2] = value
        with pytest.raises(UsageError, match=f"'{name}' has the value {value}, and the model looks it up in a table of {rows} rows: mend the data"):
            trainer.train_step({**batch, name: wrong})
    assert trainer.evaluate({**batch, "offsets": batch["offsets"] - 7})[0] == trainer.evaluate(batch)[0]
