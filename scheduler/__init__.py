"""Problem -> Plan: schedules a training step within a memory budget by recomputing and reordering; knows neither onnx nor torch.

Importing it loads numpy and nothing heavier; scipy is imported by the strategies that need it, when they run.  The functions
``compare``, ``evaluate``, ``solve``, ``validate`` and ``strategies`` hide the modules of the same name behind them; ``from .evaluate import
...`` works.
"""

from __future__ import annotations

from .bounds import bytes_floor, seconds_floor
from .compare import Outcome, compare
from .errors import Infeasible, PlanError, ProblemError, StrategyError
from .evaluate import Evaluation, evaluate
from .plan import Plan, Step
from .problem import Op, Problem, Tensor, Transfer
from .solve import lower_bound, minimum_budget, plan_from_sequence, smallest_plan, solve
from .strategies import Context, Progress, distinct_strategies, register, strategies
from .swap import Lowered, lower
from .validate import validate

__all__ = [
    "Context",
    "Evaluation",
    "Infeasible",
    "Lowered",
    "Op",
    "Outcome",
    "Plan",
    "PlanError",
    "Problem",
    "ProblemError",
    "Progress",
    "Step",
    "StrategyError",
    "Tensor",
    "Transfer",
    "bytes_floor",
    "compare",
    "distinct_strategies",
    "evaluate",
    "lower",
    "lower_bound",
    "minimum_budget",
    "plan_from_sequence",
    "register",
    "seconds_floor",
    "smallest_plan",
    "solve",
    "strategies",
    "validate",
]
