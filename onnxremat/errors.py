"""What can go wrong, each with the exit code that the command line returns for it."""

from __future__ import annotations

OK, ERROR, USAGE, INFEASIBLE, VERIFICATION_FAILED = range(5)


class OnnxRematError(Exception):
    """A failure with a one-line explanation: what, why, and the way out."""

    exit_code = ERROR


class UsageError(OnnxRematError):
    """An option or argument that makes no sense."""

    exit_code = USAGE


class DifferentiationError(OnnxRematError):
    """The backward graph can't be derived; names the node and the reason."""


class ArtifactError(OnnxRematError):
    """An artifact folder is missing, incomplete or does not match its manifest."""


class RuntimeUnavailable(OnnxRematError):
    """ONNX Runtime is missing, is the wrong package, or lacks what the artifact needs."""


class OutOfBudget(OnnxRematError):
    """The capped arena refused an allocation during a step: the step would have exceeded the budget."""


class SpillUnavailable(OnnxRematError):
    """The operators that swap to a file can't be had on this machine."""


class SpillFailed(OnnxRematError):
    """A tensor could not be written to the disk or read back, and the step was stopped."""


class BudgetInfeasible(OnnxRematError):
    """No plan was found within the budget.

    Attributes:
        minimum_budget_bytes: the smallest budget (bytes, everything the step holds) for which a plan was found.
    """

    exit_code = INFEASIBLE

    def __init__(self, message: str, minimum_budget_bytes: int) -> None:
        super().__init__(message)
        self.minimum_budget_bytes = minimum_budget_bytes


class VerificationFailed(OnnxRematError):
    """The rescheduled graph's numbers differ from the reference."""

    exit_code = VERIFICATION_FAILED


def explain(error: Exception) -> tuple[int, Exception]:
    """Exit code and message of an error that another layer than ours raised."""
    if type(error).__module__.startswith("onnxremat."):
        return ERROR, error  # exporters and scheduler have one-line errors of their own
    if isinstance(error, OSError):
        return ERROR, OnnxRematError(f"{error.filename or 'reading or writing failed'}: {error.strerror or error}")
    if isinstance(error, MemoryError):
        return ERROR, OnnxRematError("out of memory while compiling: use a smaller batch, or a machine with more memory")
    return ERROR, OnnxRematError(
        f"internal error ({type(error).__name__}: {' '.join(str(error).split())[:300]}); run again with --debug and report it"
    )
