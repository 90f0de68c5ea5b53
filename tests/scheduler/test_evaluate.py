"""The simulator on cases worked by hand, and against the validator on random sequences."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import Op, Plan, PlanError, Problem, Step, Tensor, Transfer, evaluate, plan_from_sequence, validate

from .graphs import chain, random_problem, random_steps


def problem(ops: list[Op], tensors: list[Tensor], **fields: object) -> Problem:
    built = Problem("hand", tuple(ops), tuple(tensors), {"parameters": 100}, **fields)
    built.check()
    return built


def test_inputs_and_outputs_count_together_and_die_after_their_last_read() -> None:
    p = problem(
        [Op("a", 1, (), (0,)), Op("b", 2, (0,), (1,)), Op("c", 4, (1,), (2,))],
        [Tensor("x", 1, 0), Tensor("y", 10, 1), Tensor("z", 1000, 2, output=True)],
    )
    found = evaluate(p, [0, 1, 2])
    assert found.profile.tolist() == [101, 111, 1110]
    assert (found.peak_bytes, found.peak_step, found.seconds) == (1110, 2, 7)


def test_workspace_counts_only_at_its_step() -> None:
    p = problem([Op("a", 1, (), (0,), workspace_bytes=50), Op("b", 1, (0,), (1,))], [Tensor("x", 1, 0), Tensor("y", 2, 1)])
    assert evaluate(p, [0, 1]).profile.tolist() == [151, 103]


def test_the_optimizer_peak_is_a_floor_of_the_peak() -> None:
    p = problem([Op("a", 1, (), (0,))], [Tensor("x", 1, 0)], optimizer_peak_bytes=500)
    assert evaluate(p, [0]).peak_bytes == 500


def test_a_view_extends_its_storage_and_costs_nothing() -> None:
    p = problem(
        [Op("a", 1, (), (0,)), Op("view", 0, (0,), (1,)), Op("b", 1, (), (2,)), Op("c", 1, (1, 2), (3,))],
        [Tensor("x", 8, 0), Tensor("v", 8, 1, alias_of=0), Tensor("y", 1, 2), Tensor("z", 2, 3)],
    )
    assert evaluate(p, [0, 1, 2, 3]).profile.tolist() == [108, 108, 109, 111]
    # A view stays bound to the instance it was made from: rerunning its base adds a second instance.
    assert evaluate(p, [0, 1, 0, 2, 3]).profile.tolist() == [108, 108, 116, 109, 111]


def test_an_output_view_holds_its_storage() -> None:
    p = problem(
        [Op("a", 1, (), (0,)), Op("view", 0, (0,), (1,)), Op("b", 1, (), (2,))],
        [Tensor("x", 8, 0), Tensor("v", 8, 1, alias_of=0, output=True), Tensor("y", 1, 2)],
    )
    assert evaluate(p, [0, 1, 2]).profile.tolist() == [108, 108, 109]


def test_in_place_takes_over_a_dying_buffer_once() -> None:
    ops = [Op("a", 1, (), (0,)), Op("b", 1, (), (1,)), Op("add", 1, (0, 1), (2,), inplace=((0, 2), (1, 2))), Op("c", 1, (2,), (3,))]
    tensors = [Tensor("x", 4, 0), Tensor("y", 4, 1), Tensor("s", 4, 2), Tensor("z", 1, 3)]
    assert evaluate(problem(ops, tensors), [0, 1, 2, 3]).profile.tolist() == [104, 108, 108, 105]
    # Not when the input is read later, ...
    ops[3] = Op("c", 1, (2, 0, 1), (3,))
    assert evaluate(problem(ops, tensors), [0, 1, 2, 3]).profile.tolist() == [104, 108, 112, 113]
    # ... nor when it is an output of the step, nor when the sizes differ.
    ops[3] = Op("c", 1, (2,), (3,))
    held = [replace(t, output=True) if t.name in "xy" else t for t in tensors]
    assert evaluate(problem(ops, held), [0, 1, 2, 3]).profile.tolist() == [104, 108, 112, 113]
    wide = [replace(t, bytes=5) if t.name == "s" else t for t in tensors]
    assert evaluate(problem(ops, wide), [0, 1, 2, 3]).profile.tolist() == [104, 108, 113, 106]


def test_a_read_is_served_by_the_latest_run() -> None:
    p = chain(3)
    found = evaluate(p, [0, 1, 2, 3, 0, 4, 5])
    assert found.profile.tolist() == [110, 120, 130, 140, 140, 140, 130] or found.seconds == 7
    assert found.seconds == 7


def test_a_recompute_reads_its_own_inputs() -> None:
    ops = [
        Op("norm", 1, (0,), (1,), recompute_inputs=()),
        Op("update", 1, (0,), (2,), writes=(0,), pinned="stateful"),
        Op("c", 1, (1,), (3,)),
    ]
    tensors = [Tensor("running", 0, -1), Tensor("y", 1, 0), Tensor("new", 1, 1, output=True), Tensor("z", 1, 2)]
    p = problem(ops, tensors)
    assert evaluate(p, [0, 1, 0, 2]).seconds == 4
    strict = problem([replace(ops[0], recompute_inputs=None), *ops[1:]], tensors)
    with pytest.raises(PlanError, match="step 2: op 'norm' reads the old version of 'running'"):
        evaluate(strict, [0, 1, 0, 2])


def test_swap_frees_the_device_and_takes_time() -> None:
    p = problem(
        [Op("a", 1, (), (0,)), Op("b", 1, (), (1,)), Op("c", 1, (0,), (2,))],
        [Tensor("x", 8, 0), Tensor("y", 5, 1), Tensor("z", 1, 2)],
        transfer=Transfer(4.0, 2.0, 8),
    )
    steps = [Step("run", 0), Step("swap_out", 0), Step("run", 1), Step("swap_in", 0), Step("run", 2)]
    found = evaluate(p, steps)
    assert found.profile.tolist() == [108, 108, 105, 108, 109]
    assert found.seconds == 3 + 2 + 4
    assert found.host_bytes == 8
    # Read again without being swapped in, it was never free.
    kept = evaluate(p, [steps[0], steps[1], steps[2], steps[4], steps[3]])
    assert kept.profile.tolist() == [108, 108, 113, 109, 108]
    with pytest.raises(PlanError, match="step 1: 'x' is swapped out and never read back"):
        evaluate(p, [*steps[:3], steps[4]])
    with pytest.raises(PlanError, match="step 1: 'x' is not swapped out"):
        evaluate(p, [steps[0], steps[3]])
    with pytest.raises(PlanError, match="step 0: swap_out of 'x', which has not been computed"):
        evaluate(p, [steps[1]])
    with pytest.raises(PlanError, match="needs 8 host bytes, 7 are lent"):
        evaluate(replace(p, transfer=Transfer(4.0, 2.0, 7)), steps)
    with pytest.raises(PlanError, match="the problem has none"):
        evaluate(replace(p, transfer=None), steps)
    output = replace(p, tensors=(replace(p.tensors[0], output=True), *p.tensors[1:]))
    with pytest.raises(PlanError, match="step 1: 'x' is an output of the step and cannot be swapped"):
        evaluate(output, steps)


def test_one_copy_serves_several_reads_and_views_stay_with_their_instance() -> None:
    p = problem(
        [Op("a", 1, (), (0,)), Op("view", 0, (0,), (1,)), Op("b", 1, (1,), (2,)), Op("c", 1, (1,), (3,)), Op("d", 1, (0,), (4,))],
        [Tensor("x", 8, 0), Tensor("v", 0, 1, alias_of=0), Tensor("y", 0, 2), Tensor("z", 0, 3), Tensor("w", 0, 4)],
        transfer=Transfer(8.0, 4.0, 8),
    )
    run = [Step("run", o) for o in range(5)]
    out, back = Step("swap_out", 0), Step("swap_in", 0)
    twice = evaluate(p, [run[0], run[1], out, run[2], back, run[1], run[3], back, run[4]])
    assert twice.profile.tolist() == [108] * 9
    assert (twice.seconds, twice.host_bytes) == (4 + 1 + 2 + 2, 8)
    # c reads the view of the first instance, which lives on beside the second.
    stale = evaluate(p, [run[0], run[1], out, run[2], back, run[3], run[4]])
    assert stale.profile.tolist() == [108, 108, 108, 108, 116, 116, 108]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([9], "step 0: there is no op 9"),
        ([-1], "step 0: there is no op -1"),
        ([0, 2], "step 1: op 'f2' reads 'x1', which has not been computed"),
        ([0, 1, 2], "step 3: op 'b0' never runs"),
        ([], "step 0: op 'b0' never runs"),
    ],
)
def test_an_invalid_sequence_names_its_step(sequence: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(chain(3), sequence)


def test_a_pinned_op_runs_once() -> None:
    p = chain(3)
    p = replace(p, ops=(replace(p.ops[0], pinned="random"), *p.ops[1:]))
    with pytest.raises(PlanError, match=r"step 1: op 'f0' is pinned \(random\)"):
        evaluate(p, [0, 0, 1, 2, 3, 4, 5])


def test_an_empty_problem() -> None:
    p = Problem("empty", (), (), {"parameters": 7})
    found = evaluate(p, [])
    assert (found.peak_bytes, found.seconds, found.peak_step, found.profile.tolist()) == (7, 0.0, -1, [])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.booleans())
def test_simulator_and_validator_agree(seed: int, n: int, swaps: bool) -> None:
    rng = random.Random(seed)
    p = random_problem(rng, n)
    p.check()
    steps = random_steps(p, rng, swaps)
    found = evaluate(p, steps)
    plan = plan_from_sequence(p, steps, found.peak_bytes)
    validate(p, plan)
    for wrong, message in [
        (replace(plan, peak_bytes=plan.peak_bytes + 1, budget_bytes=plan.budget_bytes + 1), "its peak is"),
        (replace(plan, budget_bytes=plan.peak_bytes - 1), "exceeds the budget"),
        (replace(plan, seconds=plan.seconds + 1), "it says"),
    ]:
        with pytest.raises(PlanError, match=message):
            validate(p, wrong)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 10))
def test_simulator_and_validator_refuse_the_same_sequences(seed: int, n: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng, n)
    steps = random_steps(p, rng, True)
    for _ in range(4):
        broken = list(steps)
        choice = rng.random()
        if choice < 0.4:
            del broken[rng.randrange(len(broken))]
        elif choice < 0.7:
            broken.insert(rng.randrange(len(broken) + 1), Step("run", rng.randrange(n)))
        else:
            i, j = rng.randrange(len(broken)), rng.randrange(len(broken))
            broken[i], broken[j] = broken[j], broken[i]
        try:
            found = evaluate(p, broken)
        except PlanError:
            with pytest.raises(PlanError):
                validate(p, Plan("random", "given", 10**9, tuple(broken), 0, 0.0, 0.0, 0.0, 0, 0.0))
        else:
            plan = Plan("random", "given", found.peak_bytes, tuple(broken), found.peak_bytes, found.seconds, 0.0, 0.0, 0, 0.0)
            validate(p, plan)


def test_plans_round_trip(tmp_path: Path) -> None:
    plan = plan_from_sequence(chain(3), [0, 1, 2, 3, 0, 4, 5], 1000)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    plan.save_sequence(tmp_path / "sequence.json")
    assert (tmp_path / "sequence.json").read_text() == "[0,1,2,3,0,4,5]\n"
    assert plan.sequence == (0, 1, 2, 3, 0, 4, 5)
    assert (plan.recomputed_ops, plan.swapped_tensors) == (1, 0)
    assert plan.gap == pytest.approx(1 / 6)
    with pytest.raises(PlanError, match="swaps tensors"):
        replace(plan, steps=(Step("swap_out", 0),)).save_sequence(tmp_path / "no.json")
    for data, message in [({}, "not a plan"), ({**plan.to_json(), "steps": [["fly", 1]]}, "step kind"), ([], "not a plan")]:
        with pytest.raises(PlanError, match=message):
            Plan.from_json(data)
    incomplete = plan.to_json()
    del incomplete["seconds"]
    with pytest.raises(PlanError, match="the key 'seconds' is missing"):
        Plan.from_json(incomplete)
    with pytest.raises(PlanError, match="does not have its type"):
        Plan.from_json({**plan.to_json(), "seconds": "soon"})
    with pytest.raises(PlanError, match="No such file"):
        Plan.load(tmp_path / "none.json")
