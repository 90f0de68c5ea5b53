"""Every gradient rule against torch's autograd and against finite differences of the operator itself."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest

from onnxremat.autodiff import Vjp, registered
from tests.autodiff.ops_activations import ROWS as ACTIVATIONS
from tests.autodiff.ops_einsum import ROWS as EINSUM
from tests.autodiff.ops_elementwise import ROWS as ELEMENTWISE
from tests.autodiff.ops_indexing import ROWS as INDEXING
from tests.autodiff.ops_linalg import ROWS as LINALG
from tests.autodiff.ops_microsoft import ROWS as MICROSOFT
from tests.autodiff.ops_nn import ROWS as NN
from tests.autodiff.ops_normalization import ROWS as NORMALIZATION
from tests.autodiff.ops_pooling import ROWS as POOLING
from tests.autodiff.ops_recurrent import ROWS as RECURRENT
from tests.autodiff.ops_reduction import ROWS as REDUCTION
from tests.autodiff.ops_resample import ROWS as RESAMPLE
from tests.autodiff.ops_sequences import ROWS as SEQUENCES
from tests.autodiff.ops_shape import ROWS as SHAPE
from tests.autodiff.support import Row, assert_close, difference_gradients, engine_gradients, torch_gradients

ROWS = [
    *(*ELEMENTWISE, *REDUCTION, *SHAPE, *INDEXING, *LINALG, *NN, *NORMALIZATION),
    *(*EINSUM, *RECURRENT, *MICROSOFT, *ACTIVATIONS, *POOLING, *RESAMPLE, *SEQUENCES),
]
PARAMETERS = [pytest.param(row, id=row.name) for row in ROWS]
DIFFERENCES = [pytest.param(row, id=row.name) for row in ROWS if not row.no_difference]


def test_every_rule_has_a_row() -> None:
    rules = {key for key, state in registered().items() if isinstance(state, Vjp)}
    assert len(rules) > 60
    tested = {(row.domain, row.op) for row in ROWS}
    # The training form of BatchNormalization becomes this operator, whose row goes through normalize.
    tested.add(("com.microsoft", "BatchNormInternal"))
    assert any(row.normalized and row.op == "BatchNormalization" and row.attributes.get("training_mode") for row in ROWS)
    assert sorted(rules - tested) == []


def test_row_names_are_unique() -> None:
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


@pytest.mark.parametrize("row", PARAMETERS)
def test_gradient_equals_torch(row: Row) -> None:
    single = engine_gradients(row, ir.DataType.FLOAT)
    assert single is not None
    # Attributes such as epsilon are float32 in either case.
    cases = [("float32", single, 3e-5)]
    double = None if row.float32_only else engine_gradients(row, ir.DataType.DOUBLE)
    if double is not None:
        cases.append(("float64", double, 1e-8))
    for dtype, (outputs, gradients, fetched), tolerance in cases:
        expected_outputs, expected = torch_gradients(row, fetched)
        for index, (y, wanted) in enumerate(zip(outputs, expected_outputs, strict=True)):
            assert_close(y, wanted, tolerance, f"{dtype} output {index}")
        assert gradients.keys() == expected.keys() and expected
        for index, wanted in expected.items():
            assert_close(gradients[index], wanted, tolerance, f"{dtype} gradient of input {index}")


@pytest.mark.parametrize("row", DIFFERENCES)
def test_gradient_equals_finite_differences(row: Row) -> None:
    dtype, expected = difference_gradients(row)
    found = None if row.float32_only else engine_gradients(row, ir.DataType.DOUBLE)
    precise = found is not None and dtype == ir.DataType.DOUBLE
    found = found or engine_gradients(row, ir.DataType.FLOAT)
    assert found is not None
    tolerance = 1e-7 if precise else (3e-5 if dtype == ir.DataType.DOUBLE else row.tolerance)
    for index, wanted in expected.items():
        assert_close(found[1][index], wanted, tolerance, f"gradient of input {index} against differences in {dtype}")
