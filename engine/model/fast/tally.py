"""What was fused and what was not, for the log."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """One piece's candidates. refused: names of modules, and why each was left unchanged."""

    fused: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, refusal: str | None) -> None:
        """Count a candidate. refusal: why it was left unchanged; None: it was fused."""
        if refusal is None:
            self.fused += 1
        else:
            self.refused.append((name, refusal))

    @property
    def found(self) -> int:
        return self.fused + len(self.refused)


@dataclass(slots=True)
class FusedReport:
    """The pieces, in the order in which they were applied. taken_back: why all pieces were undone, if the check of the
    whole model failed. num_packed: how many products have weights in a layout for this processor. packed_bytes: the
    bytes of these weights before, which the layout takes about as well."""

    pieces: dict[str, Tally] = field(default_factory=dict)
    taken_back: str | None = None
    num_packed: int = 0
    packed_bytes: int = 0

    def __str__(self) -> str:
        if self.taken_back is not None:
            return f"none: {self.taken_back}"
        found = [f"{name} {tally.fused}/{tally.found}" for name, tally in self.pieces.items() if tally.found]
        return ", ".join([*found, *([f"packed {self.num_packed}"] if self.num_packed else [])])
