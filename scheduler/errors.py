"""The errors of the scheduler; every message is one line that says what is wrong and, where there is one, the way out."""

from __future__ import annotations

__all__ = ["Infeasible", "PlanError", "ProblemError", "StrategyError"]


class ProblemError(ValueError):
    """A problem that is not well formed: cyclic, dangling, out of order, negative, not a number."""


class PlanError(ValueError):
    """A sequence of steps that cannot run, or a plan that does not keep what it says."""


class StrategyError(ValueError):
    """A strategy that does not exist, or that cannot work on this problem (too large, package missing)."""


class Infeasible(Exception):
    """No plan was found within the budget.

    Attributes:
        minimum_budget_bytes: the smallest budget for which a plan was found, bytes.
        lower_bound_bytes: a proven floor: no plan exists below it, bytes.
        strategy: the strategy that was asked.
    """

    def __init__(self, minimum_budget_bytes: int, lower_bound_bytes: int, strategy: str, budget_bytes: int = 0) -> None:
        self.minimum_budget_bytes = minimum_budget_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.strategy = strategy
        self.budget_bytes = budget_bytes
        if minimum_budget_bytes <= budget_bytes:
            super().__init__(
                f"strategy {strategy} finds no plan within {budget_bytes} bytes, but one of {minimum_budget_bytes} bytes exists; use auto"
            )
            return
        proof = "proven" if budget_bytes < lower_bound_bytes else "none found"
        super().__init__(
            f"budget {budget_bytes} bytes is infeasible ({proof}, strategy {strategy}): "
            f"the smallest feasible budget found is {minimum_budget_bytes} bytes, none exists below {lower_bound_bytes} bytes"
        )

    def __reduce__(self) -> tuple[type[Infeasible], tuple[int, int, str, int]]:
        return type(self), (self.minimum_budget_bytes, self.lower_bound_bytes, self.strategy, self.budget_bytes)
