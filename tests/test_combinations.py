"""The covering array of ``benchmarks.combinations``, and how its results are resumed."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.combinations import FACTORS, covering_array, exists, finished
from onnxremat.files import write_json


def test_every_pair_that_exists_is_met_and_no_other() -> None:
    chosen = covering_array(FACTORS, exists)
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(c[a], c[b]) for c in chosen}
        refused = {("swap", "onnxruntime"), ("both", "onnxruntime")}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b])) - refused
    assert len(chosen) <= 24, "every model meets every budget: 16 at least, and the array is small because it is about 20"
    assert covering_array(FACTORS, exists) == chosen


def test_two_factors_give_their_product_and_three_give_less() -> None:
    assert len(covering_array({"a": "01", "b": "012"})) == 6
    assert len(covering_array({"a": "012", "b": "012", "c": "012"})) < 27 / 2


def test_a_result_is_taken_up_unless_its_settings_differ_or_it_failed(tmp_path: Path) -> None:
    path, settings = tmp_path / "result.json", {"size": "quick"}
    assert finished(path, settings) is None
    write_json(path, {"settings": settings, "result": {"different": []}})
    assert finished(path, settings) == {"different": []}
    assert finished(path, {"size": "full"}) is None
    write_json(path, {"settings": settings, "result": {"error": "killed"}})
    assert finished(path, settings) is None
