"""What each node costs: measured on this machine, or from a model of another."""

from .analytic import Machine, analytic_costs
from .measured import measured_costs

__all__ = ["Machine", "analytic_costs", "measured_costs"]
