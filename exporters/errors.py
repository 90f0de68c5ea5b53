"""The one error that leaves this folder."""

from __future__ import annotations

__all__ = ["ExportError"]


class ExportError(Exception):
    """A model that cannot be turned into a faithful forward graph.

    The message is one line: what was being looked at, why it is refused, and the way out.
    """

    def __init__(self, what: str, why: str, way_out: str = "") -> None:
        """Joins the three parts into one line, whatever line breaks they bring along."""
        parts = [" ".join(part.split()) for part in (what, why, way_out)]
        self.what, self.why, self.way_out = parts
        super().__init__(f"{self.what}: {self.why}" + (f"; {self.way_out}" if self.way_out else ""))

    def at(self, line: str) -> ExportError:
        """The same with a place in the user's code, as ``user_line`` writes it, where it names none yet."""
        return self if " at " in self.what else ExportError(self.what + line, self.why, self.way_out)

    def __reduce__(self) -> tuple[type[ExportError], tuple[str, str, str]]:
        """Pickles by the three parts, so that the error survives a process boundary."""
        return ExportError, (self.what, self.why, self.way_out)
