"""Bytes and budgets as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import UsageError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

#: Longer ones are slips of a finger.
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]+)?"


def parse_bytes(text: str) -> int:
    """``"512MiB"`` -> 536870912. Accepts B, KiB, MiB, GiB, TiB and the decimal kB, MB, GB, TB; raises UsageError."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"'{text}' is not a size: write a number with a unit, such as 512MiB or 1.5GiB")
    return int(float(match.group(1)) * unit)


def format_bytes(count: float) -> str:
    """``536870912`` -> ``"512.0 MiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget before the model is known.

    Attributes:
        size: bytes, or a fraction of the unscheduled step's peak.
        relative: ``size`` is a fraction.
        activations_only: the fraction applies to what is not resident (activations and workspace), the resident part is added whole.
        smallest: the smallest budget that can be found; the others do not count.
    """

    size: float
    relative: bool = False
    activations_only: bool = False
    smallest: bool = False

    @classmethod
    def parse(cls, text: str, activations_only: bool = False) -> Budget:
        """``"512MiB"``, ``"60%"`` or ``"min"``; raises UsageError for anything else, and for activation budgets that are a size."""
        if text.strip() == "min":
            return cls(0.0, smallest=True)
        match = re.fullmatch(rf"\s*({_NUMBER})\s*%\s*", text)
        if match:
            share = float(match.group(1)) / 100
            if not share > 0:
                raise UsageError(f"a budget of '{text}' leaves no memory: give more than 0%")
            return cls(share, relative=True, activations_only=activations_only)
        if activations_only:
            raise UsageError(f"--activation-budget takes a percentage such as 50%, or min, not '{text}'; use --budget for a size")
        try:
            size = parse_bytes(text)
        except UsageError as error:
            raise UsageError(f"'{text}' is not a budget: write a size such as 512MiB, a share such as 60%, or min") from error
        if size == 0:
            raise UsageError(f"a budget of '{text}' leaves no memory: give a positive size")
        return cls(size)

    def resolve(self, resident_bytes: int, peak_unscheduled_bytes: int) -> int:
        """The budget in bytes for a step that holds ``resident_bytes`` throughout and peaks at ``peak_unscheduled_bytes`` unscheduled."""
        if self.smallest:
            raise UsageError("the smallest budget is not known beforehand: give a size or a percentage here")
        if not self.relative:
            return int(self.size)
        if self.activations_only:
            return resident_bytes + int(self.size * (peak_unscheduled_bytes - resident_bytes))
        return int(self.size * peak_unscheduled_bytes)

    def __str__(self) -> str:
        if self.smallest:
            return "min"
        if not self.relative:
            return format_bytes(self.size)
        return f"{self.size * 100:g}%" + (" of activations" if self.activations_only else "")
